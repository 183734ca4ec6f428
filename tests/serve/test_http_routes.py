"""Health, models, root, stats, metrics, and the OpenAPI document."""

from __future__ import annotations

import json

import pytest
from fake_engine import MODEL, THINKING, FakeEngine, make_app, user
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from gnomon.engine.api import Health


def test_health_is_the_engine_s_heartbeat(client: TestClient, engine: FakeEngine) -> None:
    response = client.get("/health")
    assert (response.status_code, response.content) == (200, b'{"status": "ok"}')


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (Health("stalled", 12.34), "the engine's loop last turned 12.3 s ago"),
        (Health("failed", 0.0, "the device is gone"), "the device is gone"),
        (Health("draining"), "the engine is draining"),
        (Health("loading", 1.0), "the engine is loading"),
        (Health("stopped"), "the engine is stopped"),
    ],
)
def test_anything_else_is_red(client: TestClient, engine: FakeEngine, health: Health, reason: str) -> None:
    engine.state = health
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": health.state, "reason": reason}


def test_models(client: TestClient, engine: FakeEngine) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    Model.model_validate(model, strict=True)
    assert model == {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "gnomon",
        "context_window": 512,
        "reasoning": False,
        "vision": False,
        "tool_format": None,
        "model_type": "llama",
        "size_bytes": 1000,
    }
    assert client.get(f"/v1/models/{MODEL}").json() == model
    with TestClient(make_app(engine, template=THINKING), base_url="http://localhost") as thinking:
        assert thinking.get("/v1/models").json()["data"][0]["reasoning"] is True


def test_root_names_every_endpoint(client: TestClient) -> None:
    body = client.get("/v1").json()
    assert (body["name"], body["model"]) == ("gnomon", MODEL)
    assert body["version"]
    assert body["endpoints"] == [
        "DELETE /v1/responses/{response_id}",
        "GET /engine",
        "GET /health",
        "GET /metrics",
        "GET /stats",
        "GET /stats/stream",
        "GET /v1",
        "GET /v1/models",
        "GET /v1/models/{model_id}",
        "GET /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "POST /admin/cache/flush",
        "POST /admin/cache/session/close",
        "POST /admin/drain",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/embeddings",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/responses",
        "POST /v1/responses/{response_id}/cancel",
    ]


def test_stats(client: TestClient, engine: FakeEngine) -> None:
    before = client.get("/stats").json()
    assert before["latency"]["first_token_ms"] == {"p50": None, "p95": None, "max": None}
    client.post("/v1/chat/completions", json=user("Hi"))
    engine.script = lambda job: job.fail("no")
    client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    stats = client.get("/stats").json()
    assert set(stats["server"]) == {"owner", "model", "started_at"}
    assert stats["server"]["model"] == MODEL
    assert stats["batch"] == {"configured": 8, "mode": "batch", "active_rows": 0}
    assert stats["generations"] == {"open": 0, "completed": 1, "failed": 1, "cancelled": 0}
    assert stats["preparation"] == {"running": 0, "waiting": 0, "limit": 64, "workers": 2}
    assert stats["latency"]["requests"] == 1
    assert 0 <= stats["latency"]["first_token_ms"]["p50"] <= stats["latency"]["total_ms"]["p50"]


def test_metrics(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/chat/completions", json=user("Hi"))
    client.post("/v1/chat/completions", json={})
    client.get("/nowhere/at/all")
    engine.sections = {
        "batch": {"active_rows": 3, "mode": "batch", "inner": {"kv-bytes": 7, "buckets": {"1": 2}}},
        "engine": {"open": 5},
    }
    text = client.get("/metrics").text
    samples = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[name, tuple(sorted(labels.items()))]

    route = {"method": "POST", "route": "/v1/chat/completions"}
    assert value("gnomon_http_requests_total", **route, status="200") == 1
    assert value("gnomon_http_requests_total", **route, status="400") == 1
    assert value("gnomon_http_requests_total", method="GET", route="unmatched", status="404") == 1
    assert value("gnomon_generations_total", endpoint="chat", outcome="completed") == 1
    assert value("gnomon_prompt_tokens_total") == 20
    assert value("gnomon_completion_tokens_total") == 5
    assert value("gnomon_first_token_seconds_count") == 1
    assert value("gnomon_engine_up") == 1
    assert value("gnomon_engine_batch_active_rows") == 3
    assert value("gnomon_engine_batch_inner_kv_bytes") == 7
    assert not any("buckets" in name or "engine_open" in name for name, _ in samples)
    engine.state = Health("stalled", 9.0)
    assert "gnomon_engine_up 0.0" in client.get("/metrics").text


def test_the_openapi_document_is_whole(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for part in text.split('"$ref": "')[1:]:
        name = part.partition('"')[0]
        assert name.removeprefix("#/components/schemas/") in schemas, name
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert {"messages", "max_completion_tokens", "hlg", "logit_bias"} <= set(schemas["ChatRequest"]["properties"])
    assert {"ChatCompletion", "Completion", "CompletionRequest", "Message", "Tool"} <= set(schemas)


def test_no_page_that_loads_scripts_from_elsewhere(client: TestClient) -> None:
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
