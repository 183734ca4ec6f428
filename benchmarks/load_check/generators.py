"""Two load generators on one server, the suite's own and AIPerf: what each measured, and when each of its requests came and went."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from gnomon.bench.environment import child_environment
from gnomon.bench.http import Streamed, stream_completion
from gnomon.bench.schedule import closed_loop, loop_summary, offer, summary
from gnomon.bench.workload import Schedule

RATE, TOKENS, FIRST, PACE = METRICS = (
    "requests per second",
    "output tokens per second",
    "time to first token, median, s",
    "time per further token, median, s",
)
AIPERF = "uv run --no-project --with aiperf==0.13.0 aiperf"
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """What a generator is to do: a client for each sequence of prompts, or, with `times`, all of them at these seconds from the start."""

    prompts: Sequence[Sequence[str]]
    tokens: int
    times: Sequence[float] | None = None

    @property
    def texts(self) -> list[str]:
        """All prompts, each client's first ones first."""
        return [prompt for turn in zip(*self.prompts, strict=True) for prompt in turn]


@dataclass(frozen=True, slots=True)
class Load:
    """What a generator reports, by metric; its answers, instants of the monotonic clock; and the processor cores that it used meanwhile."""

    reported: dict[str, float]
    begun: float
    answers: list[Streamed]
    cores: float

    @property
    def window(self) -> tuple[float, float]:
        """From the first request to the last token."""
        return min(a.begun for a in self.answers), max(a.outputs[-1] for a in self.answers)


class Processor:
    """Samples the processor time of a process tree while in use. A process that ends takes its time along, so read `between` alone."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._samples: list[tuple[float, dict[int, float]]] = []

    def _sample(self) -> None:
        found: dict[int, float] = {}
        with suppress(psutil.Error):
            process = psutil.Process(self._pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    times = member.cpu_times()
                    found[member.pid] = times.user + times.system
        self._samples.append((time.perf_counter(), found))

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()

    def __enter__(self) -> Processor:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def between(self, begun: float, ended: float) -> float:
        """Mean cores in use between two instants, as near as samples lie."""
        inside = [one for one in self._samples if begun - SAMPLE_SECONDS <= one[0] <= ended + SAMPLE_SECONDS]
        spent = sum(
            max(0.0, seconds - before.get(pid, seconds))
            for (_, before), (_, after) in pairwise(inside)
            for pid, seconds in after.items()
        )
        return spent / (inside[-1][0] - inside[0][0]) if len(inside) > 1 else 0.0


def paces(answers: Sequence[Streamed]) -> float:
    """Median over the answers of the mean seconds of each token after the first."""
    return median(1 / a.decode_rate for a in answers if a.decode_rate is not None)


def loop_metrics(begun: float, answers: Sequence[Streamed]) -> dict[str, float]:
    """The suite's arithmetic of a closed loop, by the names of METRICS."""
    found = loop_summary(begun, answers)
    return {
        RATE: len(answers) / found["total_seconds"],
        TOKENS: found["aggregate_tokens_per_second"],
        FIRST: found["first_output_median_seconds"],
        PACE: paces(answers),
    }


def aiperf_metrics(answers: Sequence[Streamed]) -> dict[str, float]:
    """AIPerf's arithmetic as its documentation has it: a load lasts from its first request to the last text of any answer, a request to
    its own last text; tokens come from usage. (The rates that version 0.13 reports divide by its whole phase, some milliseconds more.)"""
    seconds = max(a.outputs[-1] for a in answers) - min(a.begun for a in answers)
    return {
        RATE: len(answers) / seconds,
        TOKENS: sum(a.completion_tokens for a in answers) / seconds,
        FIRST: median(a.outputs[0] - a.begun for a in answers),
        PACE: median((a.outputs[-1] - a.outputs[0]) / (a.completion_tokens - 1) for a in answers),
    }


def ours(client: httpx.Client, order: Order) -> Load:
    """The suite's closed loop or its schedule, in this process."""
    cpu = time.process_time()

    def send(prompt: str) -> Streamed:
        return stream_completion(client, prompt, order.tokens)

    if order.times is None:
        begun, found = closed_loop(order.prompts, send)
        answers = [answer for mine in found for answer in mine]
        reported = loop_metrics(begun, answers)
    else:
        texts = order.texts
        begun, arrivals = offer(order.times, lambda number: send(texts[number]))
        refused = [a.answer for a in arrivals if not isinstance(a.answer, Streamed)]
        if refused:
            raise refused[0]
        answers = [a.answer for a in arrivals if isinstance(a.answer, Streamed)]
        found = summary(Schedule("poisson", 1.0, 1.0, 1.0), begun, arrivals)
        reported = {
            RATE: len(answers) / found["total_seconds"],
            TOKENS: found["aggregate_tokens_per_second"],
            FIRST: found["first_output_median_seconds"],
            PACE: found["token_time_median_seconds"],
        }
    used = time.process_time() - cpu
    return Load(reported, begun, answers, used / (max(a.ended for a in answers) - begun))


@dataclass(frozen=True, slots=True)
class AIPerf:
    """How AIPerf is run. `poll`: how often a second its closed loop looks whether it may send a request; 0 is its own way, which looks
    without a pause and keeps a core busy. `before` are prompts of a warm-up: its first requests set up what later ones find made."""

    url: str
    model: Path
    served: str
    poll: int = 500
    before: Sequence[str] = ()
    program: str = AIPERF

    def command(self, order: Order, out: Path) -> list[str]:
        """Write the prompts, and say how to run it."""
        texts = order.texts
        lines = [{"text": text} for text in (*self.before, *texts)]
        shape = ["--concurrency", str(len(order.prompts)), "--request-count", str(len(texts))]
        if order.times is not None:
            # Its schedule knows no warm-up.
            lines = [{"text": t, "timestamp": round(1e3 * s, 3)} for t, s in zip(texts, order.times, strict=True)]
            shape = ["--fixed-schedule", "--fixed-schedule-auto-offset"]
        else:
            if self.before:
                shape += ["--warmup-request-count", str(len(self.before))]
            if self.poll:
                shape += ["--request-rate", str(self.poll), "--request-rate-mode", "constant"]
        (out / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [
            *shlex.split(self.program), "profile", "--model", self.served, "--url", self.url, "--endpoint-type", "completions",
            "--streaming", "--tokenizer", str(self.model), "--input-file", str(out / "prompts.jsonl"),
            "--custom-dataset-type", "single_turn", "--dataset-sampling-strategy", "sequential", *shape,
            "--use-legacy-max-tokens", "--use-server-token-count",
            "--extra-inputs", json.dumps({"temperature": 0, "max_tokens": order.tokens}),
            "--output-artifact-dir", str(out / "artifacts"), "--export-level", "raw", "--ui", "none",
            "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1", "--record-processor-service-count", "1",
        ]  # fmt: skip

    def run(self, order: Order, out: Path) -> Load:
        """Do what is ordered. Raises RuntimeError with its last words if it fails or counts other requests."""
        out.mkdir(parents=True)
        log = out / "aiperf.log"
        with log.open("wb") as words:
            child = subprocess.Popen(
                self.command(order, out),
                cwd=out,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )
            with Processor(child.pid) as processor:
                status = child.wait()
        report = next((out / "artifacts").rglob("profile_export_aiperf.json"), None)
        raw = next((out / "artifacts").rglob("profile_export_raw.jsonl"), None)
        if status or report is None or raw is None:
            last = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(f"aiperf ended with status {status}: {' / '.join(last)} (all in {log})")
        found = json.loads(report.read_text())
        answers = [answer_of(one) for one in map(json.loads, raw.open()) if phase(one) == "profiling"]
        if found.get("error_summary") or not len(answers) == round(found["request_count"]["avg"]) == len(order.texts):
            raise RuntimeError(
                f"aiperf has {len(answers)} of {len(order.texts)} requests: {found.get('error_summary')}"
            )
        load = Load(reported_by(found), min(a.begun for a in answers), answers, 0.0)
        return Load(load.reported, load.begun, load.answers, processor.between(*load.window))


def reported_by(found: dict[str, Any]) -> dict[str, float]:
    """AIPerf's report by the names of METRICS, in seconds."""
    scale = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "s": 1.0}

    def seconds(name: str) -> float:
        return found[name]["p50"] * scale[found[name]["unit"]]

    return {
        RATE: found["request_throughput"]["avg"],
        TOKENS: found["output_token_throughput"]["avg"],
        FIRST: seconds("time_to_first_token"),
        PACE: seconds("inter_token_latency"),
    }


def phase(record: dict[str, Any]) -> str:
    return record["metadata"]["benchmark_phase"]


def answer_of(record: dict[str, Any]) -> Streamed:
    """One of AIPerf's raw records as the suite keeps an answer."""
    found = Streamed(record["start_perf_ns"] / 1e9)
    for response in record["responses"]:
        now = response["perf_ns"] / 1e9
        for data in (packet["value"] for packet in response["packets"] if packet["name"] == "data"):
            if data.strip() == "[DONE]":
                found.done = True
                continue
            chunk = json.loads(data)
            for choice in chunk.get("choices", []):
                if choice.get("text"):
                    found.text += choice["text"]
                    found.outputs.append(now)
                if choice.get("finish_reason") is not None:
                    found.finish, found.ended = choice["finish_reason"], now
            found.usage = chunk.get("usage") or found.usage
    found.check()
    return found
