"""The official Node client against a live server. It is installed from the npm registry into a cache directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent import CITIES
from fake_engine import KEY, MODEL, FakeEngine, Live, eventually
from node import installed, report

VERSION = "7.59.0"


@pytest.fixture(scope="module")
def package() -> Path:
    return installed("openai", VERSION)


def test_the_node_client(live: Live[FakeEngine], package: Path) -> None:
    told = report(package, "openai_client.mjs", BASE_URL=live.url + "/v1", API_KEY=KEY, MODEL=MODEL)
    request_id = told["whole"].pop("requestId")
    assert request_id.startswith("req_")
    assert told["whole"] == {"content": "Héllo", "finish": "stop", "second": "J", "usage": 5}
    assert told["stream"] == {"content": "Héllo", "usage": 5}
    assert told["accumulated"] == "Héllo"
    assert told["reasoning"] == "because"
    assert told["completion"] == "Héllo"
    assert told["models"] == [MODEL]
    assert told["bad"]["name"] == "BadRequestError"
    assert (told["bad"]["status"], told["bad"]["param"]) == (400, "n")
    assert "n must be at most 8, got 9" in told["bad"]["message"]
    assert "row 0 met a NaN" in told["midstream"]["message"]
    eventually(lambda: not live.engine.open)


def test_responses(agent: Live[FakeEngine], package: Path) -> None:
    told = report(package, "openai_responses.mjs", BASE_URL=agent.url + "/v1", API_KEY=KEY, MODEL=MODEL)
    assert told["whole"] == {"text": "Héllo", "status": "completed", "output": 5}
    assert told["types"][:2] == ["response.created", "response.in_progress"]
    assert told["types"][-1] == "response.completed"
    assert told["calls"] == [{"city": city} for city in CITIES]
    assert told["final"] == "Sunny in both."
    assert told["items"] == ["message"]
    assert told["gone"] == 404
