"""Whatever JSON is sent to Messages and Responses, the answer is theirs: 200, or a 4xx with their error body."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fake_engine import CALLING, FakeEngine, make_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a", "signature": ""},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b", "is_error": True}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stop_sequences": ["a"],
        "chat_template_kwargs": {"enable_thinking": True},
        "temperature": 0.5,
        "stream": False,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "b"},
        ],
        "instructions": "a",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "include": ["a"],
        "logit_bias": {"1": 2},
        "max_output_tokens": 9,
        "stream": False,
    },
}  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
    st.sampled_from([[], {}, [[]], [{}], {"type": "x"}, [IMAGE], {"type": "object"}, "auto", "any", "text"]),
)
STEPS = st.lists(st.tuples(st.integers(0, 10**6), VALUES, st.booleans()), min_size=1, max_size=3)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every container below with one of its keys."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [(node, key) for key in keys] + [found for key in keys for found in places(node[key])]


@pytest.fixture(scope="module")
def client() -> TestClient:
    made = make_app(FakeEngine(), template=CALLING)
    return TestClient(made, base_url="http://localhost", raise_server_exceptions=False)


@pytest.mark.parametrize("route", SEEDS)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=STEPS)
def test_any_json(client: TestClient, route: str, steps: list[tuple[int, Any, bool]]) -> None:
    body = copy.deepcopy(SEEDS[route])
    for number, value, drop in steps:
        found = places(body)
        if not found:
            break
        node, key = found[number % len(found)]
        if drop and isinstance(node, dict):
            del node[key]
        else:
            node[key] = copy.deepcopy(value)
    response = client.post(route, json=body)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"]
        assert (response.json().get("type") == "error") == (route == "/v1/messages")
