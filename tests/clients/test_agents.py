"""Real coding agents, as published, do a task against a live server whose model is scripted; `agents.py` says how they are installed."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from agents import AGENTS, HOME, TASK, Agent
from fake_engine import FakeEngine, Job, Live, eventually, live_server, prompts

from gnomon.cli.main import main

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
DONE = "The greeting is fixed."
BROKEN = 'print("Helo, world")\n'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def thinking(step: int) -> str:
    return f"<think>\nI think of step {step}.\n</think>\n\nStep {step}."


class Model:
    """Makes the agent's calls one after the other; requests without tools are those for a title."""

    def __init__(self, agent: Agent, repo: Path) -> None:
        self.calls = [
            json.dumps({"name": name, "arguments": arguments}).replace("{repo}", str(repo))
            for name, arguments in agent.turns
        ]
        self.says = agent.says
        self.hangs = threading.Event()

    def __call__(self, job: Job) -> None:
        step = job.text.count("<tool_response>")
        if self.hangs.is_set():
            job.delta("Let me")
        elif "<tools>" not in job.text:
            job.say("<think>\nSo.\n</think>\n\n" + (self.says or "A title"))
        elif step < len(self.calls):
            job.say(f"{thinking(step)}\n<tool_call>\n{self.calls[step]}\n</tool_call>")
        else:
            job.say(f"<think>\nDone.\n</think>\n\n{DONE}")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    made = tmp_path / "repo"
    made.mkdir()
    (made / "greet.py").write_text(BROKEN)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=made, check=True)
    return made


@pytest.fixture(params=sorted(AGENTS))
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if not AGENTS[chosen].path.exists():
        pytest.skip(f"not installed: uv run python tests/clients/agents.py {chosen}")
    return chosen


@pytest.fixture
def model(name: str, repo: Path) -> Model:
    return Model(AGENTS[name], repo)


@pytest.fixture
def template() -> str:
    return "qwen3"


@pytest.fixture
def live(model: Model, template: str) -> Iterator[Live[FakeEngine]]:
    text = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
    # A byte is a token.
    with live_server(FakeEngine(model, context_length=1_000_000), template=text) as made:
        yield made


def started(name: str, url: str, repo: Path, monkeypatch: pytest.MonkeyPatch, out: Path) -> subprocess.Popen[bytes]:
    """The agent at work, in a home of its own that `gnomon connect` has set up, and with no variable of ours."""
    agent, home = AGENTS[name], repo.parent / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    if agent.connect is not None:
        assert main(["connect", agent.connect, "--write", "--server", url], {}) == 0
    environment = {
        "HOME": str(home),
        "PATH": f"{HOME / 'node' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "TERM": "dumb",
        "GNOMON_API_KEY": "none",
        "AGENT": str(agent.path),
        **agent.variables,
    }
    if agent.setup:
        subprocess.run(
            ["sh", "-ec", agent.setup.replace("{url}", url)], cwd=repo, env=environment, check=True, timeout=120
        )
    arguments = [one.replace("{home}", str(home)) for one in agent.arguments]
    with out.open("wb") as file:
        return subprocess.Popen(
            [str(agent.path), *arguments],
            cwd=repo,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def statuses(url: str) -> set[str]:
    """Of all requests for an answer so far."""
    lines = httpx.get(f"{url}/metrics").text
    return set(re.findall(r'^gnomon_http_requests_total\{[^}]*method="POST"[^}]*status="(\d+)"', lines, re.M))


@pytest.fixture
def helpers(repo: Path) -> Iterator[None]:
    """What an agent leaves running is ended: Cline keeps a hub."""
    yield
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # one that has gone by itself
            if f"HOME={repo.parent / 'home'}\0".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.mark.usefixtures("helpers")
def test_the_task_is_done(name: str, live: Live[FakeEngine], repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, out = AGENTS[name], repo.parent / "out"
    assert started(name, live.url, repo, monkeypatch, out).wait(240) == 0, out.read_text()
    assert statuses(live.url) == {"200"}, out.read_text()
    said = [text for text in prompts(live.engine) if TASK in text]
    if agent.says:
        assert (repo / "greet.py").read_text() == BROKEN.replace("Helo", "Hello")
        return
    assert DONE in out.read_text()
    turns = [text for text in said if "<tools>" in text]
    assert len(turns) == len(agent.turns) + 1
    assert "Helo, world" in turns[1]
    if len(agent.turns) == 2:
        assert (repo / "greet.py").read_text() == BROKEN.replace("Helo", "Hello")
    for step, (before, after) in enumerate(itertools.pairwise(turns)):
        if agent.keeps == "system":
            # Goose moves the time of day to the end, and what was before the user's words stays.
            assert after.startswith(before[: before.index("<|im_start|>user")])
        else:
            assert after.startswith(before + (thinking(step) if agent.keeps == "thinking" else f"Step {step}."))
    assert not live.engine.open


@pytest.mark.parametrize("template", ["gemma3"])
@pytest.mark.usefixtures("helpers")
def test_the_task_is_done_where_turns_must_alternate(
    name: str, live: Live[FakeEngine], repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex, Goose and opencode send two turns of the user's in a row, which Gemma 3's template refuses."""
    agent, out = AGENTS[name], repo.parent / "out"
    assert started(name, live.url, repo, monkeypatch, out).wait(240) == 0, out.read_text()
    assert statuses(live.url) == {"200"}, out.read_text()
    if agent.says or len(agent.turns) == 2:
        assert (repo / "greet.py").read_text() == BROKEN.replace("Helo", "Hello")
    else:
        assert DONE in out.read_text()


@pytest.mark.usefixtures("helpers")
def test_an_agent_that_is_stopped_frees_its_rows(
    name: str, model: Model, live: Live[FakeEngine], repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.hangs.set()
    process = started(name, live.url, repo, monkeypatch, repo.parent / "out")
    try:
        eventually(lambda: bool(live.engine.open), 120)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        eventually(lambda: not live.engine.open)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
