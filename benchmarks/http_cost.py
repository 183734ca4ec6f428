"""What a token costs between the engine and the client: CPU of the engine's and of the server's thread, and the pace of the engine's
steps, in process, over HTTP, and with the engine in a process of its own, in interleaved rounds.

    uv run python benchmarks/http_cost.py MODEL [--rounds 5] [--tokens 300] [--rows 1 8 16] [--apis completions chat] [--isolate]
                                          [--device-ms 1.03 | --random-1b DIR --bits 4 --kernels native]

With --device-ms no device is needed: the forward computes nothing, a quarter of that time keeps the interpreter busy instead, and a
step's result is there that long after the step before was ready, while the engine's thread waits without the interpreter. A step is
counted between the first token of the row that began last and the last token of the row that ended first. The clients are one thread
of another process that only reads; `late` is how long after the engine's last token it read the last event. CPU is the scheduler's, of
the threads by name.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import HTTPConfig, SamplingDefaults, resolve
from gnomon.engine import engine as engines
from gnomon.engine import step
from gnomon.engine.api import Delta, Engine, Event, Failed, Finished, Request, SamplingParams, Sink
from gnomon.engine.settings import Settings
from gnomon.isolate import IsolatedEngine, run
from gnomon.serve.app import create_app
from gnomon.serve.listen import bind
from gnomon.serve.server import serving
from speculation import make_1b

CLIENT = """
import json, select, socket, sys, time
port, path, rows, skip, body = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5].encode()
head = f"POST {path} HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
poll, socks, events, tails = select.poll(), {}, {}, {}
for _ in range(rows):
    s = socket.create_connection(("127.0.0.1", port)); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.sendall(head.encode() + body); socks[s.fileno()] = s; events[s.fileno()] = 0; tails[s.fileno()] = b""
    poll.register(s, select.POLLIN)
reads, last, left = 0, 0.0, set(socks)
while left:
    for fd, _ in poll.poll():
        data = tails[fd] + socks[fd].recv(65536)
        last = time.monotonic(); reads += 1
        assert data and not data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), data
        events[fd] += data.count(b"\\ndata: {"); tails[fd] = data[-7:]
        if b"[DONE]" in data: left.discard(fd); poll.unregister(fd)
print(json.dumps([last, reads, sum(events.values()) - skip * rows]))
"""
VOCABULARY = 1024
WORDS = ("wall", "engine", "server", "writer")


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds per step; `late` is milliseconds, `events` a token's."""

    wall: float
    engine: float
    server: float
    writer: float
    """The threads between two processes, of both."""
    late: float = 0.0
    events: float = 1.0


class Watch:
    """Notes when an engine's events come, whoever they are for."""

    def __init__(self, engine: Engine) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        submit = engine.submit
        engine.submit = partial(self._submit, submit)  # pyright: ignore[reportAttributeAccessIssue]

    def _submit(self, submit: Callable[[Request, Sink], None], request: Request, sink: Sink) -> None:
        times, now = self.times[request.id], time.monotonic

        def noted(event: Event) -> None:
            if isinstance(event, Delta):
                times.extend([now()] * len(event.ids))
            sink(event)

        submit(request, noted)

    def step(self) -> tuple[float, float]:
        """Seconds of a step while all rows ran, and when the last token came."""
        rows = list(self.times.values())
        begun, ended = max(row[0] for row in rows), min(row[-1] for row in rows)
        within = statistics.mean(sum(begun < at <= ended for at in row) for row in rows)
        return (ended - begun) / within, max(row[-1] for row in rows)


def cpu_seconds(process: str = "self") -> dict[str, float]:
    """CPU seconds of a process's threads by name, those of one name together."""
    found: dict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            found[(task / "comm").read_text().strip()] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def named_threads() -> None:
    """Give the kernel the threads' names, which Python does from 3.14 on."""
    libc = ctypes.CDLL(None)
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:15])
    libc.prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, of this thread and those it begins: sleeps end when they should


HOST = 0.25
"""Share of a step's time that a simulated device's forward keeps the interpreter busy: about what building a graph of 16 layers takes."""


class Device:
    """Steps take their time one after the other; their results are waited for. A forward computes nothing: its likeliest token is 300."""

    def __init__(self, seconds: float) -> None:
        self.free = 0.0
        device = self

        class Flight(step.Flight):
            """Knows when it is ready."""

            __slots__ = ("ready",)

            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                device.free = max(device.free, time.perf_counter()) + seconds
                object.__setattr__(self, "ready", device.free)

        def forward(model: llama.Model, inputs: mx.array, cache: Any = None) -> mx.array:  # noqa: ARG001  (as mlx-lm's)
            end = time.perf_counter() + seconds * HOST
            while time.perf_counter() < end:
                pass
            return mx.broadcast_to(logits, (*inputs.shape, len(logits)))

        logits = mx.arange(VOCABULARY) == 300
        mx.eval(logits)
        llama.Model.__call__ = forward
        deliver = step.Stepper._deliver

        def delivered(stepper: step.Stepper, flight: Any) -> None:
            mx.eval(flight.drawn.tokens)
            if (left := flight.ready - time.perf_counter()) > 0:
                time.sleep(left)
            deliver(stepper, flight)

        step.Flight = Flight  # pyright: ignore[reportAttributeAccessIssue]
        step.Stepper._deliver = delivered  # pyright: ignore[reportAttributeAccessIssue]


def make_tiny(path: Path, like: Path) -> Path:
    """A random model of a layer, for a simulated device."""
    path.mkdir(parents=True, exist_ok=True)
    shape = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 1,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(shape))
    for name in ("tokenizer.json", "special_tokens_map.json"):
        shutil.copy(like / name, path / name)
    settings = json.loads((like / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"  # no words of many letters
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def make_engine(path: Path, batch: int, kernels: str, device_ms: float | None) -> engines.Engine:
    if device_ms is not None:
        Device(device_ms / 1e3)
    config = resolve()
    settings = Settings(
        engine=replace(config.engine, batch=batch, prompt_cache=0), kernels=replace(config.kernel, kernels=kernels)
    )
    named_threads()
    return engines.load(path, settings)


def in_process(engine: Engine, prompt: Sequence[int], rows: int, tokens: int) -> tuple[float, int, int]:
    """As many requests together: when the last token came, and how many came."""
    ended = threading.Semaphore(0)
    last = 0.0

    def sink(event: Event) -> None:
        nonlocal last
        if isinstance(event, Failed):
            raise SystemExit(event.message)
        if isinstance(event, Finished):
            last = time.monotonic()
            ended.release()

    for row in range(rows):
        request = Request(
            id=f"r{time.monotonic_ns()}-{row}", prompt=tuple(prompt), max_tokens=tokens, ignore_eos=True,
            sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
        engine.submit(request, sink)
    for _ in range(rows):
        ended.acquire()
    return last, rows * tokens, rows * tokens


def over_http(api: str, port: int, prompt: Sequence[int], rows: int, tokens: int) -> tuple[float, int, int]:
    """The same as a client in another process sees it."""
    fields: dict[str, Any] = {"model": "m", "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    if api == "chat":
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": "1 2 3"}]}
    else:
        path, asked = "/v1/completions", {"prompt": list(prompt)}
    body = json.dumps({**fields, **asked})
    # The first of a chat's events names the role; the last of either tells why it ended.
    words = [sys.executable, "-c", CLIENT, str(port), path, str(rows), str(1 + (api == "chat")), body]
    return tuple(json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout))


def measured(
    asked: Callable[[], tuple[float, int, int]], watch: Watch, rows: int, tokens: int, child: int | None
) -> Round:
    """Run requests, and share out what the threads did meanwhile."""
    places = ["self"] if child is None else ["self", str(child)]
    watch.times.clear()
    before = [cpu_seconds(place) for place in places]
    read, _, events = asked()
    after = [cpu_seconds(place) for place in places]
    spent: dict[str, float] = defaultdict(float)
    for old, new in zip(before, after, strict=True):
        for name, seconds in new.items():
            kind = "writer" if name.startswith("isolate") else name
            spent[kind] += (seconds - old.get(name, 0.0)) * 1e3 / tokens
    wall, last = watch.step()
    return Round(
        wall * 1e3,
        spent["gnomon-engine"],
        spent["server"],
        spent["writer"],
        (read - last) * 1e3,
        events / rows / tokens,
    )


@contextlib.contextmanager
def served(engine: Any, tokenizer: Tokenizer) -> Iterator[int]:
    """The port at which a thread serves an engine."""
    http = replace(HTTPConfig(), port=0)
    with bind(http) as bound:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
        with serving(app, engine, bound, http) as address:
            named_threads()
            yield int(address.rpartition(":")[2])


def main() -> None:
    if sys.argv[1] == "--child":
        sys.exit(run(int(sys.argv[2]), lambda what: make_child(*what)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, help="an MLX model directory; with --device-ms or --random-1b its tokenizer"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--apis", nargs="*", choices=("completions", "chat"), default=["completions", "chat"])
    parser.add_argument("--isolate", action="store_true", help="also with the engine in a process of its own")
    parser.add_argument("--kernels", choices=("native", "stock"), default="stock")
    parser.add_argument("--device-ms", type=float)
    parser.add_argument("--random-1b", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of the random model (default: bfloat16)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/http_cost"), help="folder of the tiny model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    path: Path = args.model
    if args.device_ms is not None:
        path = make_tiny(args.work, path)
    elif args.random_1b is not None:
        path = make_1b(args.random_1b, path, args.bits)
    tokenizer = Tokenizer.load(path)
    what = (path, max(args.rows), args.kernels, args.device_ms)
    prompt = [300 + (7 * i) % 700 for i in range(args.prompt)]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(make_engine(*what))
        ways: dict[str, tuple[Callable[[int], tuple[float, int, int]], Watch, int | None]] = {}
        watch = Watch(engine)
        ways["in process"] = lambda rows: in_process(engine, prompt, rows, args.tokens), watch, None
        port = stack.enter_context(served(engine, tokenizer))
        for api in args.apis:
            ways[api] = lambda rows, api=api: over_http(api, port, prompt, rows, args.tokens), watch, None
        if args.isolate:
            apart = IsolatedEngine([sys.executable, __file__, "--child"], what)
            stack.callback(apart.stop)
            apart.wait()
            port2, watch2, child = stack.enter_context(served(apart, tokenizer)), Watch(apart), apart.process()["pid"]
            for api in args.apis:
                asked = lambda rows, api=api: over_http(api, port2, prompt, rows, args.tokens)  # noqa: E731
                ways[f"{api}, isolated"] = asked, watch2, child
        for rows in args.rows:
            profile(rows, ways, args.rounds, args.tokens)


def make_child(path: Path, batch: int, kernels: str, device_ms: float | None) -> engines.Engine:
    engine = make_engine(path, batch, kernels, device_ms)
    # The threads to the parent begin later.
    timer = threading.Timer(2.0, named_threads)
    timer.daemon = True
    timer.start()
    return engine


def profile(rows: int, ways: dict[str, Any], rounds: int, tokens: int) -> None:
    """Rounds of all ways by turns, and a table of their medians."""
    found: dict[str, list[Round]] = {name: [] for name in ways}
    for turn in count():
        # The first round warms up.
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            asked, watch, child = ways[name]
            one = measured(partial(asked, rows), watch, rows, tokens, child)
            if turn:
                found[name].append(one)
            print(f"{rows} rows, round {turn}, {name}: {one}", file=sys.stderr, flush=True)
        if turn == rounds:
            break
    print(f"\n{rows} rows, {tokens} tokens, medians of {rounds} rounds, ms per step (server: us per token)\n")
    print(
        "| | step | engine's thread | server's thread | us per token | between | late | events a token | step to in process |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    base = found["in process"]
    for name, own in found.items():
        middle = [statistics.median(getattr(one, word) for one in own) for word in (*WORDS, "late", "events")]
        ratios = [one.wall / other.wall for one, other in zip(own, base, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        wall, engine, server, writer, late, events = middle
        each = server * 1e3 / rows
        cells = f"{wall:.3f} | {engine:.3f} | {server:.3f} | {each:.1f} | {writer:.3f} | {late:.2f} | {events:.2f}"
        print(f"| {name} | {cells} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
