"""The serving suite's legs: each measures one thing of a server through HTTP, and every latency keeps a name of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
from pydantic import JsonValue

from gnomon.bench.http import (
    REUSED_SHARE,
    Cut,
    MemoryWatch,
    ServerContender,
    Streamed,
    checked_usage,
    refusal,
    resident_bytes,
    stream_completion,
)
from gnomon.bench.provenance import machine, sha256_text
from gnomon.bench.schedule import arrival_times, closed_loop, loop_summary, offer, summary
from gnomon.bench.schema import Work
from gnomon.bench.sources import cpu_seconds, stated_memory, system_memory
from gnomon.bench.workload import FIRST_TOKENS, STORY, TURN_TOKENS, ArmFailed, ArmTimedOut, Measurement, Workload

CACHED_SHARE = 0.5
"""A prompt is a cached one if usage says that at least this share of it was reused."""
CUT_AFTER = 3
"""Pieces of text after which a cancelled stream is cut off."""
QUIET_SHARE = 0.15
"""A server is at rest while it uses less than this share of one processor."""
QUIET_SECONDS = 0.1
"""How long it has to be at rest, and the shortest time that can be told."""
STATS_SECONDS = 0.1
PROBES: Mapping[str, tuple[str, Mapping[str, JsonValue]]] = {
    "completion": ("/v1/completions", {"prompt": STORY}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name three rivers of Europe and a city on each."}]}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server answered to a parity probe."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish: str | None

    def against(self, other: Probe, arm: str) -> str | None:
        """How this answer differs from `arm`'s, or None. Another prompt length is drift of tokenizer or template, not of text."""
        if self.prompt_tokens != other.prompt_tokens:
            return f"tokenizer or template drift: the prompt has {self.prompt_tokens} tokens, {arm}'s {other.prompt_tokens}"
        if self.text != other.text and self.text.lstrip() == other.text.lstrip():
            return f"the text differs from {arm}'s in the space that it begins with, and in nothing else"
        if self.text != other.text:
            pairs = zip(self.text, other.text, strict=False)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(self.text), len(other.text)))
            mine, theirs = self.text[place : place + 24], other.text[place : place + 24]
            return f"the text differs from {arm}'s at character {place}: {mine!r} against {theirs!r}"
        if self.completion_tokens != other.completion_tokens:
            return f"{self.completion_tokens} output tokens, {arm} has {other.completion_tokens} for the same text"
        if self.finish != other.finish:
            return f"finish reason {self.finish!r}, {arm}'s is {other.finish!r}"
        return None


@dataclass(slots=True)
class Parity:
    """The answers of the first arm that was probed, by probe: all arms of a run share it."""

    arm: str | None = None
    answers: dict[str, Probe] = field(default_factory=dict[str, Probe])

    def hold(self, arm: str, answers: Mapping[str, Probe]) -> None:
        """Keep the first arm's answers, compare later ones. Raises `ArmFailed` naming the first difference."""
        if self.arm in (None, arm):
            self.arm, self.answers = arm, dict(answers)
            return
        for name, answer in answers.items():
            difference = answer.against(self.answers[name], self.arm or "")
            if difference is not None:
                raise ArmFailed(f"{name}: {difference}")


class LegContender(ServerContender):
    """A server arm of the suite: it knows all legs beside `stream` and `start`."""

    def __init__(self, *arguments: Any, parity: Parity | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parity = parity or Parity()

    def measure(self, workload: Workload) -> Measurement:
        """Measure one cell through HTTP."""
        leg = LEGS.get(workload.cell.task)
        if leg is None:
            return super().measure(workload)
        if workload.cell.task == "memory":
            self.stop()
        self.start()
        self.client.timeout = httpx.Timeout(workload.timeout)
        with MemoryWatch(self.pid) as memory:
            found = leg(self, workload)
        if workload.cell.task != "restart":  # there, two processes follow each other
            found.metrics.setdefault("peak_resident_bytes", float(memory.peak))
        return found

    def restart(self, timeout: float) -> None:
        """End the server as a service manager would and start it anew."""
        self.stop()
        self.start()
        self.client.timeout = httpx.Timeout(timeout)

    def ask(self, prompt: str, tokens: int, **options: Any) -> Streamed:
        """Stream a greedy completion."""
        return stream_completion(self.client, prompt, tokens, model=self.served, **options)

    def done(
        self,
        workload: Workload,
        prompts: Sequence[str],
        answers: Sequence[Streamed],
        metrics: dict[str, float],
        cache: str | None = None,
        details: Mapping[str, JsonValue] | None = None,
    ) -> Measurement:
        """A measurement whose counts come from the answers' usage. `cache` says what a cache was to hold; without it, the prompts are
        cold ones, or the reuse is told."""
        cell = workload.cell
        asked, cached = sum(a.prompt_tokens for a in answers), sum(a.cached_tokens for a in answers)
        work = Work(
            task=cell.task if cell.schedule is None else cell.schedule.law,
            model=self.model_sha256,
            prompt=sha256_text("\n".join(prompts)),
            prompt_tokens=asked,
            output_tokens=sum(a.completion_tokens for a in answers),
            concurrency=cell.rows,
            cache=cache or ("cold" if cached <= REUSED_SHARE * asked else f"{cached} tokens reused"),
            machine=machine(),
        )
        text = sha256_text("\n".join(a.text for a in answers))
        return Measurement(metrics, work, {"text_sha256": text, "cached_tokens": cached, **(details or {})})


def first_output(answer: Streamed) -> float:
    """Seconds from the request to its first output."""
    return answer.outputs[0] - answer.begun


def _cold(arm: LegContender, prompt: str) -> Streamed:
    """The first answer to a prompt that no cache can know. Raises `ArmFailed` if usage says that one knew it."""
    found = arm.ask(prompt, FIRST_TOKENS)
    if found.cached_tokens > REUSED_SHARE * found.prompt_tokens:
        raise ArmFailed(
            f"the prompt was to be cold, and {found.cached_tokens} of {found.prompt_tokens} tokens were cached"
        )
    return found


def parity(arm: LegContender, workload: Workload) -> Measurement:
    """A fixed greedy completion and chat: text, counts and finish reason must be those of the first arm."""
    begun = time.perf_counter()
    answers = {
        name: _probe(arm, path, {**body, "max_tokens": workload.cell.output_tokens, "temperature": 0})
        for name, (path, body) in PROBES.items()
    }
    total = time.perf_counter() - begun
    arm.parity.hold(arm.arm.name, answers)
    work = Work(
        task="parity",
        model=arm.model_sha256,
        prompt=sha256_text(str(PROBES)),
        prompt_tokens=sum(a.prompt_tokens for a in answers.values()),
        output_tokens=sum(a.completion_tokens for a in answers.values()),
        cache="any",
        machine=machine(),
    )
    return Measurement({"total_seconds": total}, work, {name: answer.text for name, answer in answers.items()})


def _probe(arm: LegContender, path: str, body: dict[str, JsonValue]) -> Probe:
    if arm.served is not None:
        body["model"] = arm.served
    try:
        response = arm.client.post(path, json=body)
        if response.status_code != 200:
            raise refusal(response.status_code, response.content)
        answer = response.json()
        usage = checked_usage(answer.get("usage"))
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    except httpx.TimeoutException as error:
        raise ArmTimedOut(f"no answer to {path}: {type(error).__name__}") from error
    except httpx.HTTPError as error:
        raise ArmFailed(f"{type(error).__name__}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArmFailed(f"{path} answered nonsense: {type(error).__name__}: {error}") from error
    return Probe(text or "", usage["prompt_tokens"], usage["completion_tokens"], choice.get("finish_reason"))


def ttft(arm: LegContender, workload: Workload) -> Measurement:
    """A cold prompt, then the same one twice more. The repeats count as cached only if usage says so."""
    prompt = workload.long_text(workload.cell.words)
    cold = _cold(arm, prompt)
    repeats = [arm.ask(prompt, FIRST_TOKENS) for _ in range(2)]
    metrics = {"cold_first_output_seconds": first_output(cold)}
    if all(r.cached_tokens >= CACHED_SHARE * r.prompt_tokens for r in repeats):
        metrics["cached_first_output_seconds"] = median(map(first_output, repeats))
    details: dict[str, JsonValue] = {
        "repeats_seconds": [first_output(r) for r in repeats],
        "repeats_cached_tokens": [r.cached_tokens for r in repeats],
    }
    return arm.done(workload, [prompt], [cold, *repeats], metrics, "cold, then repeated", details)


def prefill(arm: LegContender, workload: Workload) -> Measurement:
    """A cold long prompt: its tokens over all time before the first output."""
    prompt = workload.long_text(workload.cell.words)
    cold = _cold(arm, prompt)
    seconds = first_output(cold)
    return arm.done(
        workload,
        [prompt],
        [cold],
        {"prefill_tokens_per_second": cold.prompt_tokens / seconds, "cold_first_output_seconds": seconds},
    )


def depth(arm: LegContender, workload: Workload) -> Measurement:
    """Decoding after a long prompt. The prompt's long beginning is the same in all blocks, so that a cache may hold it: only the time
    after the first output counts."""
    cell = workload.cell
    prompt = f"{Workload(cell, 0, 0).long_text(cell.words)} {workload.text()}"
    found = arm.ask(prompt, cell.output_tokens)
    if found.decode_rate is None:
        raise ArmFailed("all text came at once: there is no decoding to time")
    metrics = {"decode_tokens_per_second": found.decode_rate, "longest_gap_seconds": found.longest_gap}
    return arm.done(workload, [prompt], [found], metrics, "the beginning may be cached")


def restart(arm: LegContender, workload: Workload) -> Measurement:
    """A cold prompt, then the same one to the server started anew: what a state on disk is worth."""
    prompt = workload.long_text(workload.cell.words)
    cold = _cold(arm, prompt)
    arm.restart(workload.timeout)
    again = arm.ask(prompt, FIRST_TOKENS)
    metrics = {
        "cold_first_output_seconds": first_output(cold),
        "restarted_first_output_seconds": first_output(again),
        "ready_seconds": arm.ready_seconds,
    }
    details: dict[str, JsonValue] = {"cached_tokens_after_restart": again.cached_tokens}
    return arm.done(workload, [prompt], [cold, again], metrics, "cold, then after a restart", details)


def loop(arm: LegContender, workload: Workload) -> Measurement:
    """Clients that each send their next request when the last one has ended."""
    cell = workload.cell
    prompts = [[workload.text(client * cell.calls + n) for n in range(cell.calls)] for client in range(cell.rows)]
    begun, found = closed_loop(prompts, lambda prompt: arm.ask(prompt, cell.output_tokens))
    answers = [answer for mine in found for answer in mine]
    prompts_sent = [prompt for mine in prompts for prompt in mine]
    return arm.done(workload, prompts_sent, answers, loop_summary(begun, answers))


def schedule(arm: LegContender, workload: Workload) -> Measurement:
    """Requests that arrive by a law. Those refused with 429 or 503 missed their objectives; the work is the one that was offered."""
    cell = workload.cell
    if cell.schedule is None:
        raise ValueError(f"{cell} has no schedule")
    prompts = [workload.text(n) for n in range(cell.rows)]
    times = arrival_times(cell.schedule, cell.rows, workload.seed)
    begun, arrivals = offer(times, lambda n: arm.ask(prompts[n], cell.output_tokens))
    answers = [a.answer for a in arrivals if isinstance(a.answer, Streamed)]
    metrics = summary(cell.schedule, begun, arrivals)
    short = next((a for a in answers if a.completion_tokens != cell.output_tokens), None)
    if short is not None:
        raise ArmFailed(f"an answer has {short.completion_tokens} tokens, ordered were {cell.output_tokens}")
    details: dict[str, JsonValue] = {
        "arrivals_seconds": list(times),
        "first_output_seconds": [a.first for a in arrivals],
        "token_seconds": [a.pace for a in arrivals],
        "sent_late_max_seconds": max(a.sent - a.scheduled for a in arrivals),
        "refusals": [str(a.answer) for a in arrivals if not isinstance(a.answer, Streamed)],
    }
    found = arm.done(workload, prompts, answers, metrics, "cold", details)
    per_prompt = answers[0].prompt_tokens
    offered = {"prompt_tokens": per_prompt * cell.rows, "output_tokens": cell.output_tokens * cell.rows}
    return Measurement(found.metrics, found.work.model_copy(update=offered), found.details)


def cancel(arm: LegContender, workload: Workload) -> Measurement:
    """Cut a stream off and see how soon the server is at rest; cut another off and see how soon the next request is served."""
    length = workload.cell.output_tokens
    prompts = [workload.text(n) for n in range(4)]
    calm = arm.ask(prompts[0], FIRST_TOKENS)
    freed = at_rest(arm.pid, _cut(arm, prompts[1], length), workload.timeout)
    gone = _cut(arm, prompts[2], length)
    following = arm.ask(prompts[3], FIRST_TOKENS, begun=gone)
    at_rest(arm.pid, gone, workload.timeout)
    metrics = {"freed_seconds": freed, "next_first_output_seconds": first_output(following)}
    details: dict[str, JsonValue] = {"calm_first_output_seconds": first_output(calm)}
    return arm.done(workload, prompts, [calm, following], metrics, "cold", details)


def _cut(arm: LegContender, prompt: str, length: int) -> float:
    """Begin a stream, go away, and return when."""
    try:
        arm.ask(prompt, length, cut_after=CUT_AFTER)
    except Cut as cut:
        return cut.at
    raise ArmFailed("the stream wasn't cut off")


def at_rest(pid: int, since: float, timeout: float) -> float:
    """Seconds after `since` at which a process tree came to rest, by its processor time; `QUIET_SECONDS`, which is as fine as it can
    be told, if that was sooner. Raises `ArmTimedOut`."""
    while time.perf_counter() - since < timeout:
        begun, before = time.perf_counter(), cpu_seconds(pid)
        time.sleep(QUIET_SECONDS)
        if cpu_seconds(pid) - before < QUIET_SHARE * (time.perf_counter() - begun):
            return max(QUIET_SECONDS, begun - since)
    raise ArmTimedOut(f"the server was still busy {timeout:.0f} s after the client had gone")


def turns(arm: LegContender, workload: Workload) -> Measurement:
    """Conversations in turn, each growing with every round: what a cache keeps while others press on it.

    The assistant's part of the history is scripted, so that all arms read the same text.
    """
    cell = workload.cell
    texts = ["" for _ in range(cell.rows)]
    prompts: list[str] = []
    answers: list[Streamed] = []
    later: list[Streamed] = []
    begun = time.perf_counter()
    for turn in range(cell.calls):
        for talk in range(cell.rows):
            texts[talk] += workload.long_text(cell.words, turn * cell.rows + talk)
            answer = arm.ask(texts[talk], TURN_TOKENS)
            prompts.append(texts[talk])
            answers.append(answer)
            if turn:
                later.append(answer)
            texts[talk] += " told it so.\n"
    metrics = {"total_seconds": time.perf_counter() - begun}
    if later:
        metrics["later_first_output_median_seconds"] = median(map(first_output, later))
        metrics["reused_share"] = sum(a.cached_tokens for a in later) / sum(a.prompt_tokens for a in later)
    return arm.done(workload, prompts, answers, metrics, "as the server keeps it")


def memory(arm: LegContender, workload: Workload) -> Measurement:
    """Memory of a server just started, while it answers a long prompt, and after, by source."""
    cell = workload.cell
    idle = resident_bytes(arm.pid)
    prompt = workload.long_text(cell.words)
    with MemoryWatch(arm.pid) as watch, _StatsWatch(arm) as stated:
        answer = arm.ask(prompt, cell.output_tokens)
    metrics = {
        "idle_resident_bytes": float(idle),
        "resident_bytes": float(resident_bytes(arm.pid)),
        "peak_resident_bytes": float(watch.peak),
        **system_memory(arm.pid),
        **stated.read(),
    }
    return arm.done(workload, [prompt], [answer], metrics)


class _StatsWatch:
    """Reads a server's `/stats` every 0.1 s while in use, where it has one; keeps the most bytes of keys and values seen."""

    def __init__(self, arm: LegContender) -> None:
        self._arm = arm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._kv = 0.0

    def _stats(self) -> dict[str, Any]:
        # A server without /stats, or with another kind of it, states nothing; what the system counts stands without it.
        with suppress(httpx.HTTPError, ValueError):
            response = self._arm.client.get("/stats")
            if response.status_code == 200:
                found = response.json()
                return found if isinstance(found, dict) else {}
        return {}

    def _run(self) -> None:
        while not self._stop.wait(STATS_SECONDS):
            batch = self._stats().get("batch")
            held = batch.get("kv_bytes") if isinstance(batch, dict) else None
            if not isinstance(held, int | float):
                return
            self._kv = max(self._kv, float(held))

    def read(self) -> dict[str, float]:
        """What the server states now, with the most keys and values seen."""
        return {**stated_memory(self._stats()), **({"kv_bytes": self._kv} if self._kv else {})}

    def __enter__(self) -> _StatsWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


LEGS: Mapping[str, Callable[[LegContender, Workload], Measurement]] = {
    "parity": parity,
    "ttft": ttft,
    "prefill": prefill,
    "depth": depth,
    "restart": restart,
    "loop": loop,
    "schedule": schedule,
    "cancel": cancel,
    "turns": turns,
    "memory": memory,
}
