"""`gnomon connect`: what agents are told, and that nobody's settings are lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import FakeEngine, live_server
from hypothesis import given
from hypothesis import strategies as st

from gnomon.cli._agents import AGENTS, Served, codex
from gnomon.cli._settings_file import SettingsError, merged_json, merged_toml, put
from gnomon.cli.main import main
from gnomon.config import HTTPConfig

KEY = "gn-secret"
SERVED = Served("http://127.0.0.1:8080", "org/Model", 4096, KEY)
# What shells, TOML, YAML and JSON give a meaning to, and no control characters.
NASTY = "a\"b'c\\d$(touch x)`e`; #é🙂: {}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(FakeEngine(), http=HTTPConfig(api_keys=(KEY,))) as live:
        yield live.url


def connect(url: str, *argv: str) -> int:
    return main(["connect", *argv, "--server", url], {"GNOMON_API_KEY": KEY})


@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_it_prints_without_touching_anything(
    agent: str, url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(url + "/v1/", agent) == 0
    shown = capsys.readouterr().out
    assert url in shown
    assert FakeEngine().model.id in shown
    assert list(home.iterdir()) == []


# The values each agent's documentation names, looked up where it says.
EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "claude-code": (
        ".claude/settings.json",
        {
            "env.ANTHROPIC_BASE_URL": SERVED.url,
            "env.ANTHROPIC_AUTH_TOKEN": KEY,
            "env.ANTHROPIC_MODEL": "org/Model",
            "env.ANTHROPIC_DEFAULT_HAIKU_MODEL": "org/Model",
            "env.CLAUDE_CODE_MAX_CONTEXT_TOKENS": "4096",
        },
    ),
    "codex": (
        ".codex/config.toml",
        {
            "model_providers.gnomon.base_url": SERVED.v1,
            "model_providers.gnomon.wire_api": "responses",
            "model_providers.gnomon.env_key": "GNOMON_API_KEY",
        },
    ),
    "opencode": (
        ".config/opencode/opencode.jsonc",
        {
            "provider.gnomon.npm": "@ai-sdk/openai-compatible",
            "provider.gnomon.options": {"baseURL": SERVED.v1, "apiKey": "{env:GNOMON_API_KEY}"},
            "provider.gnomon.models.org/Model.limit": {"context": 4096, "output": 2048},
        },
    ),
    "aider": (
        ".aider.conf.yml",
        {"openai-api-base": SERVED.v1, "openai-api-key": KEY, "model": "openai/org/Model"},
    ),
    "continue": (
        ".continue/config.yaml",
        {"schema": "v1", "models.0.apiBase": SERVED.v1, "models.0.provider": "openai"},
    ),
    "zed": (
        ".config/zed/settings.json",
        {
            "language_models.openai_compatible.Gnomon.api_url": SERVED.v1,
            "language_models.openai_compatible.Gnomon.available_models.0.max_tokens": 4096,
        },
    ),
    "qwen-code": (
        ".qwen/settings.json",
        {
            "modelProviders.openai.0.baseUrl": SERVED.v1,
            "modelProviders.openai.0.envKey": "GNOMON_API_KEY",
            "modelProviders.openai.0.generationConfig.contextWindowSize": 4096,
        },
    ),
    "goose": (
        ".config/goose/custom_providers/gnomon.json",
        {
            "engine": "openai",
            "base_url": f"{SERVED.v1}/chat/completions",
            "api_key_env": "GNOMON_API_KEY",
            "models.0": {"name": "org/Model", "context_limit": 4096},
        },
    ),
    "mistral-vibe": (
        ".vibe/config.toml",
        {
            "providers.0.api_base": SERVED.v1,
            "providers.0.api_key_env_var": "GNOMON_API_KEY",
            "models.0.name": "org/Model",
            "models.0.max_context_length": 4096,
        },
    ),
    "pi": (
        ".pi/agent/models.json",
        {
            "providers.gnomon.baseUrl": SERVED.v1,
            "providers.gnomon.api": "openai-completions",
            "providers.gnomon.apiKey": "$GNOMON_API_KEY",
            "providers.gnomon.models.0.contextWindow": 4096,
        },
    ),
}


def parsed(kind: str, text: str) -> Any:
    return {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}[kind](text)


def at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def test_the_fields_that_the_agents_document() -> None:
    assert set(EXPECTED) == set(AGENTS) - {"cline"}
    for agent, (path, fields) in EXPECTED.items():
        setup = AGENTS[agent](SERVED)
        assert setup.path == path
        value = parsed(setup.kind, setup.shown)
        assert {name: at(value, name) for name in fields} == fields


def leaves(value: Any) -> Iterator[Any]:
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(one)
    yield value


@pytest.mark.parametrize("agent", sorted(EXPECTED))
def test_names_with_meanings_stay_names(agent: str, tmp_path: Path) -> None:
    setup = AGENTS[agent](Served("http://127.0.0.1:1", NASTY, 10, NASTY))
    if agent != "codex":
        assert {NASTY, f"openai/{NASTY}"} & {x for x in leaves(parsed(setup.kind, setup.shown)) if isinstance(x, str)}
    if agent in ("aider", "continue"):
        return
    # The shell lines run nothing but the agent, and give it the text as it is.
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("claude", "codex", "opencode", "zed", "qwen", "pi", "goose", "vibe"):
        script = programs / name
        script.write_text('#!/bin/sh\nprintf "%s\\n" "$GNOMON_API_KEY" "$ANTHROPIC_MODEL" "$@" >>"$OUT"\n')
        script.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    subprocess.run(["sh", "-ec", setup.start], cwd=tmp_path, env=environment, check=True)
    assert {NASTY, f"gnomon/{NASTY}"} & set((tmp_path / "out").read_text().splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "out"]


def test_writing_keeps_what_was_there(url: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / ".claude" / "settings.json"
    path.parent.mkdir()
    before = {"env": {"MINE": "1", "ANTHROPIC_BASE_URL": "https://other"}, "hooks": [1, {"a": None}], "é": "ü"}
    path.write_text(json.dumps(before))
    path.chmod(0o640)
    assert connect(url, "claude-code", "--write") == 0
    after = json.loads(path.read_text())
    assert after["env"]["ANTHROPIC_BASE_URL"] == url
    assert (after["env"]["MINE"], after["hooks"], after["é"]) == ("1", [1, {"a": None}], "ü")
    kept = path.with_name("settings.json.before-gnomon")
    assert json.loads(kept.read_text()) == before
    assert str(kept) in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    # Once more: nothing to do, and the first copy is still the user's own.
    assert connect(url, "claude-code", "--write") == 0
    assert json.loads(kept.read_text()) == before
    assert len(list(path.parent.iterdir())) == 2


def test_a_new_file_is_its_owners(url: str, home: Path) -> None:
    assert connect(url, "claude-code", "--write") == 0
    path = home / ".claude" / "settings.json"
    assert json.loads(path.read_text())["env"]["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert connect(url, "zed", "--write", "--file", str(home / "there" / "z.json")) == 0
    assert "language_models" in json.loads((home / "there" / "z.json").read_text())


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ("zed", '{\n  // mine\n  "theme": "One"\n}'),
        ("zed", "[]"),
        ("zed", '{"language_models": []}'),
        ("qwen-code", '{"modelProviders": {"openai": "x"}}'),
        ("codex", "model = "),
        ("codex", '[model_providers.gnomon]\nname = "mine"\n'),
        ("codex", "# gnomon connect: begin\n[a]\n"),
        ("aider", "model: mine\n"),
        ("continue", "name: mine\n"),
        ("claude-code", "\udcff"),
    ],
)
def test_files_that_cant_be_merged_are_left_alone(
    agent: str, text: str, url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / EXPECTED[agent][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert connect(url, agent, "--write") == 1
    assert path.read_bytes() == text.encode("utf-8", "surrogateescape")
    assert list(path.parent.iterdir()) == [path]
    assert "was left as it is" in capsys.readouterr().err


def test_links_lead_to_the_file(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "settings.json"
    real.parent.mkdir()
    real.write_text("{}")
    link = tmp_path / "settings.json"
    link.symlink_to(real)
    put(link, '{"a": 1}')
    assert link.is_symlink()
    assert real.read_text() == '{"a": 1}'


def test_a_full_or_closed_directory_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{}")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SettingsError, match="No space left"):
        put(path, '{"a": 1}')
    assert path.read_text() == "{}"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_toml_block_is_replaced_and_all_else_kept() -> None:
    mine = '# my notes\nmodel = "gpt"   # keep\n\n[tui]\nsounds = false\n'
    once = merged_toml(mine, codex(SERVED).text)
    assert once.startswith(mine)
    assert merged_toml(once, codex(SERVED).text) == once
    moved = merged_toml(once + "[later]\nx = 1\n", codex(Served("http://h:9", "m", 1)).text)
    assert tomllib.loads(moved) == {
        "model": "gpt",
        "tui": {"sounds": False},
        "later": {"x": 1},
        "model_providers": {"gnomon": {"name": "Gnomon", "base_url": "http://h:9/v1", "wire_api": "responses"}},
    }
    assert "# my notes" in moved
    assert moved.count("# gnomon connect: begin") == 1
    # Without a newline at its end, and from nothing.
    assert tomllib.loads(merged_toml("a = 1", "[b]\nc = 2")) == {"a": 1, "b": {"c": 2}}
    assert merged_toml("", "[b]") == "# gnomon connect: begin\n[b]\n# gnomon connect: end\n"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=4))
def test_merging_adds_what_is_new_and_keeps_the_rest(old: dict[str, Any]) -> None:
    new = {"providers": {"gnomon": {"url": "x"}}}
    try:
        merged = json.loads(merged_json(json.dumps(old), new))
    except SettingsError:
        assert not isinstance(old["providers"], dict) or not isinstance(old["providers"]["gnomon"], dict)
        return
    assert merged["providers"]["gnomon"]["url"] == "x"
    assert {k: v for k, v in merged.items() if k != "providers"} == {k: v for k, v in old.items() if k != "providers"}
    assert json.loads(merged_json(json.dumps(merged), new)) == merged


def test_entries_of_lists_go_by_id() -> None:
    old = {"m": [{"id": "a", "url": "1"}, {"id": "b"}, "c"]}
    new = {"m": [{"id": "a", "url": "2"}]}
    assert json.loads(merged_json(json.dumps(old), new)) == {"m": [{"id": "b"}, "c", {"id": "a", "url": "2"}]}


def test_servers_that_cant_be_used(url: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(argv: list[str], environ: dict[str, str]) -> str:
        assert main(["connect", "zed", *argv], environ) != 0
        return capsys.readouterr().err

    assert "wants a key" in says(["--server", url], {})
    assert "no server answers at http://127.0.0.1:9" in says(["--server", "http://127.0.0.1:9"], {})
    assert "agents need an http" in says(["--server", "unix:/tmp/x"], {})
    with live_server(FakeEngine(None, id="evil\n[other]")) as live:
        assert "the model's id holds control characters" in says(["--server", live.url], {})
    assert connect(url, "cline", "--write") == 1
    assert "keeps its settings" in capsys.readouterr().err
    assert os.listdir(home) == []
