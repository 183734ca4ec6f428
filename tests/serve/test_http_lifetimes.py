"""Clients that leave, stall or are slow, on real connections; keep-alives; what stays responsive meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
from fake_engine import FakeEngine, Job, Live, eventually, live_server, make_app, parse_stream, user

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.engine.api import Delta, Event, Finished, Progress, Request, Usage
from gnomon.serve.bridge import EventStream
from gnomon.serve.errors import APIError
from gnomon.serve.preparation import PreparationPool
from gnomon.serve.services import Timing


@pytest.fixture
def live() -> Iterator[Live[FakeEngine]]:
    with live_server(FakeEngine(None)) as made:
        yield made


@contextlib.contextmanager
def asking(live: Live[FakeEngine], route: str = "/v1/chat/completions", **body: Any) -> Iterator[socket.socket]:
    """A connection on which a request was sent and nothing read."""
    payload = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", live.port), 120) as raw:
        raw.sendall(
            f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload
        )
        yield raw


def read_until(raw: socket.socket, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        part = raw.recv(4096)
        assert part, seen
        seen += part
    return seen


def read_all(raw: socket.socket) -> bytes:
    seen = b""
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            seen += part
    return seen


def idle(live: Live[FakeEngine]) -> bool:
    """Nothing of any request is left on either side."""
    return not live.engine.open and live.app.state.services.metrics.open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_is_cancelled(live: Live[FakeEngine], stream: bool, stage: str, how: str) -> None:
    with asking(live, **user("Hi", stream=stream, n=2)) as raw:
        job = live.engine.take()
        if stage != "queued":
            job.progress(5)
        if stage == "decode":
            job.delta("A")
            if stream:
                read_until(raw, b'"content":"A"')
        assert not job.cancelled.is_set()
        if how == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert job.cancelled.wait(120)
    eventually(lambda: idle(live))
    assert live.app.state.services.metrics.counts["cancelled"] == 1
    # And the next one is served.
    with asking(live, **user("Hi")) as raw:
        live.engine.take().say("fine")
        assert b"fine" in read_until(raw, b"fine")


def test_a_client_that_leaves_several_prompts(live: Live[FakeEngine]) -> None:
    with asking(live, "/v1/completions", prompt=["a", "b", "c"]):
        jobs = [live.engine.take() for _ in range(3)]
        jobs[1].say("done")
    assert jobs[0].cancelled.wait(120)
    assert jobs[2].cancelled.wait(120)
    assert not jobs[1].cancelled.is_set()
    eventually(lambda: idle(live))


def test_a_client_that_leaves_during_preparation() -> None:
    started, go = threading.Event(), threading.Event()
    engine = FakeEngine(None)
    with live_server(engine) as live:
        template: ChatTemplate = live.app.state.services.template
        render = template.render

        def slow(*args: Any, **kwargs: Any) -> Any:
            started.set()
            assert go.wait(120)
            return render(*args, **kwargs)

        template.render = slow  # type: ignore[method-assign]
        with asking(live, **user("Hi")):
            assert started.wait(120)
            # The loop answers others while a prompt is being prepared.
            assert httpx.get(live.url + "/health").content == b'{"status": "ok"}'
        preparation = live.app.state.services.preparation
        eventually(lambda: not live.server.server_state.connections)
        assert httpx.get(live.url + "/health").status_code == 200
        go.set()
        eventually(lambda: preparation.running == 0)
        assert httpx.get(live.url + "/health").status_code == 200
    assert not engine.submitted


def test_silence_is_filled_with_comments() -> None:
    with (
        live_server(FakeEngine(None), timing=Timing(keep_alive=0.02)) as live,
        asking(live, **user("Hi", stream=True)) as raw,
    ):
        job = live.engine.take()
        read_until(raw, b": ping\n\n")
        job.progress(10)
        read_until(raw, b": ping\n\n")
        job.say("A")
        assert b"data: [DONE]\n\n" in read_until(raw, b"[DONE]\n\n")


def flood(job: Job, done: threading.Event) -> None:
    """Text until cancelled: a hundred of these fill what the system keeps for a reader."""
    while not job.cancelled.is_set():
        job.delta("x" * 100_000, tokens=1)
        done.wait(0.005)


def test_a_client_that_stops_reading_is_dropped() -> None:
    engine, done = FakeEngine(None), threading.Event()
    with live_server(engine, timing=Timing(write=0.2)) as live, asking(live, **user("Hi", stream=True)) as raw:
        job = engine.take()
        threading.Thread(target=flood, args=(job, done), daemon=True).start()
        assert job.cancelled.wait(120)
        eventually(lambda: idle(live))
        # Dropped, not merely ended: the server holds no socket for it any more.
        eventually(lambda: not live.server.server_state.connections)
        assert b"[DONE]" not in read_all(raw)
        assert httpx.get(live.url + "/health").status_code == 200
    done.set()


def request(name: str = "r") -> Request:
    return Request(name, (1, 2, 3))


def test_a_reader_that_falls_behind_is_told() -> None:
    async def main() -> None:
        engine = FakeEngine(None)
        stream = EventStream(engine, [request()], capacity=3)
        job = engine.take()
        for _ in range(3):
            job.delta("x")
        assert len(await stream.next()) == 3
        for _ in range(5):
            job.delta("x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="reads too slowly: more than 3 events"):
            await stream.next()
        assert job.cancelled.is_set()

    asyncio.run(main())


def test_a_stream_gives_every_event_once_and_then_ends() -> None:
    async def main() -> None:
        engine = FakeEngine(None)
        async with EventStream(engine, [request("a"), request("b")]) as stream:
            a, b = engine.take(), engine.take()
            assert await stream.next(0.001) == []
            assert not stream.ended
            a.progress(2)
            a.delta("x", tokens=1)
            seen: list[Event] = await stream.next()
            b.end()
            a.end()
            while not stream.ended:
                seen += await stream.next()
            assert stream.progress["a"] == Progress("a", 2, 3)
        assert seen == [
            Delta("a", 0, "x", (0,)),
            Finished("b", Usage(3, 0)),
            Finished("a", Usage(3, 1)),
        ]
        assert not a.cancelled.is_set()
        stream.close()

    asyncio.run(main())


def test_the_loop_is_woken_once_for_what_came_while_it_was_busy() -> None:
    """A wake-up is a system call of the engine's thread, in which it gives up the interpreter."""

    async def main() -> None:
        loop, engine = asyncio.get_running_loop(), FakeEngine(None)
        wake, wakes = loop.call_soon_threadsafe, list[str]()

        def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
            wakes.append(threading.current_thread().name)
            return wake(*args, **kwargs)

        async with EventStream(engine, [request("a")]) as first, EventStream(engine, [request("b")]) as second:
            jobs = [engine.take(), engine.take()]
            loop.call_soon_threadsafe = counted  # pyright: ignore[reportAttributeAccessIssue]

            def steps() -> None:
                for token in range(5):
                    for job in jobs:
                        job.sink(Delta(job.request.id, 0, str(token), (token,)))

            for _ in range(2):
                wakes.clear()
                thread = threading.Thread(target=steps, name="engine")
                thread.start()
                # The loop stands here meanwhile.
                thread.join()
                assert wakes == ["engine"]
                for name, stream in (("a", first), ("b", second)):
                    assert await stream.next() == [Delta(name, 0, str(token), (token,)) for token in range(5)]
            loop.call_soon_threadsafe = wake

    asyncio.run(main())


def test_the_rest_of_the_streams_hear_when_one_cannot_cancel(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        def cancel(self, request_id: str, *, answered: bool = False) -> None:
            if self.open.pop(request_id, None):
                raise RuntimeError("no")

    async def main() -> None:
        engine = Broken(None)
        full, other = EventStream(engine, [request("a")], capacity=1), EventStream(engine, [request("b")])
        a, b = engine.take(), engine.take()
        a.delta("x")
        a.delta("y")
        b.delta("z", tokens=1)
        assert await other.next() == [Delta("b", 0, "z", (0,))]
        with pytest.raises(APIError, match="reads too slowly"):
            await full.next()

    asyncio.run(main())
    assert "event of a was not received" in caplog.text


def test_an_answer_of_http_1_0_has_no_chunks(live: Live[FakeEngine]) -> None:
    body = json.dumps(user("Hi", stream=True)).encode()
    with socket.create_connection(("127.0.0.1", live.port), 120) as raw:
        head = f"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        live.engine.take().say("Hello")
        head, _, text = read_all(raw).decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head
    assert [json.loads(one)["choices"][0]["delta"].get("content") for one in parse_stream(text)[:-1]] == [
        "",
        *"Hello",
        None,
    ]


def test_an_answer_of_http_1_1_is_whole_chunks(live: Live[FakeEngine]) -> None:
    """However an event was sent: the first go through all layers, the others straight to the connection."""
    with asking(live, **user("Hi", stream=True)) as raw:
        live.engine.take().say('Hé\n"lo')
        seen = b""
        while not seen.endswith(b"\r\n0\r\n\r\n"):
            seen += raw.recv(4096)
    head, _, rest = seen.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    text = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        text, end, rest = text + rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert end == b"\r\n"
    said = [json.loads(one)["choices"][0]["delta"].get("content") for one in parse_stream(text.decode())[:-1]]
    assert said == ["", *'Hé\n"lo', None]


def test_events_after_the_loop_is_gone_are_harmless() -> None:
    engine = FakeEngine(None)

    async def main() -> EventStream:
        return EventStream(engine, [request()])

    asyncio.run(main())
    engine.take().say("to nobody")


def test_the_loop_turns_while_a_long_prompt_is_tokenised(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)

    async def main() -> int:
        pool, turns = PreparationPool(limit=1, workers=1), 0
        work = asyncio.ensure_future(pool.run(lambda: tokenizer.encode("the quick brown dog " * 50_000)))
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        pool.close()
        return turns

    # With the interpreter's lock held throughout, the loop turns at most once or twice.
    assert asyncio.run(main()) > 10


def test_the_preparation_queue_is_bounded() -> None:
    async def main() -> None:
        pool, go = PreparationPool(limit=2, workers=1), threading.Event()
        running = asyncio.ensure_future(pool.run(lambda: go.wait(120)))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(pool.run(lambda: True)) for _ in range(2)]
        await asyncio.sleep(0)
        assert (pool.running, pool.waiting) == (1, 2)
        with pytest.raises(APIError) as refused:
            await pool.run(lambda: True)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
        assert "no more than 2" in refused.value.message
        # Who leaves the queue frees a place in it.
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        await asyncio.sleep(0)
        assert (pool.running, pool.waiting) == (1, 1)
        late = asyncio.ensure_future(pool.run(lambda: "late"))
        await asyncio.sleep(0)
        go.set()
        assert await running
        assert await waiting[1]
        assert await late == "late"
        while pool.running:
            await asyncio.sleep(0.001)
        pool.close()

    asyncio.run(main())


def test_a_full_preparation_queue_is_answered_429() -> None:
    engine = FakeEngine()
    with live_server(engine) as live:
        services = live.app.state.services
        services.preparation = PreparationPool(limit=1, workers=1)
        go = threading.Event()
        encode = services.vocabulary.encode

        def slow(text: str, *, special: bool = False) -> list[int]:
            assert go.wait(120)
            return encode(text, special=special)

        services.vocabulary.encode = slow
        with (
            asking(live, "/v1/completions", prompt="a") as first,
            asking(live, "/v1/completions", prompt="b") as second,
        ):
            eventually(lambda: services.preparation.waiting == 1)
            third = httpx.post(live.url + "/v1/completions", json={"prompt": "c"})
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            go.set()
            assert b"Hello" in read_until(first, b"Hello")
            assert b"Hello" in read_until(second, b"Hello")


def test_a_body_that_pauses_too_long() -> None:
    with (
        live_server(FakeEngine(), timing=Timing(read=0.05)) as live,
        socket.create_connection(("127.0.0.1", live.port), 120) as raw,
    ):
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert b"408" in read_until(raw, b"body_timeout")


def test_many_clients_some_of_whom_leave() -> None:
    """Two hundred requests, every third of which is left at some point: afterwards nothing is held anywhere."""

    def script(job: Job) -> None:
        for _ in range(4):
            job.delta("x", tokens=1)
            threading.Event().wait(0.001)
            if job.cancelled.is_set():
                return
        job.finish()
        job.end()

    engine = FakeEngine(script)

    async def one(client: httpx.AsyncClient, index: int) -> str:
        async def ask() -> str:
            response = await client.post("/v1/chat/completions", json=user("Hi", stream=index % 2 == 0))
            return response.text

        if index % 3:
            return await ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.002 * (index % 7)):
                return await ask()
        return "left"

    async def main(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=20)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
            return await asyncio.gather(*(one(client, index) for index in range(200)))

    with live_server(engine) as live:
        texts = asyncio.run(main(live.url))
        assert all("xxxx" in t or t.count('"content":"x"') == 4 for i, t in enumerate(texts) if i % 3)
        eventually(lambda: idle(live))
        preparation = live.app.state.services.preparation
        eventually(lambda: preparation.running == preparation.waiting == 0)


def test_apps_do_not_share_metrics() -> None:
    one, two = make_app(), make_app()
    one.state.services.metrics.opened()
    assert two.state.services.metrics.open == 0
    assert b"gnomon_generations_open 0.0" in two.state.services.metrics.text()
