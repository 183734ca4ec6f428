"""What a client tries who means no good: another key's answers, more than its share, two readings of one request, paths for model ids."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Live, eventually, live_server, make_app, user
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from test_http_pool import app_of, start

from gnomon.config import HTTPConfig
from gnomon.serve.app import ROUTES
from gnomon.serve.routes.stats import MAX_STREAMS

RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
MINE, THEIRS = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
TWO_KEYS = HTTPConfig(api_keys=("mine", "theirs"))


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine, http=TWO_KEYS), base_url="http://localhost") as made:
        yield made


def test_every_route_but_the_pages_asks_for_a_key(client: TestClient, engine: FakeEngine) -> None:
    """Also with what proxies and routers are known to read in two ways."""
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    asked = 0
    for route in routes:
        path = route.path.replace("{response_id}", "resp_1").replace("{model:path}", "m").replace("{name}", "x.js")
        if path in ("/", "/status", "/health") or path.startswith("/web/"):
            continue
        for method in route.methods:
            for spelling in (path, f"/{path}", f"{path}/", f"/web/..{path}", f"/web/%2e%2e{path}", f"{path}?x=/health"):
                response = client.request(method, f"http://localhost{spelling}")
                # A spelling that makes it a page's file names none: no route answers.
                assert response.status_code in ((404, 401) if spelling.startswith("/web/") else (401,)), spelling
                asked += 1
    assert asked > 100
    assert engine.submitted == []


def test_a_response_is_its_keys_own(client: TestClient, engine: FakeEngine) -> None:
    made = client.post(RESPONSES, json={"input": "my secret"}, headers=MINE).json()["id"]
    before = len(engine.submitted)
    unknown = client.get(f"{RESPONSES}/resp_nothing", headers=THEIRS)
    tries = [
        client.get(f"{RESPONSES}/{made}", headers=THEIRS),
        client.get(f"{RESPONSES}/{made}/input_items", headers=THEIRS),
        client.post(f"{RESPONSES}/{made}/cancel", headers=THEIRS),
        client.delete(f"{RESPONSES}/{made}", headers=THEIRS),
        client.post(RESPONSES, json={"input": "say it again", "previous_response_id": made}, headers=THEIRS),
    ]
    for one in tries:
        assert one.status_code == unknown.status_code == 404
        # Nothing tells that there is such a response.
        assert "is not known: it was never stored here, was deleted, or is too old" in one.json()["error"]["message"]
    assert len(engine.submitted) == before
    assert client.get(f"{RESPONSES}/{made}", headers=MINE).json()["id"] == made
    again = client.post(RESPONSES, json={"input": "and?", "previous_response_id": made}, headers=MINE)
    assert again.status_code == 200
    assert client.delete(f"{RESPONSES}/{made}", headers=MINE).json()["deleted"] is True


def test_a_response_under_way_is_stopped_by_its_own_key_only() -> None:
    engine = FakeEngine(script=None)
    with live_server(engine, http=TWO_KEYS) as live, httpx.Client(base_url=live.url, timeout=120) as client:
        body = {"input": "Hi", "stream": True}
        with client.stream("POST", RESPONSES, json=body, headers=MINE) as response:
            lines = response.iter_lines()
            job = engine.take()
            name = job.request.id
            assert name in next(line for line in lines if line.startswith("data:"))
            assert client.get(f"{RESPONSES}/{name}", headers=THEIRS).status_code == 404
            assert client.post(f"{RESPONSES}/{name}/cancel", headers=THEIRS).status_code == 404
            assert not job.cancelled.is_set()
            assert client.get(f"{RESPONSES}/{name}", headers=MINE).json()["status"] == "in_progress"
            assert client.post(f"{RESPONSES}/{name}/cancel", headers=MINE).json()["status"] == "cancelled"


def test_sessions_of_two_keys_are_two(client: TestClient, engine: FakeEngine) -> None:
    for headers in (MINE, THEIRS, {**MINE, "x-session-id": "s"}):
        extra = {} if "x-session-id" in headers else {"session_id": "s"}
        assert client.post(CHAT, json={**user("Hi"), **extra}, headers=headers).status_code == 200
    mine, theirs, head = (one.session for one in engine.submitted)
    assert mine == head != theirs
    assert mine is not None
    engine.sessions = {mine}
    close = "/admin/cache/session/close"
    assert client.post(close, json={"session_id": "s"}, headers=THEIRS).json() == {"closed": False}
    assert client.post(close, json={"session_id": mine}, headers=THEIRS).json() == {"closed": False}
    assert client.post(close, json={"session_id": "s"}, headers=MINE).json() == {"closed": True}


@pytest.mark.parametrize(("keys", "told"), [((), True), (("mine",), True), (("mine", "theirs"), False)])
def test_no_key_reads_words_of_anothers_prompt(keys: tuple[str, ...], told: bool) -> None:
    """A probe whose prompt begins like another's would be told how the other goes on."""
    engine = FakeEngine()
    miss = {"request": "r", "kind": "edited text", "position": 9, "before": "key is", "prompt": "x", "stored": "4711"}
    engine.sections = {"prompt_cache": {"hits": 1, "recent_misses": [miss]}}
    with TestClient(make_app(engine, http=HTTPConfig(api_keys=keys)), base_url="http://localhost") as client:
        stats = client.get("/stats", headers=MINE).json()["prompt_cache"]
    assert stats["hits"] == 1
    words = {"before", "prompt", "stored"}
    assert set(stats["recent_misses"][0]) == (set(miss) if told else set(miss) - words)


def test_streams_of_statistics_are_bounded() -> None:
    with live_server(FakeEngine()) as live, httpx.Client(base_url=live.url, timeout=120) as client:
        with ExitStack() as streams:
            for _ in range(MAX_STREAMS):
                opened = streams.enter_context(client.stream("GET", "/stats/stream?interval=60"))
                assert opened.status_code == 200
            refused = client.get("/stats/stream")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
            assert client.get("/health").status_code == 200
        eventually(lambda: live.app.state.services.metrics.watchers == 0)


def raw(live: Live[Any], data: bytes) -> bytes:
    """All that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", live.port), 120) as connection:
        connection.sendall(data)
        said = b""
        while part := connection.recv(65_536):
            said += part
    return said


HIDDEN = b"GET /stats HTTP/1.1\r\nhost: localhost\r\nx-smuggled: 1\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "head",
    [
        POST + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN),
        POST + b"content-length: 0, %d\r\n\r\n" % len(HIDDEN),
        POST + b"content-length: +0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: %d\r\n\r\n0\r\n\r\n" % len(HIDDEN),
        POST + b"transfer-encoding: xchunked\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 0\r\nhost: localhost\r\n\r\n",
        POST + b"x-a: b\r\n folded: c\r\ncontent-length: 0x0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\nhost: localhost\r\r\n\r\n",
    ],
)
def test_a_request_that_can_be_read_in_two_ways_hides_no_other(head: bytes) -> None:
    with live_server(FakeEngine()) as live:
        said = raw(live, head + HIDDEN)
        assert said.split(b" ", 2)[1][:1] == b"4", said[:200]
        # The hidden one gets no answer of its own.
        assert said.count(b"HTTP/1.1 ") == 1, said
        assert b"generations" not in said


PATHS = ("../secret", "/etc/passwd", "..%2fsecret", "org/two/../../x", "one/", "ONE", "one\0", "", " one", "~", "...")


def test_a_model_is_found_by_its_id_and_never_by_a_path() -> None:
    pool = start()
    try:
        with TestClient(app_of(pool, HTTPConfig()), base_url="http://localhost") as client:  # pyright: ignore[reportArgumentType]
            for name in PATHS:
                response = client.post(CHAT, json={**user("Hi"), "model": name})
                assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found"), name
                assert client.get("/stats", params={"model": name}).status_code == 404, name
    finally:
        pool.stop()
