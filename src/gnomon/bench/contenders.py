"""Arms that run in child processes: commands measured as they are, and workers that answer JSON lines and keep their model loaded."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from gnomon.bench.environment import child_environment
from gnomon.bench.provenance import machine, sha256_text
from gnomon.bench.schema import Arm, Work
from gnomon.bench.workload import ArmFailed, ArmTimedOut, Measurement, Unsupported, Workload

PROTOCOL = 1
START_TIMEOUT = 600.0
UNSUPPORTED_EXIT = 69
"""EX_UNAVAILABLE of sysexits.h: a command's way to say that it can't do this work here."""


def parse_answer(answer: Any) -> Measurement:
    """A worker's or command's JSON answer. Raises `Unsupported` or `ArmFailed` if it reports so or is malformed."""
    if not isinstance(answer, dict):
        raise ArmFailed(f"the answer is not a JSON object: {str(answer)[:200]}")
    fields = cast("dict[str, Any]", answer)
    if "unsupported" in fields:
        raise Unsupported(str(fields["unsupported"]))
    if "error" in fields:
        raise ArmFailed(str(fields["error"]))
    try:
        work = Work.model_validate(fields["work"])
        metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
        raise ArmFailed(f"malformed answer: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return Measurement(metrics, work, fields.get("details", {}))


class CommandContender:
    """Runs a command once per sample. `{seed}`, `{block}` and `{nonce}` in it are replaced.

    If the last line it prints is a JSON object with `metrics` (and optionally `work`), these are taken; otherwise the metric is its
    duration. Exit status 69 means unsupported, any other but 0 failure.
    """

    def __init__(self, arm: Arm, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        if not arm.command:
            raise ValueError(f"arm {arm.name} has no command")
        self.arm = arm
        self._command = arm.command
        self._cwd = cwd
        self._environment = child_environment(environment)

    def start(self) -> None:
        """Nothing stays between samples."""

    def stop(self) -> None:
        """Nothing stays between samples."""

    def measure(self, workload: Workload) -> Measurement:
        """Run it. The work it did is its own report, or the command line without the arm's settings."""
        values = {"{seed}": str(workload.seed), "{block}": str(workload.block), "{nonce}": workload.nonce}
        command = [_fill(part, values) for part in self._command]
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=workload.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ArmTimedOut(f"no end within {workload.timeout:.0f} s") from error
        except OSError as error:
            raise ArmFailed(f"{command[0]}: {error.strerror}") from error
        seconds = time.perf_counter() - started
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode == UNSUPPORTED_EXIT:
            raise Unsupported(_tail(done.stderr) or last or f"exit status {UNSUPPORTED_EXIT}")
        if done.returncode != 0:
            raise ArmFailed(f"exit status {done.returncode}: {_tail(done.stderr) or last}")
        work = {"task": "command", "prompt": sha256_text(str(workload.seed)), "machine": machine()}
        if last.startswith("{"):
            try:
                answer = json.loads(last)
            except ValueError as error:
                raise ArmFailed(f"the last line is no JSON: {last[:200]}") from error
            return parse_answer({"work": work, **answer})
        return parse_answer({"metrics": {"seconds": seconds}, "work": work})


class WorkerContender:
    """A child that loads once and then answers one JSON line per workload. It is killed if it doesn't answer in time."""

    def __init__(
        self, arm: Arm, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None, echo: bool = False
    ) -> None:
        if not arm.command:
            raise ValueError(f"arm {arm.name} has no command")
        self.arm = arm
        self._command = list(arm.command)
        self._cwd = cwd
        self._environment = child_environment(environment)
        self._echo = echo
        self._child: subprocess.Popen[str] | None = None
        self._answers: Queue[str | None] = Queue()
        self._errors: deque[str] = deque(maxlen=20)
        self.pid: int | None = None

    def start(self) -> None:
        """Start the child and wait until it says that it is ready."""
        if self._child is not None and self._child.poll() is None:
            return
        self.stop()
        self._answers = Queue()
        self._errors.clear()
        try:
            child = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ArmFailed(f"{self._command[0]}: {error.strerror}") from error
        self._child, self.pid = child, child.pid
        threading.Thread(target=self._read, args=(child, self._answers), daemon=True).start()
        threading.Thread(target=self._read_errors, args=(child,), daemon=True).start()
        ready = self._receive(START_TIMEOUT, "start")
        if "unsupported" in ready:
            self.stop()
            raise Unsupported(str(ready["unsupported"]))
        if ready.get("ready") != PROTOCOL:
            self.stop()
            raise ArmFailed(
                f"the worker speaks protocol {ready.get('ready')!r}, not {PROTOCOL}: {ready.get('error', '')}"
            )
        effective = cast("dict[str, JsonValue]", ready.get("effective", {}))
        self.arm = self.arm.model_copy(update={"effective": effective})

    def measure(self, workload: Workload) -> Measurement:
        """Send the workload and take the answer."""
        child = self._child
        if child is None or child.stdin is None:
            raise ArmFailed("the worker isn't running")
        order = {
            "cell": str(workload.cell),
            "seed": workload.seed,
            "block": workload.block,
            "attempt": workload.attempt,
            "timeout": workload.timeout,
        }
        try:
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
        except OSError as error:
            raise ArmFailed(self._death(child)) from error
        return parse_answer(self._receive(workload.timeout, "answer"))

    def stop(self) -> None:
        """End the child; it is killed if it doesn't go within five seconds of its input's end."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            with suppress(OSError):  # a dead child's pipe can't be flushed; it is gone anyway
                child.stdin.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _receive(self, timeout: float, what: str) -> dict[str, Any]:
        child = self._child
        if child is None:
            raise ArmFailed("the worker isn't running")
        try:
            line = self._answers.get(timeout=timeout)
        except Empty:
            child.kill()
            raise ArmTimedOut(f"no {what} within {timeout:.0f} s") from None
        if line is None:
            raise ArmFailed(self._death(child))
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise ArmFailed(f"the worker wrote no JSON: {line[:200]}") from error
        if not isinstance(answer, dict):
            raise ArmFailed(f"the worker's {what} is not an object: {line[:200]}")
        return cast("dict[str, Any]", answer)

    def _death(self, child: subprocess.Popen[str]) -> str:
        try:
            status = child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the worker closed its output"
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the worker died with {how}: {_tail(chr(10).join(self._errors))}"

    @staticmethod
    def _read(child: subprocess.Popen[str], answers: Queue[str | None]) -> None:
        if child.stdout is not None:
            for line in child.stdout:
                answers.put(line)
        answers.put(None)

    def _read_errors(self, child: subprocess.Popen[str]) -> None:
        if child.stderr is not None:
            for line in child.stderr:
                self._errors.append(line.rstrip())
                if self._echo:
                    sys.stderr.write(f"[{self.arm.name}] {line}")


def _fill(part: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        part = part.replace(name, value)
    return part


def _tail(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


@contextmanager
def checkout(repository: Path, revision: str) -> Generator[tuple[Path, str]]:
    """A temporary work tree of `revision`; yields its path and commit. Raises `ValueError` if git doesn't know the revision."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"git {arguments[0]} {revision}: {_tail(done.stderr)}")
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="gnomon-bench-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree, commit
        finally:
            git("worktree", "remove", "--force", str(tree))


def worker_command(side: str, model: Path, settings: Mapping[str, JsonValue]) -> list[str]:
    """The command line of a native worker of `side` ("gnomon" or "mlx-lm")."""
    return [sys.executable, "-m", "gnomon.bench.worker", side, str(model), json.dumps(dict(settings))]


def split_command(text: str) -> tuple[str, ...]:
    """A command line taken apart as a shell would, without running one. Raises `ValueError` if it is empty or a quote stays open."""
    parts: Sequence[str] = shlex.split(text)
    if not parts:
        raise ValueError("the command is empty")
    return tuple(parts)
