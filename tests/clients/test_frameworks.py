"""Frameworks that people build agents with, each in an environment of its own, against a live server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from agent import CALLS
from fake_engine import FakeEngine, Job, Live, live_server
from filelock import FileLock

TEMPLATE = Path(__file__).parents[1] / "chat" / "templates" / "qwen3.jinja"

SCRIPTS = Path(__file__).with_name("frameworks")
SAID = "Sunny in both."
WHICH = [["weather", {"city": city}] for city in ("Paris", "Zürich")]
PARSED = {"name": "Paris", "population": 2}
PACKAGES: dict[str, tuple[str, ...]] = {
    "langchain": ("langchain-openai==1.7.4",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.38.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "instructor": ("instructor==1.17.0",),
}

pytestmark = pytest.mark.slow


def script(job: Job) -> None:
    """Calls the tool that is offered, says something of its results, and answers in a form where there is one."""
    constraint, text = job.request.constraint, job.text
    form = constraint is not None and "population" in constraint.source
    if "<tool_response>" in text or (form and "weather" not in text and "<tools>" not in text):
        job.say(json.dumps(PARSED) if form else SAID)
    elif "population" in text and "weather" not in text:
        called = {"name": "PartialCity" if "PartialCity" in text else "City", "arguments": PARSED}
        job.say(f"<tool_call>\n{json.dumps(called)}\n</tool_call>" if "<tools>" in text else json.dumps(PARSED))
    else:
        job.say(CALLS)


@pytest.fixture(scope="module")
def live() -> Iterator[Live[FakeEngine]]:
    with live_server(FakeEngine(script, context_length=8192), template=TEMPLATE.read_text("utf-8")) as made:
        yield made


def environment(name: str) -> Path:
    """The Python of an environment with the packages of a framework; skips where the registry is out of reach."""
    uv, packages = shutil.which("uv"), PACKAGES[name]
    if uv is None:
        pytest.skip("uv is not installed")
    home = (
        Path(platformdirs.user_cache_dir("gnomon", appauthor=False))
        / "tests"
        / f"{name}-{packages[0].partition('==')[2]}"
    )
    home.parent.mkdir(parents=True, exist_ok=True)
    python = home / "bin" / "python"
    with FileLock(f"{home}.lock"):
        if not (home / "complete").exists():
            for command in (["venv", "--clear", str(home)], ["pip", "install", "--python", str(python), *packages]):
                # Elsewhere than here, where this project's own pins would hold.
                ran = subprocess.run([uv, *command], capture_output=True, text=True, timeout=600, cwd=home.parent)
                if ran.returncode:
                    if "error sending request" in ran.stderr.lower() or "network" in ran.stderr.lower():
                        pytest.skip("the package registry is not reachable")
                    pytest.fail(ran.stderr)
            (home / "complete").touch()
    return python


def report(name: str, url: str) -> dict[str, Any]:
    """What the framework's script prints, as JSON."""
    variables = {"BASE_URL": url, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONUTF8": "1"}
    command = [str(environment(name)), str(SCRIPTS / f"run_{name}.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def test_langchain(live: Live[FakeEngine]) -> None:
    assert report("langchain", live.url) == {
        "calls": WHICH,
        "streamed": WHICH,
        "strict": WHICH,
        "answers": [SAID, SAID],
        "parsed": PARSED,
    }


def test_pydantic_ai(live: Live[FakeEngine]) -> None:
    made = report("pydantic_ai", live.url)
    assert made.keys() == {"chat", "responses"}
    for told in made.values():
        assert told == {"cities": ["Paris"] * 3 + ["Zürich"] * 3, "answers": [SAID, SAID], "parsed": PARSED}


def test_openai_agents(live: Live[FakeEngine]) -> None:
    made = report("openai_agents", live.url)
    assert made.keys() == {"responses", "chat"}
    for told in made.values():
        assert told["answers"] == [SAID, SAID]
        assert told["parsed"] == PARSED
        assert told["cities"] == ["Paris"] * 3 + ["Zürich"] * 3
        assert {"raw_response_event", "run_item_stream_event"} <= set(told["kinds"])


def test_instructor(live: Live[FakeEngine]) -> None:
    made = report("instructor", live.url)
    assert made == dict.fromkeys(("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON", "partial"), PARSED)
