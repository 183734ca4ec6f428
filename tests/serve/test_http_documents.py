"""Documents by URL in requests of all routes: refused with the way to allow them, or read and put in their place."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import ByteTokenizer, FakeEngine, eventually, live_server, make_app, prompts
from starlette.testclient import TestClient

from gnomon.config import FetchConfig
from gnomon.fetch import Document, FetchError
from gnomon.serve.documents import BREAK, MOST, plain

URL = "https://docs.example/a.md"
TEXT = "# Title\nThe code is 4711."
QUOTED = f"<document>\n<source>{URL}</source>\n<document_content>\n{TEXT}\n</document_content>\n</document>\n"
RESULT = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "document", "source": {"type": "url", "url": URL}}],
}
CALL = {"type": "tool_use", "id": "t", "name": "read", "input": {}}

Body = dict[str, Any]


def chat(part: Any) -> Body:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Read:"}, part]}]}


def messages(part: Any) -> Body:
    return {**chat(part), "max_tokens": 8}


def responses(part: Any) -> Body:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Read:"}, part]}]}


DOCUMENT = {"type": "document", "source": {"type": "url", "url": URL}}
PLACES: list[tuple[str, Body, str]] = [
    ("/v1/chat/completions", chat({"type": "file", "file": {"file_url": URL}}), "messages[0].content[1]"),
    (
        "/v1/chat/completions",
        chat({"type": "file", "file": {"file_data": URL, "filename": "a"}}),
        "messages[0].content[1]",
    ),
    ("/v1/messages", messages(DOCUMENT), "messages[0].content[1]"),
    ("/v1/messages/count_tokens", messages(DOCUMENT), "messages[0].content[1]"),
    ("/v1/responses", responses({"type": "input_file", "file_url": URL}), "input[0].content[1]"),
]


class Library:
    """In place of what fetches: texts by URL."""

    def __init__(self, **texts: str) -> None:
        self.texts: dict[str, str] = {URL: TEXT}
        self.asked: list[str] = []
        self.waits = False
        self.given_up = 0

    async def fetch(self, url: str) -> Document:
        self.asked.append(url)
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up += 1
        if url not in self.texts:
            raise FetchError("was answered 404")
        return Document(url, "text/markdown", self.texts[url], 0)

    def stats(self) -> dict[str, Any]:
        return {"fetched": len(self.asked)}


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def client(engine: FakeEngine, library: Library) -> Iterator[TestClient]:
    app = make_app(engine)
    app.state.services.fetcher = library
    with TestClient(app, base_url="http://localhost") as made:
        yield made


@pytest.mark.parametrize(("route", "body", "path"), PLACES)
@pytest.mark.parametrize("stream", [False, True])
def test_without_the_flag_the_part_is_named_and_the_way(
    engine: FakeEngine, route: str, body: Body, path: str, stream: bool
) -> None:
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        refusal = client.post(route, json={**body, "stream": stream})
    assert refusal.status_code == 400
    said = refusal.json()["error"]["message"]
    assert said.startswith(f"{path} is a document by URL, which this server does not fetch")
    assert "--fetch-urls (GNOMON_FETCH_URLS=1)" in said
    assert engine.submitted == []


@pytest.mark.parametrize(("route", "body", "path"), PLACES)
def test_the_text_is_where_the_part_was(
    client: TestClient, engine: FakeEngine, library: Library, route: str, body: Body, path: str
) -> None:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert library.asked == [URL]
    if "count" in route:
        counted = client.post(route, json=messages({"type": "text", "text": QUOTED})).json()
        assert answer.json() == counted
        return
    assert f"Read:{QUOTED}" in prompts(engine)[0]
    if "responses" in route:
        kept = client.get(f"{route}/{answer.json()['id']}/input_items").json()["data"][0]["content"][1]
        assert kept == {"type": "input_text", "text": QUOTED}
    assert client.get("/stats").json()["fetch"] == {"fetched": 1}


def test_results_of_tools_and_what_is_said_of_a_document(
    client: TestClient, engine: FakeEngine, library: Library
) -> None:
    turns = [
        {"role": "user", "content": "read"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [RESULT, {**DOCUMENT, "title": "Codes", "context": "secret"}]},
    ]
    assert client.post("/v1/messages", json={"messages": turns, "max_tokens": 8}).status_code == 200
    assert QUOTED in prompts(engine)[0]
    assert (
        f"<source>{URL}</source>\n<title>Codes</title>\n<context>secret</context>\n<document_content>"
        in prompts(engine)[0]
    )
    # Once, though two parts name it.
    assert library.asked == [URL]
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_url": URL}]}
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    assert client.post("/v1/responses", json={"input": [call, output]}).status_code == 200
    assert QUOTED in prompts(engine)[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_document_that_cannot_be_had_is_an_error_before_the_stream(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    url = "https://docs.example/missing"
    for route, body in (
        ("/v1/messages", messages({"type": "document", "source": {"type": "url", "url": url}})),
        ("/v1/responses", responses({"type": "input_file", "file_url": url})),
    ):
        refusal = client.post(route, json={**body, "stream": stream})
        assert refusal.status_code == 400
        assert f'content[1]: the document "{url}" was answered 404' in refusal.json()["error"]["message"]
        assert refusal.headers["content-type"] == "application/json"
    assert engine.submitted == []


def test_how_many(client: TestClient, library: Library) -> None:
    part = {"type": "document", "source": {"type": "url", "url": URL}}
    body = {"messages": [{"role": "user", "content": [part] * (MOST + 1)}], "max_tokens": 8}
    refusal = client.post("/v1/messages", json=body)
    assert refusal.status_code == 400
    assert f"messages[0].content[{MOST}] is one of {MOST + 1} documents by URL; the limit is {MOST}" in refusal.text
    assert library.asked == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}},
        {"type": "document", "source": {"type": "url", "url": 7}},
        {"type": "document", "source": URL},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,eA=="}},
        {"type": "image_url", "image_url": {"url": URL}},
    ],
)
def test_other_media_are_refused_as_before(client: TestClient, library: Library, part: Body) -> None:
    refusal = client.post("/v1/chat/completions", json=chat(part))
    assert refusal.status_code == 400
    assert "takes no" in refusal.json()["error"]["message"]
    assert library.asked == []


def test_a_page_cannot_end_the_turn_that_quotes_it() -> None:
    class Special(ByteTokenizer):
        def split(self, text: str) -> list[str | int]:
            before, _, after = text.partition("<|im_end|>")
            return [before, 7, after]

        def decode(self, ids: Any, *, hide: bool = True) -> str:
            return "" if hide else "<|im_end|>"

    broken = plain("a<|im_end|>b", Special())
    assert broken == f"a<{BREAK}|im_end|>b"
    assert plain("nothing of the kind", ByteTokenizer()) == "nothing of the kind"


def test_nobody_waits_for_a_document_whose_client_has_left(engine: FakeEngine, library: Library) -> None:
    library.waits = True
    with live_server(engine) as live:
        live.app.state.services.fetcher = library
        body = json.dumps(messages(DOCUMENT)).encode()
        with socket.create_connection(("127.0.0.1", live.port), 120) as raw:
            raw.sendall(
                b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            eventually(lambda: library.asked == [URL])
        eventually(lambda: library.given_up == 1)
    assert engine.submitted == []


def test_the_flag_makes_the_fetcher() -> None:
    made: Callable[..., Any] = lambda **how: make_app(fetch=FetchConfig(**how)).state.services.fetcher  # noqa: E731
    assert made() is None
    guarded = made(fetch_urls=True, fetch_limit=1000, fetch_timeout=3.0)
    assert (guarded.anywhere, guarded.limits.size, guarded.limits.seconds) == (False, 1000, 3.0)
    assert made(fetch_urls=True, allow_private_media=True).anywhere
