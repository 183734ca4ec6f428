"""Requests as coding agents were seen to send them, shortened to a tool or two."""

from __future__ import annotations

import json
from typing import Any

from fake_engine import CALLING, FakeEngine, Job, make_app, named_events, prompts
from starlette.testclient import TestClient

SCHEMA = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
FUNCTION = {
    "type": "function",
    "name": "close_agent",
    "description": "Close it.",
    "strict": False,
    "parameters": SCHEMA,
}
SPACE = {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [FUNCTION]}
# Codex 0.171.0.
CODEX: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are a coding agent."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Stop them."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "strict": False,
            "parameters": {"type": "object", "properties": {}},
        },
        SPACE,
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "i"},
}


def say(job: Job) -> None:
    call = json.dumps({"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}})
    job.say("Closed." if "<tool>" in job.text else f"<tool_call>\n{call}\n</tool_call>")


def client_of(engine: FakeEngine) -> TestClient:
    return TestClient(make_app(engine, template=CALLING), base_url="http://localhost")


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    engine = FakeEngine(say)
    with client_of(engine) as client:
        response = client.post("/v1/responses", json=CODEX)
        assert response.headers["warning"] == '299 gnomon "tools that only OpenAI\'s servers have were left out: 1"'
        events = named_events(response.text)
        whole = events[-1]["response"]
        call = whole["output"][0]
        assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
        assert json.loads(call["arguments"]) == {"target": "a"}
        named = [
            event.get("name") or event["item"]["name"]
            for event in events
            if event["type"].endswith(("item.done", "arguments.done"))
        ]
        assert named == ["close_agent", "close_agent"]
        assert [tool["name"] for tool in whole["tools"]] == ["exec_command", "multi_agent_v1"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        more = client.post("/v1/responses", json={**CODEX, "stream": False, "input": [*CODEX["input"], call, result]})
    assert more.json()["output"][0]["content"][0]["text"] == "Closed."
    first, second = prompts(engine)
    assert '"name": "multi_agent_v1__close_agent", "description": "Close it."' in first
    assert '<assistant>[multi_agent_v1__close_agent {"target": "a"}]\n<tool>done\n' in second


def test_namespaces_that_cant_be_offered_are_named() -> None:
    twice = {**FUNCTION, "name": "multi_agent_v1__close_agent"}
    cases: list[tuple[list[Any], str]] = [
        ([SPACE, twice], 'tools has "multi_agent_v1__close_agent" twice'),
        ([{**SPACE, "name": None}], "tools[0].name is required of a namespace"),
        ([{**SPACE, "tools": [{"type": "function"}]}], "tools[0].tools[0].name is required of a function"),
        ([{**SPACE, "tools": [SPACE]}], "tools[0].tools[0] is a namespace within a namespace"),
        ([{**SPACE, "tools": [{"type": "custom", "name": "x"}]}], "tools[0].tools[0] is of type custom"),
    ]
    with client_of(FakeEngine()) as client:
        for tools, said in cases:
            response = client.post("/v1/responses", json={**CODEX, "tools": tools})
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(said)


# Claude Code 2.1.332.
CLAUDE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.f5b; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Read", "description": "Reads.", "input_schema": SCHEMA}],
    "metadata": {"user_id": "{}"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


def test_what_claude_code_sends_again_begins_as_before() -> None:
    engine = FakeEngine(lambda job: job.say("hm</think>Let me see."))
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "system", "content": "# Environment"},
    ]
    with client_of(engine) as client:
        for display in ("updates", "omitted"):
            body = {**CLAUDE, "thinking": {"type": "enabled", "display": display}}
            first = client.post("/v1/messages?beta=true", json={**body, "messages": asked})
            assert first.headers["x-gnomon-moved"] == "anthropic-billing"
            assert "warning" not in first.headers
            turn = {"role": "assistant", "content": first.json()["content"]}
            more = {**body, "messages": [*asked, turn, {"role": "user", "content": "Go on."}]}
            assert client.post("/v1/messages?beta=true", json=more).status_code == 200
            before, after = (text.partition("<tools>")[0] for text in prompts(engine)[-2:])
            assert after == f"{before}<assistant>(hm)Let me see.\n<user>Go on.\n"
