"""Several models behind the HTTP routes: which one a request gets, what is told of them, and what happens when one can't be had."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import ByteTokenizer, eventually, serving, user
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from stub_child import HANG
from test_isolated_engine import CHILD, QUICK

from gnomon.chat.template import ChatTemplate
from gnomon.config import HTTPConfig, SamplingDefaults
from gnomon.isolate import Entry, IsolatedEngine, Limits, ModelPool, Plan
from gnomon.serve.app import create_app
from gnomon.serve.services import Voice

Pool = ModelPool[Voice]
TOKENIZER = ByteTokenizer()
VOICES = {temperature: SamplingDefaults(temperature=temperature) for temperature in (0.25, 0.5)}


def start(places: int = 2, limits: Limits | None = None, **how: Any) -> Pool:
    """`one`, `org/two` and `broken`, of which the last can't be loaded; `one` is there."""
    entries = [
        Entry(name, what, kind, 1000, 10, 1_700_000_000, 512)
        for name, what, kind in (
            ("one", "model one", "llama"),
            ("org/two", "model org/two", "qwen3"),
            ("broken", "unloadable", "llama"),
        )
    ]

    def opened(entry: Entry, engine: IsolatedEngine) -> Voice:
        sampling = VOICES[0.25 if entry.id == "one" else 0.5]
        return Voice(engine, TOKENIZER, ChatTemplate(TOKENIZER), sampling)

    pool = ModelPool(
        entries,
        Plan(places, how.pop("room", 1000), False),
        lambda entry, _: IsolatedEngine(CHILD, entry.path, QUICK),
        opened,
        limits=limits,
    )
    pool.acquire(None).result(300).release()
    return pool


def app_of(pool: Pool, http: HTTPConfig | None = None) -> FastAPI:
    voice = pool.acquire(None).result(300)
    voice.release()
    parts = voice.parts
    return create_app(parts.engine, parts.vocabulary, parts.template, http or HTTPConfig(), parts.sampling, pool=pool)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = start()
    yield made
    made.stop()


@pytest.fixture
def client(pool: Pool) -> Iterator[TestClient]:
    with TestClient(app_of(pool), base_url="http://localhost") as made:
        yield made


def rows(pool: Pool) -> dict[str, dict[str, Any]]:
    return {entry.id: dict(row) for entry, row in pool.entries()}


def at_rest(pool: Pool) -> bool:
    return not any(row["leases"] or row["waiting"] for row in rows(pool).values())


def test_the_list_of_models_loads_none(client: TestClient, pool: Pool) -> None:
    before = {name: row["loads"] for name, row in rows(pool).items()}
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["model_type"], one["context_window"]) for one in listed] == [
        ("one", "llama", 512),
        ("org/two", "qwen3", 512),
        ("broken", "llama", 512),
    ]
    assert listed[0]["state"] == "resident"
    assert client.get("/v1/models/org/two").json()["id"] == "org/two"
    unknown = client.get("/v1/models/three")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "one, org/two and broken are" in unknown.json()["error"]["message"]
    assert {name: row["loads"] for name, row in rows(pool).items()} == before
    assert client.get("/v1").json()["model"] == "one"


def text_of(body: dict[str, Any]) -> str:
    return body["choices"][0]["message"]["content"]


def test_every_route_asks_the_model_of_its_exact_id(client: TestClient, pool: Pool) -> None:
    def post(route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    for name in ("one", "org/two"):
        made = post("/v1/chat/completions", user("Hi", model=name))
        assert (made["model"], text_of(made)) == (name, f"{name} one two")
        made = post("/v1/completions", {"model": name, "prompt": "Hi"})
        assert (made["model"], made["choices"][0]["text"]) == (name, f"{name} one two")
        made = post("/v1/messages", user("Hi", model=name, max_tokens=5))
        assert (made["model"], made["content"][0]["text"]) == (name, f"{name} one two")
        made = post("/v1/responses", {"model": name, "input": "Hi"})
        assert (made["model"], made["output"][0]["content"][0]["text"]) == (name, f"{name} one two")
        # What is a model's own, such as its sampling, is the model's that was asked.
        assert made["temperature"] == (0.25 if name == "one" else 0.5)
        assert post("/v1/embeddings", {"model": name, "input": "Hi"})["data"][0]["embedding"] == [len(name), 0]
        before = rows(pool)[name]["requests"]
        assert post("/v1/messages/count_tokens", user("Hi", model=name, max_tokens=5))["input_tokens"] > 2
        assert rows(pool)[name]["requests"] == before + 1
    assert text_of(post("/v1/chat/completions", user("Hi"))) == "one one two"
    assert text_of(post("/v1/chat/completions", user("Hi", model=None))) == "one one two"
    assert at_rest(pool)


def test_a_conversation_may_go_on_with_another_model(client: TestClient) -> None:
    first = client.post("/v1/responses", json={"model": "one", "input": "Hi"}).json()
    later = {"model": "org/two", "input": "And?", "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=later).json()["model"] == "org/two"


def test_an_unknown_id_is_named_with_those_that_are_known(client: TestClient) -> None:
    refused = client.post("/v1/chat/completions", json=user("Hi", model="ONE"))
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "there is no model 'ONE' here; there are one, org/two, broken"
    refused = client.post("/v1/messages", json=user("Hi", model="claude", max_tokens=5))
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    refused = client.post("/v1/completions", json={"model": 7, "prompt": "Hi"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "model must be of type str, got 7")


def test_a_model_that_cannot_be_loaded_fails_its_requests_only(client: TestClient, pool: Pool) -> None:
    refused = client.post("/v1/chat/completions", json=user("Hi", model="broken", stream=True))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_unavailable"
    assert "broken can't be loaded: there is no such model" in refused.json()["error"]["message"]
    listed = client.get("/v1/models/broken").json()
    assert (listed["state"], listed["reason"]) == ("failed", "broken can't be loaded: there is no such model")
    assert client.get("/health").json() == {"status": "ok"}
    assert text_of(client.post("/v1/chat/completions", json=user("Hi", model="one")).json()) == "one one two"
    assert at_rest(pool)


def test_what_is_told_of_each_model(client: TestClient, pool: Pool) -> None:
    for name in ("one", "org/two"):
        client.post("/v1/chat/completions", json=user("Hi", model=name))
    pids = {name: rows(pool)[name]["pid"] for name in ("one", "org/two")}
    eventually(lambda: all("batch" in engine.stats() for engine in pool.engines().values()))
    stats = client.get("/stats").json()
    assert (stats["server"]["model"], stats["pid"]) == ("org/two", pids["org/two"])
    assert {one["id"]: one["state"] for one in stats["pool"]["models"]}["one"] == "resident"
    stats = client.get("/stats", params={"model": "one"}).json()
    assert (stats["server"]["model"], stats["pid"], stats["history"]["entries"] > 1) == ("one", pids["one"], True)
    assert client.get("/stats", params={"model": "x"}).status_code == 404
    assert client.get("/stats/stream", params={"model": "x"}).status_code == 404
    about = client.get("/engine").json()
    assert (about["isolated"], about["pid"], about["pool"]["default"]) == (True, pids["one"], "one")
    assert set(about["pool"]["resident"]) == {"one", "org/two"}
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        found |= {(s.name, s.labels["model"]): s.value for s in family.samples if "model" in s.labels}
    for name in ("one", "org/two"):
        assert found["gnomon_engine_up", name] == found["gnomon_pool_resident", name] == 1
        assert found["gnomon_engine_batch_configured", name] == 8
        assert found["gnomon_pool_loads_total", name] == rows(pool)[name]["loads"]
    assert found["gnomon_pool_resident", "broken"] == 0
    assert ("gnomon_engine_up", "broken") not in found


def test_a_stream_holds_its_model_until_it_ends_or_its_client_leaves() -> None:
    pool = start(places=1)
    http = HTTPConfig()
    try:
        with (
            serving(app_of(pool, http), pool, http) as live,  # pyright: ignore[reportArgumentType]
            httpx.Client(base_url=live.url, timeout=300) as client,
        ):
            hanging = {"model": "one", "prompt": [HANG], "stream": True}
            with client.stream("POST", "/v1/completions", json=hanging) as stream:
                lines = stream.iter_lines()
                next(lines)
                # The other is loaded and answers while the first one's answer goes on.
                other = client.post("/v1/chat/completions", json=user("Hi", model="org/two")).json()
                assert text_of(other) == "org/two one two"
                states = {name: row["state"] for name, row in rows(pool).items()}
                assert (states["one"], states["org/two"], rows(pool)["one"]["leases"]) == ("draining", "resident", 1)
            eventually(lambda: rows(pool)["one"]["state"] == "cold")
            # Killed in the middle of an answer, a model takes nobody else's with it.
            with client.stream("POST", "/v1/completions", json={**hanging, "model": "org/two"}) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(rows(pool)["org/two"]["pid"], signal.SIGKILL)
                assert any("engine_died" in line for line in lines)
            again = client.post("/v1/chat/completions", json=user("Hi", model="org/two")).json()
            assert text_of(again) == "org/two one two"
            eventually(lambda: at_rest(pool))
    finally:
        pool.stop()


def test_who_waits_is_bounded_and_may_leave() -> None:
    pool = start(places=1, room=10, limits=Limits(queue=1, wait=300.0))
    http = HTTPConfig()
    hanging = {"model": "one", "prompt": [HANG], "stream": True}
    two = user("Hi", model="org/two")
    try:
        with (
            serving(app_of(pool, http), pool, http) as live,  # pyright: ignore[reportArgumentType]
            httpx.Client(base_url=live.url, timeout=300) as client,
            ThreadPoolExecutor() as threads,
        ):
            with client.stream("POST", "/v1/completions", json=hanging) as stream:
                lines = stream.iter_lines()
                next(lines)
                waiting = threads.submit(client.post, "/v1/chat/completions", json=two)
                eventually(lambda: rows(pool)["org/two"]["waiting"] == 1)
                refused = client.post("/v1/chat/completions", json=two)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                for waiter in pool._members["org/two"].waiters:
                    waiter.deadline = 0.0
                late = waiting.result()
                assert (late.status_code, late.json()["error"]["code"]) == (503, "model_unavailable")
                assert "org/two was not loaded within 300 s" in late.json()["error"]["message"]
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/chat/completions", json=two, timeout=httpx.Timeout(120, read=0.3))
                eventually(lambda: rows(pool)["org/two"]["waiting"] == 0)
            eventually(lambda: at_rest(pool))
            assert rows(pool)["org/two"]["loads"] == 0
            many = [threads.submit(client.post, "/v1/chat/completions", json=user("Hi", model="one")) for _ in range(4)]
            assert [text_of(one.result().json()) for one in many] == ["one one two"] * 4
    finally:
        pool.stop()


@pytest.fixture
def unix(tmp_path: Path) -> Callable[[Pool], TestClient]:
    def made(pool: Pool) -> TestClient:
        return TestClient(app_of(pool, HTTPConfig(unix=tmp_path / "socket", shutdown_timeout_ms=2000)))

    return made


def test_draining_a_model_and_the_server(client: TestClient, unix: Callable[[Pool], TestClient]) -> None:
    refused = client.post("/admin/drain", json={"model": "one"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unix_only")
    pool = start()
    try:
        with unix(pool) as admin:
            assert admin.post("/admin/drain", json={"model": "x"}).status_code == 404
            assert admin.post("/admin/drain", json={"model": "one"}).json() == {"drained": True, "cache": None}
            assert rows(pool)["one"]["state"] == "cold"
            assert admin.get("/health").json() == {"status": "ok"}
            assert admin.get("/v1").json()["model"] == "one"
            assert text_of(admin.post("/v1/chat/completions", json=user("Hi", model="one")).json()) == "one one two"
            assert admin.post("/admin/drain").json() == {"drained": True, "cache": None}
            assert admin.get("/health").json()["status"] == "draining"
            late = admin.post("/v1/chat/completions", json=user("Hi", model="one"))
            assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_unavailable")
    finally:
        pool.stop()
