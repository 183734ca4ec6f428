"""Divergence against values worked out by hand, against numpy in double precision, and against mlx-lm's own models and quantised caches."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import tiny_models
from engine_fixtures import tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.bench.store import load
from gnomon.cli.main import main
from gnomon.config import KvScheme
from gnomon.evals.comparison import fill, measure, step_of
from gnomon.evals.divergence import Positions, compare, condense, summarise
from gnomon.evals.perplexity import windows
from gnomon.evals.reference import Extent, Plan, ReferenceStore, Side, extent

TEXT = "there is nothing in here that is not there already, said the captain to his sailors. " * 4
PLAIN, CODED = Side("m", "stock", "off", "cpu"), Side("m", "stock", "4", "cpu")


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.array(logits.astype(mx.float32) if isinstance(logits, mx.array) else logits, dtype=np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def exact(reference: Any, other: Any) -> np.ndarray:
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def test_by_hand() -> None:
    # p = (1/2, 1/4, 1/4) from q = (1/4, 1/4, 1/2): 1/2 ln 2 + 0 - 1/4 ln 2. Adding a constant to logits changes nothing.
    p, q = mx.log(mx.array([[0.5, 0.25, 0.25]])) + 3.0, mx.log(mx.array([[0.25, 0.25, 0.5]])) - 1.0
    target = mx.array([2], dtype=mx.int32)
    whole = compare(condense(p, target, 3), q, target)
    assert whole.kl[0] == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert whole.kl_upper[0] == whole.kl[0]
    assert whole.agree[0] == 0
    assert (whole.reference_nats[0], whole.nats[0]) == (pytest.approx(math.log(4)), pytest.approx(math.log(2)))
    # Of one token and the rest: 1/2 ln 2 + 1/2 ln (1/2 / 3/4); at most 1/2 ln 2 + 1/2 ln 1/4 + 1/2 ln 4.
    part = compare(condense(p, target, 1), q, target)
    assert part.kl[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert part.kl_upper[0] == pytest.approx(0.5 * math.log(2), rel=1e-6)
    assert (part.agree[0], part.reference_nats[0]) == (0, pytest.approx(math.log(4)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), top=st.integers(1, 40), scale=st.sampled_from([0.1, 1.0, 8.0]))
def test_bounds_hold(seed: int, top: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    a = (rng.normal(size=(3, 40)) * scale).astype(np.float32)
    b = (a + rng.normal(size=(3, 40)) * scale / 2).astype(np.float32)
    targets = mx.array(rng.integers(0, 40, 3), dtype=mx.int32)
    found = compare(condense(mx.array(a), targets, top), mx.array(b), targets)
    wanted = exact(a, b)
    slack = 1e-5 * (1 + wanted)
    assert (found.kl <= wanted + slack).all()
    assert (found.kl_upper >= wanted - slack).all()
    if top == 40:
        # float32: a log-probability is known to half a unit in the last place of the largest logit, and each term is a difference of two.
        unit = float(max(1e-6, np.finfo(np.float32).eps * max(np.abs(a).max(), np.abs(b).max())))
        assert found.kl == pytest.approx(wanted, rel=1e-4, abs=unit)
    assert found.reference_nats == pytest.approx(-log_softmax(a)[np.arange(3), np.array(targets)], rel=1e-5, abs=1e-5)
    assert (found.agree == (a.argmax(-1) == b.argmax(-1))).all()


def test_equal_distributions_are_at_zero() -> None:
    logits = mx.random.normal((5, 100)).astype(mx.bfloat16)
    targets = mx.zeros(5, dtype=mx.int32)
    for top in (100, 10):
        found = compare(condense(logits, targets, top), logits, targets)
        assert found.kl == pytest.approx(np.zeros(5), abs=1e-6)
        assert found.agree.all()


def made(kl: Sequence[float], agree: Sequence[float]) -> Positions:
    values = np.array(kl, dtype=np.float64)
    return Positions(
        values, values, np.array(agree, dtype=np.float64), np.full(len(kl), math.log(2)), np.full(len(kl), math.log(8))
    )


def test_summary() -> None:
    found = summarise([made([0.0, 1.0], [1, 1]), made([2.0, 5.0], [0, 1])])
    assert (found.mean.value, found.median.value, found.largest, found.agreement.value) == (2.0, 1.5, 5.0, 0.75)
    assert found.percentile_99.value == pytest.approx(
        2 + 0.97 * 3
    )  # between the third and fourth of 0, 1, 2, 5 at 0.99 x 3
    assert (found.perplexity_reference, found.perplexity) == (pytest.approx(2), pytest.approx(8))
    # Two windows: a resample's mean is 0.5 (both times the first), 2 or 3.5, the outer ones with a quarter of the draws each.
    assert (found.mean.lower, found.mean.upper) == (0.5, 3.5)
    assert summarise([made([1.0], [1])]).mean.lower is None
    with pytest.raises(ValueError, match="no position is left"):
        summarise([made([1.0], [1]).after(1)])


def test_bootstrap_is_about_the_standard_error() -> None:
    rng = np.random.default_rng(3)
    means = rng.normal(1.0, 0.2, 100)
    found = summarise([made([m, m], [1, 0]) for m in means]).mean
    half = 1.96 * means.std() / 10
    assert found.lower is not None
    assert found.upper is not None
    assert (found.upper - found.lower) / 2 == pytest.approx(half, rel=0.1)


def test_what_fits() -> None:
    plan = Plan(((1,) * 11,) * 2, 10)
    assert plan.positions == 20
    assert extent(plan, 1000, 20 * 4000) == Extent(1000, 80_000)
    assert extent(plan, 1000, 20 * 3999) == Extent(497, 20 * (497 * 8 + 20))
    with pytest.raises(ValueError, match="leaves 147 bytes for each of 20 positions, at least 148"):
        extent(plan, 1000, 20 * 147)


def test_steps() -> None:
    assert step_of(None, 512, 1000, coded=False) == (511, 0)
    assert step_of(None, 512, 1000, coded=True) == (64, 64)
    assert step_of(100, 512, 1000, coded=True) == (100, 100)
    assert step_of(None, 4096, 1 << 18, coded=False) == (256, 0)
    with pytest.raises(ValueError, match="a window has 64 tokens and a step 64"):
        step_of(None, 64, 1000, coded=True)
    with pytest.raises(ValueError, match=r"step is 257, but .* 256 tokens"):
        step_of(257, 4096, 1 << 18, coded=False)


def rows(model: Any, part: Sequence[int], step: int, after: Callable[[list[Any]], None] = lambda _: None) -> mx.array:
    """Logits of mlx-lm's own model and caches, in the same steps."""
    cache, found = make_prompt_cache(model), []
    for start in range(0, len(part) - 1, step):
        found.append(model(mx.array([part[start : min(start + step, len(part) - 1)]]), cache=cache)[0])
        after(cache)
    return mx.concatenate(found)


def test_codes_of_keys_and_values_are_mlx_lm_s(tmp_path: Path) -> None:
    model = tiny_models.make("llama", head_dim=64, num_hidden_layers=2)
    plan = Plan(tuple(windows(tiny_tokenizer().encode(TEXT), 40)), 16)
    held = ReferenceStore(tmp_path, 1 << 30).open(PLAIN, plan, extent(plan, tiny_models.VOCAB_SIZE, 1 << 30))

    def engine(kv: KvScheme) -> Any:
        return tiny_engine(load=lambda: tiny_loaded("llama", model=model), kv=kv)

    with engine(KvScheme()) as plain:
        fill(held, plain, lambda _: None)
    with engine(KvScheme("affine", bits=4)) as coded:
        found = measure(held, CODED, coded, lambda _: None)
    assert len(found) == len(plan.parts) > 1

    def quantize(cache: list[Any]) -> None:
        maybe_quantize_kv_cache(cache, quantized_kv_start=0, kv_group_size=64, kv_bits=4)

    for part, one in zip(plan.parts, found, strict=True):
        wanted = exact(rows(model, part, 16), rows(model, part, 16, quantize))
        assert one.kl == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        # A row's first step attends to plain keys and values.
        assert one.kl[:16].max() < 1e-6 < one.kl[16:].mean()


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    plan = Plan(tuple(windows(tiny_tokenizer().encode(TEXT), 30)), 10)
    kept = extent(plan, tiny_models.VOCAB_SIZE, 1 << 30)
    store = ReferenceStore(tmp_path, 1 << 30)
    held = store.open(PLAIN, plan, kept)
    assert held.missing() == list(range(len(plan.parts)))

    class Stopped(Exception):
        pass

    def stop_at_two(done: int) -> None:
        if done == 2:
            raise Stopped

    with tiny_engine("llama") as engine:
        with pytest.raises(Stopped):
            fill(held, engine, stop_at_two)
        assert store.open(PLAIN, plan, kept).missing() == list(range(2, len(plan.parts)))
        told: list[int] = []
        fill(held, engine, told.append)
        assert told == list(range(3, len(plan.parts) + 1))
        first = measure(held, CODED, engine, lambda _: None)
    for file in held.path.glob("*.safetensors"):
        file.unlink()
    # What was compared is kept apart from what it was compared with.
    with tiny_engine("llama") as engine:
        again = measure(held, CODED, engine, lambda _: None)
        assert all((a.kl == b.kl).all() and (a.nats == b.nats).all() for a, b in zip(first, again, strict=True))
        with pytest.raises(Exception, match="is gone"):
            measure(held, PLAIN, engine, lambda _: None)
    assert store.open(PLAIN, Plan(plan.parts, 11), kept).path != held.path
    assert store.open(CODED, plan, kept).path != held.path


def test_old_references_make_room(tmp_path: Path) -> None:
    plan = Plan(((1,) * 11,), 10)
    store = ReferenceStore(tmp_path, 100_000)
    targets = mx.zeros(10, dtype=mx.int32)
    for name in ("a", "b"):
        held = store.open(Side(name, "stock", "off", "cpu"), plan, Extent(1000, 40_000))
        held.save(0, 0, condense(mx.random.normal((10, 1000)), targets, 1000))
        assert held.missing() == []
    before = time.time() - 3600
    first, second = (store.open(Side(name, "stock", "off", "cpu"), plan, Extent(1000, 40_000)) for name in ("a", "b"))
    os.utime(first.path / "about.json", (before, before))
    third = store.open(Side("c", "stock", "off", "cpu"), plan, Extent(1000, 40_000))
    assert not first.path.exists()
    assert second.missing() == []
    assert third.missing() == [0]
    # What was used a moment ago stays, even over the limit.
    store.open(Side("d", "stock", "off", "cpu"), plan, Extent(1000, 40_000))
    assert second.missing() == []


@pytest.mark.parametrize("gib", [1.0, pytest.param(2e-4, marks=pytest.mark.slow)])
def test_the_verb_against_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], gib: float) -> None:
    ours, theirs = tiny_models.save("llama", tmp_path / "a"), tiny_models.save("llama", tmp_path / "b", seed=1)
    text, out = tmp_path / "t.txt", tmp_path / "results"
    text.write_text(TEXT)
    words = [
        "eval",
        str(ours),
        "--kl",
        str(text),
        "--against",
        str(theirs),
        "--window",
        "20",
        "--kernels",
        "stock",
        "--json",
    ]
    words += ["--out", str(out), "--reference-size", str(gib)]
    assert main(words, {"GNOMON_CACHE": str(tmp_path / "cache")}) == 0
    told = json.loads(capsys.readouterr().out)
    parts = windows(tiny_tokenizer().encode(TEXT), 20)
    models = [load_model(path)[0] for path in (theirs, ours)]
    wanted = np.concatenate([exact(*(rows(model, part, 19) for model in models)) for part in parts])
    if gib == 1.0:
        assert told["mean"]["value"] == pytest.approx(wanted.mean(), rel=1e-4)
        assert told["percentile_99"]["value"] == pytest.approx(np.quantile(wanted, 0.99), rel=1e-4)
        assert told["mean_upper"] == told["mean"]["value"]
    assert told["mean"]["value"] <= wanted.mean() * (1 + 1e-5) <= told["mean_upper"] * (1 + 2e-5)
    assert told["positions"] == wanted.size
    (sample,) = load(Path(told["file"])).samples
    assert sample.metrics["kl_divergence"] == told["mean"]["value"]
    assert {"perplexity", "weight_bytes"} <= sample.metrics.keys()


def test_what_can_t_be_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = tiny_models.save("llama", tmp_path / "m"), tmp_path / "t.txt"
    text.write_text(TEXT)
    variables = {"GNOMON_CACHE": str(tmp_path / "cache")}
    base = ["eval", str(model), "--window", "20", "--kernels", "stock"]
    for words, status, message in (
        (["--kl", str(text)], 2, "reference and model are the same"),
        (["--kl", str(text), "--against-kv", "8"], 1, "a window has 20 tokens and a step 64"),
        (["--kl", str(text), "--against-kv", "9"], 1, "'9' is not one of"),
        (["--perplexity", str(text), "--kv-quant", "8"], 2, "--kl FILE --against-kv off measures --kv-quant"),
    ):
        assert main([*base, *words], variables) == status
        assert message in capsys.readouterr().err
