"""Anthropic's official Node client against a live server. It is installed from the npm registry into a cache directory."""

from __future__ import annotations

from agent import CITIES
from fake_engine import KEY, MODEL, FakeEngine, Live, eventually
from node import installed, report

VERSION = "1.14.0"


def test_the_node_client(agent: Live[FakeEngine]) -> None:
    package = installed("@anthropic-ai/sdk", VERSION)
    told = report(package, "anthropic_client.mjs", BASE_URL=agent.url, API_KEY=KEY, MODEL=MODEL)
    assert told["whole"].pop("requestId").startswith("req_")
    assert told["whole"] == {"content": [{"type": "text", "text": "Héllo"}], "reason": "end_turn"}
    assert told["counted"] is True
    assert told["types"][0] == "message_start"
    assert told["types"][-1] == "message_stop"
    assert told["blocks"] == ["thinking", "text", "tool_use", "tool_use"]
    assert told["calls"] == [{"city": city} for city in CITIES]
    assert told["final"] == [{"type": "text", "text": "Sunny in both."}]
    assert (told["bad"]["name"], told["bad"]["status"]) == ("BadRequestError", 400)
    assert "max_tokens must be at least 1, got 0" in told["bad"]["message"]
    assert "row 0 met a NaN" in told["midstream"]["message"]
    eventually(lambda: not agent.engine.open)
