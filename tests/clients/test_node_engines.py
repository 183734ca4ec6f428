"""The official Node clients ask a scripted engine and the real one, the starter, the same questions, and abort answers under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent import CALLS
from fake_engine import FakeEngine, Job, Live, eventually, live_server, serving
from node import installed, report

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, HTTPConfig, KernelConfig, SamplingDefaults
from gnomon.engine.engine import load
from gnomon.engine.settings import Settings
from gnomon.serve.app import create_app

STARTER = Path(__file__).parents[1] / "chat" / "templates" / "starter.jinja"
CITIES = ("Paris", "Zürich")


def script(job: Job) -> None:
    wanted = job.request.constraint
    if "wait" in job.text:
        job.delta("A")
    elif wanted is not None and wanted.param == "tool_choice":
        job.say(CALLS)
    else:
        job.say('{"city": "Paris"}' if wanted is not None else "Héllo")


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live[Any]]:
    with live_server(FakeEngine(script, context_length=8192), template=STARTER.read_text("utf-8")) as made:
        yield made


@pytest.fixture(scope="module")
def starter(starter_path: Path) -> Iterator[Live[Any]]:
    tokenizer, http = Tokenizer.load(starter_path), HTTPConfig()
    engine = load(
        starter_path, Settings(EngineConfig(batch=4), kernels=KernelConfig(kernels="native"), model_id="starter")
    )
    app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
    with serving(app, engine, http) as made:
        yield made


engines = pytest.mark.parametrize(
    "live", ["scripted", pytest.param("starter", marks=[pytest.mark.slow, pytest.mark.network])]
)


def ask(request: pytest.FixtureRequest, live: str, package: Path, name: str, path: str) -> dict[str, Any]:
    server: Live[Any] = request.getfixturevalue(live)
    counts = server.app.state.services.metrics.counts
    before = counts["cancelled"]
    told = report(package, name, BASE_URL=server.url + path, MODEL=server.engine.model.id, timeout=400)
    # Both answers that were aborted stop, and nothing is left of them.
    eventually(lambda: counts["cancelled"] == before + 2 and server.app.state.services.metrics.open == 0)
    assert counts["failed"] == 0
    return told


def check_call(told: Any) -> None:
    ((name, arguments),) = told
    assert name == "weather"
    assert arguments.keys() == {"city"}
    assert arguments["city"] in CITIES


@engines
def test_openai(request: pytest.FixtureRequest, live: str) -> None:
    told = ask(request, live, installed("openai", "7.59.0"), "openai_engine.mjs", "/v1")
    assert told["chat"] == {"said": True, "same": True, "counted": True}
    for kind in ("required", "requiredStreamed", "named"):
        assert told[kind]["finish"] == "tool_calls"
        check_call(told[kind]["calls"])
    assert told["required"] == told["requiredStreamed"]
    assert told["form"] == ["city"]
    assert told["response"] is True
    check_call(told["calls"])
    assert (told["seen"], told["aborted"], told["whole"]) == (1, True, "APIUserAbortError")


@engines
def test_anthropic(request: pytest.FixtureRequest, live: str) -> None:
    told = ask(request, live, installed("@anthropic-ai/sdk", "1.14.0"), "anthropic_engine.mjs", "")
    assert told["chat"] == {"said": True, "same": True, "counted": True}
    for kind in ("any", "anyStreamed", "named"):
        assert told[kind]["finish"] == "tool_use"
        ((block, *call),) = told[kind]["calls"]
        assert block == "tool_use"
        check_call([call])
    assert told["any"] == told["anyStreamed"]
    assert told["form"] == ["city"]
    assert (told["seen"], told["aborted"], told["whole"]) == (1, "APIUserAbortError", "APIUserAbortError")
