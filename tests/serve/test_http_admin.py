"""Making the cache durable, and sessions, over HTTP."""

from __future__ import annotations

import logging
import signal
from typing import Any

import httpx
import pytest
from fake_engine import KEY, FakeEngine, eventually, live_server, make_app, user
from starlette.testclient import TestClient

from gnomon.config import HTTPConfig
from gnomon.engine.api import FlushReport

REPORT = FlushReport(True, 7, 1, 2, 3000, 4, 5, 6, 0.25, 99, 4096)


@pytest.mark.parametrize(("durable", "status"), [(True, 200), (False, 503)])
def test_a_flush_says_what_became_durable(durable: bool, status: int) -> None:
    engine = FakeEngine()
    engine.report = FlushReport(durable, *[getattr(REPORT, name) for name in REPORT.__slots__[1:]])
    with TestClient(make_app(engine, http=HTTPConfig(shutdown_timeout_ms=9000)), base_url="http://localhost") as client:
        response = client.post("/admin/cache/flush")
    assert response.status_code == status
    assert response.json() == {
        "durable": durable,
        "flushedSnapshots": 7,
        "pendingSnapshots": 1,
        "pendingSpills": 2,
        "pendingSpillBytes": 3000,
        "droppedSpills": 4,
        "failedSpills": 5,
        "missingSnapshots": 6,
        "elapsedMs": 250.0,
        "entries": 99,
        "longest_durable_prefix_tokens": 4096,
    }
    assert engine.flushes == [9.0]


def test_closing_a_session() -> None:
    engine = FakeEngine()
    engine.sessions = {"mine"}
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        assert client.post("/admin/cache/session/close", json={"session_id": "mine"}).json() == {"closed": True}
        assert client.post("/admin/cache/session/close", json={"session_id": "other"}).json() == {"closed": False}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "session_id is required"),
        ({"session_id": 3}, "session_id must be of type str, got 3"),
        ({"session_id": ""}, "session_id is not valid"),
        ({"session_id": "x" * 257}, "session_id is not valid"),
    ],
)
def test_a_session_has_to_be_named(body: dict[str, Any], message: str) -> None:
    with TestClient(make_app(), base_url="http://localhost") as client:
        response = client.post("/admin/cache/session/close", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "session_id"
    assert error["message"].startswith(message)


@pytest.mark.parametrize("route", ["/admin/cache/flush", "/admin/cache/session/close"])
def test_the_doors_are_those_of_every_route(route: str) -> None:
    with TestClient(make_app(http=HTTPConfig(api_keys=(KEY,))), base_url="http://localhost") as client:
        assert client.post(route, json={"session_id": "s"}).status_code == 401
        assert client.post(route, json={"session_id": "s"}, headers={"origin": "https://evil"}).status_code == 403
        allowed = client.post(route, json={"session_id": "s"}, headers={"authorization": f"Bearer {KEY}"})
        assert allowed.status_code in (200, 503)


BODIES = {
    "/v1/chat/completions": user("hi"),
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 5, **user("hi")},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("route", BODIES)
def test_a_session_is_named_in_the_head(route: str) -> None:
    engine = FakeEngine()
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        assert client.post(route, json=BODIES[route], headers={"x-session-id": "mine"}).status_code == 200
        assert client.post(route, json=BODIES[route]).status_code == 200
        long = client.post(route, json=BODIES[route], headers={"x-session-id": "x" * 257})
    assert [one.session for one in engine.submitted] == ["mine", None]
    assert long.status_code == 400


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_the_body_s_session_wins(route: str) -> None:
    engine = FakeEngine()
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        client.post(route, json=BODIES[route] | {"session_id": "body"}, headers={"x-session-id": "head"})
    assert engine.submitted[0].session == "body"


@pytest.mark.parametrize("durable", [True, False])
def test_the_end_of_the_server_flushes_and_says_what_came_of_it(
    durable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gnomon.serve.server")
    engine = FakeEngine()
    engine.sections["ssd_cache"] = {}
    engine.report = FlushReport(durable, *[getattr(REPORT, name) for name in REPORT.__slots__[1:]])
    with live_server(engine) as live:
        assert httpx.get(f"{live.url}/health").status_code == 200
        live.server.handle_exit(signal.SIGTERM, None)
        eventually(engine.stopped.is_set)
    assert len(engine.flushes) == 1
    said = (
        "the SSD cache is durable: 99 files, the longest prefix has 4096 tokens"
        if durable
        else "the SSD cache isn't durable: 3 states pending, 4 dropped, 5 failed, 6 missing"
    )
    assert said in caplog.text


def test_without_an_ssd_cache_nothing_is_flushed() -> None:
    engine = FakeEngine()
    with live_server(engine) as live:
        live.server.handle_exit(signal.SIGTERM, None)
        eventually(engine.stopped.is_set)
    assert engine.flushes == []
