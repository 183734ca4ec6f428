"""/v1/responses over a scripted engine: what goes in, what comes out in which order, and what is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import CALLING, MODEL, FakeEngine, Job, eventually, full, make_app, named_events, prompts
from starlette.testclient import TestClient

from gnomon.engine.api import SamplingParams
from gnomon.serve.services import Services

RESPONSES = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def app_client(engine: FakeEngine, **made: Any) -> TestClient:
    return TestClient(make_app(engine, **{"template": CALLING, **made}), base_url="http://localhost")


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with app_client(engine) as made:
        yield made


def respond(client: TestClient, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    response = client.post(RESPONSES, json={"model": "any", "input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, given: Any = "Hi", **fields: Any) -> list[dict[str, Any]]:
    response = client.post(RESPONSES, json={"input": given, "stream": True, **fields})
    assert response.status_code == 200, response.text
    events = named_events(response.text)
    check_order(events)
    return events


CHAINS = {
    "reasoning": (
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ),
    "message": ("content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
    "function_call": ("function_call_arguments.delta", "function_call_arguments.done"),
}


def check_order(events: list[dict[str, Any]]) -> None:
    """The rules of a stream: numbered from 0; created, in progress; items one after the other, each with its chain; one last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    item: dict[str, Any] | None = None
    chain: list[str] = []
    count = 0
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == count
        if kind == "output_item.added":
            assert item is None
            item, chain = event["item"], []
        elif kind == "output_item.done":
            assert item is not None
            assert (event["item"]["id"], event["item"]["type"]) == (item["id"], item["type"])
            told = [one for index, one in enumerate(chain) if index == 0 or chain[index - 1] != one]
            assert [one for one in CHAINS[item["type"]] if one in told or not one.endswith("delta")] == told
            item, count = None, count + 1
        else:
            assert item is not None
            assert event["item_id"] == item["id"]
            chain.append(kind)
    assert item is None
    assert count == len(events[-1]["response"]["output"])


def test_a_whole_response(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 50, "metadata": {"a": "b"}})
    body = response.json()
    name = body["id"]
    assert name.startswith("resp_")
    assert len(name) == 29
    tokens = len(engine.submitted[0].prompt)
    assert isinstance(body["created_at"], int)
    assert body["created_at"] <= body["completed_at"]
    assert body["output"] == [
        {
            "id": f"msg_{name[5:]}0000",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert body["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + 5,
    }
    rest = ("id", "created_at", "completed_at", "output", "usage")
    assert {key: value for key, value in body.items() if key not in rest} == {
        "object": "response",
        "status": "completed",
        "model": MODEL,
        "error": None,
        "incomplete_details": None,
        "temperature": 0.7,
        "top_p": 0.0,
        "background": False,
        "instructions": None,
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": None,
    }
    assert response.headers["x-gnomon-tier"] == "L1"
    assert engine.submitted[0].max_tokens == 50


def test_every_event_in_order(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"hm</think>Yes\n{CALL}\n{CALL}")
    with app_client(engine) as client:
        events = stream(client, tools=[TOOL], reasoning={"effort": "high"})
    last = events[-1]
    assert last["type"] == "response.completed"
    body = last["response"]
    thought, text, first, second = body["output"]
    assert [one["type"] for one in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert text["content"][0]["text"] == "Yes"
    assert (first["name"], json.loads(first["arguments"])) == ("add", {"x": 1})
    assert first["id"].startswith("fc_")
    assert first["call_id"] != second["call_id"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hm</think>")
    assert body["tools"] == [TOOL]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == body["output"]
    texts = {
        "reasoning_summary_text": "hm",
        "output_text": "Yes",
        "function_call_arguments": first["arguments"] + second["arguments"],
    }
    for kind, whole in texts.items():
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == whole
        assert len(deltas) > 1
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None


def test_no_text_is_one_empty_message(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say("")
    with app_client(engine) as client:
        assert respond(client)["output"][0]["content"][0]["text"] == ""
        stream(client)


def test_what_the_limit_cuts_is_incomplete_and_stored(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say("Hel", "length")
    with app_client(engine) as client:
        body = respond(client)
        last = stream(client)[-1]
        assert client.get(f"{RESPONSES}/{body['id']}").json() == body
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_cached_tokens(engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.finish()
        job.end(cached_tokens=4)

    engine.script = script
    with app_client(engine) as client:
        usage = respond(client)["usage"]
    assert usage["input_tokens"] == len(engine.submitted[0].prompt)
    assert usage["input_tokens_details"]["cached_tokens"] == 4


def test_items_become_a_history(client: TestClient, engine: FakeEngine) -> None:
    respond(
        client,
        [
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+"}, {"type": "input_text", "text": "0?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "secret"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
            {"role": "user", "content": "So?"},
        ],
        instructions="Be brief.",
        tools=[TOOL],
    )  # fmt: skip
    assert prompts(engine)[0].startswith(
        "<system>Be brief.\n\nBe kind.\n<user>1+0?\n"
        '<assistant>(secret)Let me see.[add {"x": 1}][add {}]\n<tool>1\n<tool>0\n<user>So?\n'
        '<tools>[{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
    )


def test_going_on_from_a_response(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(
        CALL if job.text.count("<user>") == 1 and "<tool>" not in job.text else "hm</think>Two"
    )
    with app_client(engine) as client:
        first = respond(client, "1+1?", tools=[TOOL], instructions="Be brief.")
        call = first["output"][0]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        fields = {"tools": [TOOL], "reasoning": {"effort": "low"}}
        second = respond(client, [result], previous_response_id=first["id"], **fields)
        assert second["instructions"] == "Be brief."
        assert [one["type"] for one in second["output"]] == ["reasoning", "message"]
        third = respond(client, "Sure?", previous_response_id=second["id"], instructions="Be long.", store=False)
        assert client.get(f"{RESPONSES}/{third['id']}").status_code == 404
        # The same response can be gone on from again.
        respond(client, "Really?", previous_response_id=second["id"])
    told = '<user>1+1?\n<assistant>[add {"x": 1}]\n<tool>2\n'
    assert prompts(engine)[1].startswith(f"<system>Be brief.\n{told}<tools>")
    assert prompts(engine)[2] == f"<system>Be long.\n{told}<assistant>(hm)Two\n<user>Sure?\n<assistant><think></think>"
    assert (
        prompts(engine)[3] == f"<system>Be brief.\n{told}<assistant>(hm)Two\n<user>Really?\n<assistant><think></think>"
    )


def test_get_items_and_delete(client: TestClient) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_mine"},
        {"type": "function_call_output", "call_id": "c", "output": "b"},
    ]
    body = respond(client, items)
    path = f"{RESPONSES}/{body['id']}"
    assert client.get(path).json() == body
    listed = client.get(f"{path}/input_items").json()
    assert [one["type"] for one in listed["data"]] == ["function_call_output", "function_call", "message"]
    assert listed["data"][1]["id"] == "fc_mine"
    assert listed["data"][2]["content"] == [{"type": "input_text", "text": "a"}]
    assert (listed["first_id"], listed["has_more"]) == (listed["data"][0]["id"], False)
    page = client.get(f"{path}/input_items", params={"order": "asc", "limit": 1}).json()
    assert (page["data"], page["has_more"]) == ([listed["data"][2]], True)
    rest = client.get(f"{path}/input_items", params={"order": "asc", "after": page["last_id"]}).json()
    assert rest["data"] == [listed["data"][1], listed["data"][0]]
    for params, expected in (
        ({"limit": "0"}, "limit must be at least 1 and at most 100"),
        ({"limit": "many"}, "limit must be"),
        ({"order": "up"}, "order must be asc or desc"),
        ({"after": "x"}, "is none of the items"),
    ):
        refused = client.get(f"{path}/input_items", params=params)
        assert refused.status_code == 400
        assert expected in refused.json()["error"]["message"]
    assert client.get(path, params={"stream": "true"}).status_code == 400
    assert client.get("/stats").json()["response_store"]["entries"] == 1
    assert client.delete(path).json() == {"id": body["id"], "object": "response", "deleted": True}
    assert client.get("/stats").json()["response_store"]["entries"] == 0
    for response in (
        client.get(path),
        client.delete(path),
        client.get(f"{path}/input_items"),
        client.post(f"{path}/cancel"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "response_not_found"
    unknown = client.post(RESPONSES, json={"input": "Hi", "previous_response_id": body["id"]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize("streamed", [True, False])
def test_cancelling(engine: FakeEngine, streamed: bool) -> None:
    engine.script = None
    with app_client(engine) as client:
        services: Services = client.app.state.services  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        answers: list[Any] = []
        fields = {"input": "Hi", "stream": streamed}
        thread = threading.Thread(target=lambda: answers.append(client.post(RESPONSES, json=fields)))
        thread.start()
        job = engine.take()
        job.delta("A")
        eventually(lambda: bool(services.responses.running))
        (name,) = services.responses.running
        eventually(lambda: bool(client.get(f"{RESPONSES}/{name}").json()["output"]))
        now = client.get(f"{RESPONSES}/{name}").json()
        assert (now["status"], now["output"][0]["status"]) == ("in_progress", "in_progress")
        cancelled = client.post(f"{RESPONSES}/{name}/cancel").json()
        thread.join(120)
        assert job.cancelled.is_set()
        assert not services.responses.running
        assert client.get(f"{RESPONSES}/{name}").status_code == 404
    assert (cancelled["id"], cancelled["status"]) == (name, "cancelled")
    if streamed:
        last = named_events(answers[0].text)[-1]
        assert last["type"] == "response.incomplete"
        body = last["response"]
    else:
        body = answers[0].json()
    assert body["status"] == "cancelled"
    assert body["output"][0]["content"][0]["text"] == "A"


def test_cancelled_stays_cancelled_though_the_engine_was_faster(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = None
    monkeypatch.setattr(engine, "cancel", lambda _, *, answered=False: None)
    with app_client(engine) as client:
        services: Services = client.app.state.services  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(client.post(RESPONSES, json={"input": "Hi"})))
        thread.start()
        job = engine.take()
        (name,) = services.responses.running
        assert client.post(f"{RESPONSES}/{name}/cancel").json()["status"] == "cancelled"
        job.say("A")
        thread.join(120)
        assert answers[0].json()["status"] == "cancelled"
        assert client.get(f"{RESPONSES}/{name}").status_code == 404


def test_a_response_that_has_ended_can_not_be_cancelled(client: TestClient) -> None:
    body = respond(client)
    refused = client.post(f"{RESPONSES}/{body['id']}/cancel")
    assert refused.status_code == 400
    assert "is completed and can't be cancelled" in refused.json()["error"]["message"]


def test_failures_are_told_and_not_stored(engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.fail("row 0 met a NaN")

    engine.script = script
    with app_client(engine) as client:
        whole = client.post(RESPONSES, json={"input": "Hi"})
        events = named_events(client.post(RESPONSES, json={"input": "Hi", "stream": True}).text)
        assert client.get("/stats").json()["response_store"]["entries"] == 0
        engine.refusal = full()
        assert client.post(RESPONSES, json={"input": "Hi", "stream": True}).status_code == 429
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "row 0 met a NaN")
    assert events[-1]["type"] == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed = events[-1]["response"]
    assert (failed["status"], failed["usage"]) == ("failed", None)
    assert failed["error"] == {"code": "server_error", "message": "row 0 met a NaN"}


def test_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7, "presence_penalty": 0.5}
    body = respond(
        client,
        **sampling,
        logit_bias={"65": 2},
        stop=["END"],
        max_tokens=9,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        service_tier="auto",
        max_tool_calls=3,
        text={"format": {"type": "text"}, "verbosity": "low"},
        truncation="disabled",
    )
    request = engine.submitted[0]
    assert request.sampling == SamplingParams(**sampling, logit_bias=((65, 2.0),))
    assert (request.stop, request.max_tokens) == (("END",), 9)
    assert (body["temperature"], body["top_p"], body["prompt_cache_key"]) == (0.5, 0.9, "k")
    respond(client, max_tokens=9, max_output_tokens=4)
    assert engine.submitted[1].max_tokens == 4


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", True), ("max", True)])
def test_effort_switches_thinking(client: TestClient, engine: FakeEngine, effort: str, thinks: bool) -> None:
    body = respond(client, reasoning={"effort": effort, "summary": "auto"})
    assert prompts(engine)[0].endswith("<think>\n" if thinks else "<think></think>")
    assert body["reasoning"]["effort"] == effort


def test_tools_of_openai_s_servers_are_left_out(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(RESPONSES, json={"input": "Hi", "tools": [{"type": "web_search"}, TOOL]})
    assert "left out: 1" in response.headers["warning"]
    assert response.json()["tools"] == [TOOL]
    respond(client, tools=[TOOL], tool_choice="none")
    assert "<tools>" not in prompts(engine)[1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input must be a str or a list of items, got null"),
    ({"input": []}, "input must not be empty"),
    ({"input": [3]}, "input[0] must be an object, got 3"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type must be one of message, function_call"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be one of user, assistant"),
    ({"input": [{"role": "user"}]}, "input[0].content must be a str or a list of parts, got null"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        f"input[0].content[0] is of type input_image, but the model {MODEL} takes no image input",
    ),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments must be a str"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output is required"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id must be a str"),
    ({"instructions": 3}, "instructions must be of type str, got 3"),
    ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0"),
    ({"temperature": 9}, "temperature must be at most 5, got 9"),
    ({"background": True}, "background is not supported on this route, got true"),
    ({"conversation": "conv_1"}, "conversation is not supported"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
    ({"top_logprobs": 3}, "top_logprobs is not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not supported"),
    ({"truncation": "auto"}, 'truncation must be "disabled"'),
    ({"response_format": {"type": "text"}}, "use text.format"),
    ({"n": 3}, "n must be 1 on this route, got 3"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type must be one of"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort must be one of"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0] is of type custom: only functions can be called"),
    ({"tools": [{"type": "function"}]}, "tools[0].name is required"),
    ({"tool_choice": 3}, "tool_choice must be"),
    ({"previous_response_id": 3}, "previous_response_id must be of type str"),
]


@pytest.mark.parametrize(("fields", "expected"), BAD, ids=[expected[:40] for _, expected in BAD])
def test_bad_inputs(client: TestClient, engine: FakeEngine, fields: dict[str, Any], expected: str) -> None:
    response = client.post(RESPONSES, json={"input": "Hi", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert expected in error["message"]
    assert error["param"].split("[")[0].split(".")[0] in fields
    assert not engine.submitted


@pytest.mark.parametrize(
    ("here", "chat"),
    [
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_a_tool_choice_is_enforced_as_of_a_chat_completion(
    client: TestClient, engine: FakeEngine, here: Any, chat: Any
) -> None:
    respond(client, tools=[TOOL], tool_choice=here)
    function = {key: value for key, value in TOOL.items() if key != "type"}
    fields = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": function}]}
    assert client.post("/v1/chat/completions", json={**fields, "tool_choice": chat}).status_code == 200
    ours, theirs = engine.submitted
    assert ours.constraint is not None
    assert (ours.constraint, ours.prompt) == (theirs.constraint, theirs.prompt)


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def test_a_form_is_demanded_as_of_a_chat_completion(client: TestClient, engine: FakeEngine) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    body = respond(client, text={"format": form})
    respond(client, text={"format": {"type": "json_object"}})
    chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for given in (chat, {"type": "json_object"}):
        fields = {"messages": [{"role": "user", "content": "Hi"}], "response_format": given}
        assert client.post("/v1/chat/completions", json=fields).status_code == 200
    demanded = [request.constraint for request in engine.submitted]
    assert demanded[0] is not None
    assert demanded[0].strict
    assert demanded[:2] == demanded[2:]
    assert body["text"] == {"format": form}


def test_a_form_that_makes_no_sense_is_named_as_here(client: TestClient, engine: FakeEngine) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}
    error = client.post(RESPONSES, json={"input": "Hi", "text": {"format": form}}).json()["error"]
    assert error["param"] == "text.format.schema.type"
    assert error["message"].startswith("text.format.schema.type is not valid in a JSON schema")
    assert not engine.submitted


def test_a_conversation_the_template_refuses_names_the_input(engine: FakeEngine) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with app_client(engine, template=template) as client:
        error = client.post(RESPONSES, json={"input": "Hi"}).json()["error"]
    assert "roles must alternate" in error["message"]
    assert error["param"] == "input"
