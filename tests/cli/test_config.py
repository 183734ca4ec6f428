"""Resolving flags, variables, the model's defaults and built-ins."""

from __future__ import annotations

import argparse
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from gnomon import config as c


def resolve(*argv: str, **environ: str) -> c.Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    c.add_arguments(parser, c.SERVE)
    return c.resolve(parser.parse_args(argv), environ)


def test_built_in_values():
    config = resolve()
    assert (config.engine.batch, config.engine.queue, config.engine.prefill_chunk) == (8, 64, 2048)
    assert (config.http.host, config.http.port, config.http.preparation_queue) == ("127.0.0.1", 8080, 64)
    assert config.http.shutdown_timeout == 120.0
    assert config.engine.memory_budget is None
    curve = config.sampling.hlg
    assert (curve.width, curve.shoulder, curve.toe, curve.pivot_offset) == (4, 4, 6, 6)
    params = config.sampling.params(thinking=False)
    assert (params.temperature, params.top_p, params.top_k, params.hlg) == (0.7, 0.0, 0, None)
    assert str(config.origin("engine", "batch")) == "built-in"


def test_flag_over_variable_over_built_in():
    config = resolve("--batch", "2", GNOMON_BATCH="3", GNOMON_QUEUE="9")
    assert (config.engine.batch, config.engine.queue) == (2, 9)
    assert str(config.origin("engine", "batch")) == "--batch"
    assert str(config.origin("engine", "queue")) == "GNOMON_QUEUE"


def test_both_ways_of_writing_a_flag():
    assert resolve("--batch=2").engine == resolve("--batch", "2").engine


@pytest.mark.parametrize(
    ("argv", "group", "name", "value", "origin"),
    [
        (["--temp", "0.5"], "sampling", "temperature", 0.5, "--temp"),
        (["--temperature", "0.5", "--temp", "1"], "sampling", "temperature", 0.5, "--temperature"),
        (["--temp", "1", "--temperature", "0.5"], "sampling", "temperature", 0.5, "--temperature"),
        (["--decode-concurrency", "3"], "engine", "batch", 3, "--decode-concurrency"),
        (["--batch", "2", "--decode-concurrency", "3"], "engine", "batch", 2, "--batch"),
        (["-q", "smol"], "model", "query", "smol", "-q"),
        (["smol"], "model", "query", "smol", "argument"),
        (["--port", "--batch", "2"], "http", "port", 8080, "built-in"),
        (["--no-pipeline"], "engine", "pipeline", False, "--no-pipeline"),
        (["--hlg-sampling"], "sampling", "hlg_sampling", True, "--hlg-sampling"),
        (["--thinking"], "sampling", "thinking", True, "--thinking"),
        (["--thinking", "off"], "sampling", "thinking", False, "--thinking"),
        (["--memory-budget", "4.5"], "engine", "memory_budget", 4_500_000_000, "--memory-budget"),
        (["--body-limit", "2"], "http", "body_limit", 2 << 20, "--body-limit"),
        (["--api-key", "a", "--api-key", "b"], "http", "api_keys", ("a", "b"), "--api-key"),
    ],
)
def test_flags(argv, group, name, value, origin):
    config = resolve(*argv)
    assert getattr(getattr(config, group), name) == value
    assert str(config.origin(group, name)) == origin


@pytest.mark.parametrize(
    ("environ", "group", "name", "value"),
    [
        ({"GNOMON_PREFILL_CHUNK": "512"}, "engine", "prefill_chunk", 512),
        ({"GNOMON_RD_PREFILL_CHUNK": "512"}, "engine", "prefill_chunk", 512),
        ({"GNOMON_PREFILL_CHUNK": "256", "GNOMON_RD_PREFILL_CHUNK": "512"}, "engine", "prefill_chunk", 256),
        ({"GNOMON_EARLY_FIRST_TOKEN": "0"}, "engine", "early_first_token", False),
        ({"GNOMON_GRAMMAR": "0"}, "engine", "grammar", False),
        ({"GNOMON_SHUTDOWN_TIMEOUT_MS": "1500"}, "http", "shutdown_timeout_ms", 1500),
        ({"GNOMON_API_KEY": "a, b,"}, "http", "api_keys", ("a", "b")),
        ({"GNOMON_CACHE": "/tmp/x"}, "paths", "cache", Path("/tmp/x")),
        ({"GNOMON_BATCH": ""}, "engine", "batch", 8),
    ],
)
def test_variables(environ, group, name, value):
    assert getattr(getattr(resolve(**environ), group), name) == value


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--temperature", "5.1"], {}, r"--temperature: 5.1 is out of range: \[0, 5\]"),
        (["--temp", "-0.1"], {}, r"--temp: -0.1 is out of range: \[0, 5\]"),
        (["--temperature", "nan"], {}, "--temperature: nan is out of range"),
        (["--top-p", "1.5"], {}, r"--top-p: 1.5 is out of range: \[0, 1\]"),
        (["--top-k", "1000001"], {}, r"--top-k: 1000001 is out of range: \[0, 1000000\]"),
        (["--top-k", "1.5"], {}, "--top-k: '1.5' is not a whole number"),
        (["--max-tokens", "0"], {}, r"--max-tokens: 0 is out of range: \[1, 10000000\]"),
        (["--batch", "0"], {}, r"--batch: 0 is out of range: \[1, 1024\]"),
        (["--port", "65536"], {}, r"--port: 65536 is out of range: \[0, 65535\]"),
        (["--memory-budget", "0"], {}, r"--memory-budget: 0 is out of range: \[0.05, 1000000\] GB"),
        (["--hlg-toe", "101"], {}, r"--hlg-toe: 101 is out of range: \[0, 100\] nats"),
        (["--thinking", "maybe"], {}, "--thinking: 'maybe' is not one of 1, 0, true, on, false, off"),
        (["--l1", "--kernels", "native"], {}, "--l1: excludes --kernels native"),
        (["--l1", "--kernels", "int8"], {}, "--l1: excludes --kernels int8"),
        (["--threads", "0"], {}, "--threads: 0 is out of range"),
        (["--kernels", "fast"], {}, "--kernels: 'fast' is not one of auto, native, int8, stock"),
        (["--api-key", ""], {}, "--api-key: the value is empty"),
        ([], {"GNOMON_PORT": "http"}, "GNOMON_PORT: 'http' is not a whole number"),
        ([], {"GNOMON_L1": "true"}, "GNOMON_L1: 'true' is not one of 1, 0"),
        ([], {"GNOMON_RD_PREFILL_CHUNK": "0"}, "GNOMON_RD_PREFILL_CHUNK: 0 is out of range"),
    ],
)
def test_errors_name_the_source_the_value_and_the_range(argv, environ, says):
    with pytest.raises(c.ConfigError, match=f"^{says}"):
        resolve(*argv, **environ)


def test_unknown_variables_are_noted_with_a_suggestion():
    notes = resolve(GNOMON_PROT="1", GNOMON_XYZZY="1", OTHER="1").notes
    assert notes == (
        "GNOMON_PROT is no variable of Gnomon and has no effect; did you mean GNOMON_PORT?",
        "GNOMON_XYZZY is no variable of Gnomon and has no effect",
    )


def test_model_wanted():
    assert resolve("a", "--query", "b", "--model", "c").model.wanted == "c"
    assert resolve("a", "--query", "b").model.wanted == "a"
    assert resolve("--query", "b").model.wanted == "b"
    assert resolve(GNOMON_MODEL="d").model.wanted == "d"
    assert resolve().model.wanted is None


def test_the_models_defaults_come_after_flags_and_variables():
    before = resolve("--top-k", "7", GNOMON_TOP_P="0.5")
    config = c.with_model_defaults(before, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "x": 1}, "M")
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.6, 0.5, 7)
    assert config.sampling.min_p == 0.1
    assert str(config.origin("sampling", "temperature")) == "generation_config of M"
    assert str(config.origin("sampling", "top_k")) == "--top-k"
    assert before.sampling.temperature is None


def test_a_model_that_says_greedy_is_greedy():
    config = c.with_model_defaults(resolve(), {"do_sample": False, "temperature": 0.6}, "M")
    assert config.sampling.params(thinking=True).greedy


def test_bad_values_of_a_model_are_noted_not_fatal():
    config = c.with_model_defaults(resolve(), {"temperature": 9, "top_p": "x", "top_k": 4}, "M")
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (None, None, 4)
    assert len(config.notes) == 2
    assert "9 is out of range: [0, 5]" in config.notes[0]


@pytest.mark.parametrize(
    ("argv", "model", "thinking", "expected"),
    [
        ([], {}, False, 0.7),
        ([], {}, True, 0.7),
        ([], {"temperature": 1.0}, False, 0.7),
        ([], {"temperature": 1.0}, True, 1.0),
        ([], {"temperature": 0.3}, False, 0.3),
        (["--temp", "1.2"], {"temperature": 0.3}, False, 1.2),
        (["--temp", "1.2"], {"temperature": 0.3}, True, 1.2),
    ],
)
def test_the_temperature_of_a_turn(argv, model, thinking, expected):
    config = c.with_model_defaults(resolve(*argv), model, "M")
    assert config.sampling.temperature_for(thinking) == expected


def test_names_are_unique_and_follow_one_rule():
    options = list(c.settings(c.SERVE))
    flags = [name for s in options for name in (s.flag, *s.option.aliases)]
    variables = [name for s in options for name in (s.env, *s.option.env_aliases)]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)
    for s in options:
        assert s.env == "GNOMON_" + s.flag[2:].replace("-", "_").upper()


def test_every_default_is_in_its_range():
    for s in c.settings():
        if s.kind in ("int", "float") and s.default is not None:
            assert s.parse(s.flag, f"{s.default / s.option.scale:.12g}") == s.default


def test_secrets_are_not_shown():
    setting = next(s for s in c.settings([c.HTTPConfig]) if s.name == "api_keys")
    assert setting.show(("sesame",)) == "(set)"


def test_groups_are_frozen():
    with pytest.raises(FrozenInstanceError):
        c.EngineConfig().batch = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_l1_is_stock():
    assert resolve("--l1").kernel.stock
    assert resolve("--kernels", "stock").kernel.stock


def test_what_guesses():
    assert not resolve().speculation.enabled
    ngram = resolve("--draft-kind", "ngram", "--ngram-max", "4", "--ngram-min", "2", "--num-draft-tokens", "5")
    assert (ngram.speculation.ngram, ngram.speculation.enabled, ngram.notes) == (True, True, ())
    assert resolve(GNOMON_DRAFT_MODEL="some/model").speculation.draft_model == "some/model"
    idle = resolve("--ngram-max", "4", GNOMON_NUM_DRAFT_TOKENS="2").notes
    assert "--ngram-max has no effect without --draft-kind ngram" in idle
    assert "GNOMON_NUM_DRAFT_TOKENS has no effect without --draft-model or --draft-kind ngram" in idle


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--draft-kind", "medusa"], "--draft-kind: 'medusa' is not one of auto, two-model, ngram"),
        (["--draft-kind", "two-model"], "--draft-kind: two-model needs --draft-model"),
        (["--draft-kind", "ngram", "--ngram-min", "4"], "--ngram-min: --ngram-min 4 is more than --ngram-max 3"),
        (["--num-draft-tokens", "17"], r"--num-draft-tokens: 17 is out of range: \[1, 16\] tokens"),
    ],
)
def test_guessing_that_cannot_be(argv: list[str], said: str):
    with pytest.raises(c.ConfigError, match=said):
        resolve(*argv)


@pytest.mark.parametrize(
    ("argv", "environ", "name", "fused"),
    [
        ([], {}, "off", False),
        (["--kv-quant", "8"], {}, "8", False),
        (["--l1", "--kv-quant", "8"], {}, "8", False),
        (["--kv-quant", "4", "--fused-sdpa", "on"], {}, "4", True),
        ([], {"GNOMON_KV_QUANT": "turbo"}, "turbo:k8v3", False),
        (["--kv-quant", "turbo:k4v2"], {"GNOMON_KV_QUANT": "8"}, "turbo:k4v2", False),
        (["--l2"], {}, "config", True),
        (["--l2", "--fused-sdpa", "off"], {}, "config", False),
        (["--l2", "--kv-quant", "off"], {}, "off", False),
    ],
)
def test_schemes_of_keys_and_values(argv: list[str], environ: dict[str, str], name: str, fused: bool):
    scheme = resolve(*argv, **environ).kv.scheme
    assert (scheme.name, scheme.fused, scheme.start) == (name, fused, 0)


@pytest.mark.parametrize(
    ("argv", "environ", "name", "paged"),
    [
        (["--paged-kv"], {}, "off", True),
        (["--paged-kv", "--kv-quant", "4"], {}, "4", True),
        (["--l2"], {"GNOMON_PAGED_KV": "1"}, "config", True),
        (["--no-paged-kv"], {"GNOMON_PAGED_KV": "1"}, "off", False),
    ],
)
def test_pages_go_with_every_scheme(argv: list[str], environ: dict[str, str], name: str, paged: bool):
    scheme = resolve(*argv, **environ).kv.scheme
    assert (scheme.name, scheme.paged, scheme.start) == (name, paged, 0)


def test_schemes_that_cant_be_are_refused_by_who_named_them():
    with pytest.raises(c.ConfigError, match=r"^--kv-quant: keys in 3 bits: turbo takes 2, 4, 5, 8"):
        resolve("--kv-quant", "turbo:k3v3")
    with pytest.raises(c.ConfigError, match=r"^GNOMON_KV_QUANT: '16' is not one of config, off, 4, 8, turbo"):
        resolve(GNOMON_KV_QUANT="16")
    with pytest.raises(c.ConfigError, match="excludes --l1"):
        resolve("--l1", "--l2")


def test_a_pool_of_models():
    config = resolve("--model-pool", "2", "--pin", "a", "--pin", "b", "--idle-unload", "60", GNOMON_POOL_MODEL="c,d")
    pool = config.pool
    assert (pool.model_pool, pool.pins, pool.models, pool.idle_unload) == (2, ("a", "b"), ("c", "d"), 60.0)
    assert (pool.pool_queue, pool.pool_wait) == (64, 600.0)
    assert resolve().pool.model_pool is None
    assert resolve("--pin", "a").notes == ("--pin has no effect without --model-pool",)
    with pytest.raises(c.ConfigError, match="--pin: 2 models are more than --model-pool 1 holds"):
        resolve("--model-pool", "1", "--pin", "a", "--pin", "b")
    with pytest.raises(c.ConfigError, match="--draft-model: excludes --model-pool"):
        resolve("--model-pool", "1", "--draft-model", "x")
    with pytest.raises(c.ConfigError, match=r"--model-pool: 0 is out of range"):
        resolve("--model-pool", "0")


def test_checkpoints_of_models_are_kept_apart():
    paths = c.Paths(Path("/c"))
    assert paths.generations_of("org/m") == Path("/c/generations-of/org%2Fm")
    assert paths.generations_of("org%2Fm") != paths.generations_of("org/m")
