"""A task asked item by item, kept as a run of kind `eval`: a sample for every item, and one for all of them together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from gnomon.bench.preflight import preflight
from gnomon.bench.provenance import machine, provenance
from gnomon.bench.schema import Arm, Run, Sample, Work
from gnomon.bench.store import Store, new_id, now
from gnomon.evals.asking import Answer, Asker, RequestFailed, RequestTimedOut
from gnomon.evals.proportions import mcnemar, wilson
from gnomon.evals.tasks import Item

ARM = "model"
SAVE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """Who answers: what the server calls the model, where it is, the bytes of its weights if it tells, and its directory if it is ours."""

    model: str
    server: str
    weight_bytes: int | None = None
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a run says of all items: `failed` ones are not counted, neither as right nor as wrong."""

    right: int
    answered: int
    failed: int
    accuracy: float | None
    lower: float | None
    upper: float | None
    per_length: float | None
    reasons: Mapping[str, int]


class TaskRun:
    """Asks what an earlier state of the run hasn't answered. The file is written at least every second, and at the end."""

    def __init__(
        self, store: Store, asker: Asker, served: Served, *, argv: Sequence[str] = (), hash_cache: Path | None = None
    ) -> None:
        self.store, self.asker, self.served = store, asker, served
        self.items = {item.id: (n, item) for n, item in enumerate(asker.form.task.items)}
        self._begun = time.perf_counter()
        self._saved = 0.0
        origin = provenance(served.path, hash_cache)
        self.run = Run(
            kind="eval",
            id=new_id(),
            name=f"{asker.form.task.head.task}, {served.model}",
            created=now(),
            planned_blocks=len(self.items),
            argv=tuple(argv),
            provenance=origin,
            preflight=preflight(),
            arms=(Arm(name=ARM, kind="server", settings=self._settings()),),
        )
        self.samples: list[Sample] = []

    def _settings(self) -> dict[str, JsonValue]:
        form = self.asker.form
        return {
            "model": self.served.model,
            "server": self.served.server,
            "mode": form.mode,
            "shots": form.shots,
            "chat": form.chat,
            "task_sha256": form.task.digest,
            "fields": dict(self.asker.extra),
        }

    def resume(self, earlier: Run) -> None:
        """Go on with an earlier state of the same run: what it answered stays, what failed is asked again.

        Raises ValueError if it had another task, form or model.
        """
        before = earlier.arms[0].settings if earlier.arms else {}
        for name, value in self._settings().items():
            # The address of the same model may be another one today.
            if name != "server" and before.get(name) != value:
                raise ValueError(f"{earlier.name}: {name} was {before.get(name)!r}, and is {value!r} now")
        if earlier.provenance.model_sha256 != self.run.provenance.model_sha256:
            raise ValueError(f"{earlier.name}: the model's files are others now")
        self.samples = [
            sample for sample in earlier.samples if sample.block < len(self.items) and "item" in sample.details
        ]
        self.run = self.run.model_copy(update={"id": earlier.id, "created": earlier.created})

    def finish(self, concurrency: int) -> Path:
        """Ask the items that are left, so many at a time. An interrupt ends it, and is written down. Returns the file."""
        left = [(n, item) for id, (n, item) in self.items.items() if id not in self._answered()]
        interruption = None
        pool = ThreadPoolExecutor(concurrency)
        try:
            asked: dict[Future[Answer], tuple[int, Item, float]] = {}
            for n, item in left:
                asked[pool.submit(self.asker.ask, item)] = (n, item, time.perf_counter() - self._begun)
            for future in as_completed(asked):
                self._record(future, *asked[future])
        except KeyboardInterrupt:
            interruption = "the user stopped it"
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if interruption is None:
            self.samples.append(self._summary())
        return self._save(interruption=interruption, complete=interruption is None, finished=now())

    def _answered(self) -> set[str]:
        return {str(sample.details["item"]) for sample in self.samples if sample.status == "ok"}

    def _record(self, future: Future[Answer], n: int, item: Item, started: float) -> None:
        details: dict[str, JsonValue] = {"item": item.id, "question_sha256": item.digest, "expected": item.expected}
        attempt = 1 + max((s.attempt for s in self.samples if s.details.get("item") == item.id), default=0)
        common = Sample(
            index=len(self.samples), cell=f"items of {self.asker.form.task.head.task}", block=n, slot=0, arm=ARM, seed=n,
            attempt=attempt, status="failed", reason="not asked", started=started, seconds=0.0, details=details,
        )  # fmt: skip
        try:
            answer = future.result()
        except RequestFailed as error:
            status = "timeout" if isinstance(error, RequestTimedOut) else "failed"
            self.samples.append(common.model_copy(update={"status": status, "reason": str(error)}))
        else:
            self.samples.append(_answered(common, answer, self._work(item.digest, answer)))
        if time.perf_counter() - self._saved > SAVE_SECONDS:
            self._save()

    def _work(self, prompt: str, answer: Answer | None = None) -> Work:
        form = self.asker.form
        asked = f"{form.mode}, {form.shots} shots{', chat' if form.chat else ''}"
        return Work(
            task=f"{form.task.head.task} by {asked}",
            model=self.run.provenance.model_sha256,
            prompt=prompt,
            prompt_tokens=answer.prompt_tokens if answer is not None else 0,
            output_tokens=answer.output_tokens if answer is not None else 0,
            machine=machine(),
        )

    def _summary(self) -> Sample:
        found = result(self.samples)
        common = Sample(
            index=len(self.samples), cell=f"task {self.asker.form.task.head.task}", block=0, slot=0, arm=ARM, seed=0, status="failed",
            reason="no item was answered", started=0.0, seconds=time.perf_counter() - self._begun,
            details={
                "right": found.right, "answered": found.answered, "failed": found.failed, "lower": found.lower, "upper": found.upper,
                "accuracy_per_length": found.per_length, "reasons": dict(found.reasons),
            },
        )  # fmt: skip
        if found.accuracy is None:
            return common
        metrics = {"accuracy": found.accuracy}
        # An accuracy over some of the items is none to set against others'.
        if self.served.weight_bytes is not None and not found.failed:
            metrics["weight_bytes"] = float(self.served.weight_bytes)
        work = self._work(self.asker.form.task.digest)
        return common.model_copy(update={"status": "ok", "reason": None, "metrics": metrics, "work": work})

    def _save(self, **changes: object) -> Path:
        self._saved = time.perf_counter()
        self.run = self.run.model_copy(update={"samples": tuple(self.samples), **changes})
        return self.store.save(self.run)


def _answered(common: Sample, answer: Answer, work: Work) -> Sample:
    details: dict[str, JsonValue] = {
        **common.details,
        "answer": answer.text,
        "prompt_sha256": answer.prompt_sha256,
        "chosen": answer.chosen,
    }
    if answer.scores:
        details |= {"nats": list(answer.scores), "correct_per_length": answer.correct_per_length}
    changes = {
        "status": "ok",
        "reason": None,
        "seconds": answer.seconds,
        "metrics": {"accuracy": float(answer.correct), "seconds": answer.seconds},
        "work": work,
        "details": details,
    }
    return common.model_copy(update=changes)


def last(samples: Sequence[Sample]) -> dict[str, Sample]:
    """The last attempt at every item, by its id."""
    ordered = sorted((s for s in samples if "item" in s.details), key=lambda s: s.attempt)
    return {str(sample.details["item"]): sample for sample in ordered}


def result(samples: Sequence[Sample]) -> Result:
    """What the last attempts say together."""
    items = last(samples).values()
    good = [sample for sample in items if sample.status == "ok"]
    reasons = Counter(sample.reason or "" for sample in items if sample.status != "ok")
    right = sum(sample.metrics["accuracy"] == 1.0 for sample in good)
    by_length = [sample.details["correct_per_length"] for sample in good if "correct_per_length" in sample.details]
    if not good:
        return Result(0, 0, len(items), None, None, None, None, reasons)
    lower, upper = wilson(right, len(good))
    per_length = sum(map(bool, by_length)) / len(by_length) if by_length else None
    return Result(right, len(good), len(items) - len(good), right / len(good), lower, upper, per_length, reasons)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs over the items that both answered. `only_first` and `only_second` are right in one alone; `p` is McNemar's, exact."""

    both: int
    only_first: int
    only_second: int
    neither: int
    left_out: int
    p: float

    @property
    def items(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def paired(first: Run, second: Run) -> Paired:
    """Raises ValueError for runs that share no item, or whose items of one id are different questions."""
    a, b = last(first.samples), last(second.samples)
    shared = [id for id in a if id in b]
    other = [id for id in shared if a[id].details.get("question_sha256") != b[id].details.get("question_sha256")]
    if not shared or other:
        what = f"item {other[0]} is another question" if other else "they have no item in common"
        raise ValueError(f"{first.name} and {second.name} can't be paired: {what}")
    counts: Counter[tuple[bool, bool]] = Counter()
    for id in shared:
        if a[id].status == b[id].status == "ok":
            counts[a[id].metrics["accuracy"] == 1.0, b[id].metrics["accuracy"] == 1.0] += 1
    one, two = counts[True, False], counts[False, True]
    missing = len(a.keys() | b.keys()) - counts.total()
    return Paired(counts[True, True], one, two, counts[False, False], missing, mcnemar(one, two))
