"""The result file: pydantic records of one run. The published JSON Schema (docs/bench-result.schema.json) is generated from them.

Unknown fields, non-finite numbers and unknown metrics are refused. `FORMAT` is the one version number of the store: it grows with every
change that old readers can't ignore.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from gnomon.bench.statistics import Outcome

FORMAT = 1

Status = Literal["ok", "failed", "invalid", "interrupted", "timeout", "unsupported"]
"""`invalid` ran but did the wrong work; `interrupted` was disturbed from outside; `unsupported` is an arm's own refusal."""
Better = Literal["higher", "lower"]


class Unit(NamedTuple):
    """Unit of a metric and which direction is an improvement."""

    unit: str
    better: Better


METRICS: dict[str, Unit] = {
    "seconds": Unit("s", "lower"),
    "decode_tokens_per_second": Unit("token/s", "higher"),
    "prefill_tokens_per_second": Unit("token/s", "higher"),
    "aggregate_tokens_per_second": Unit("token/s", "higher"),
    "first_token_seconds": Unit("s", "lower"),
    "headers_seconds": Unit("s", "lower"),
    "first_byte_seconds": Unit("s", "lower"),
    "first_event_seconds": Unit("s", "lower"),
    "first_output_seconds": Unit("s", "lower"),
    "first_output_median_seconds": Unit("s", "lower"),
    "first_output_max_seconds": Unit("s", "lower"),
    "longest_gap_seconds": Unit("s", "lower"),
    "total_seconds": Unit("s", "lower"),
    "ready_seconds": Unit("s", "lower"),
    "first_answer_seconds": Unit("s", "lower"),
    "cold_first_output_seconds": Unit("s", "lower"),
    "cached_first_output_seconds": Unit("s", "lower"),
    "restarted_first_output_seconds": Unit("s", "lower"),
    "later_first_output_median_seconds": Unit("s", "lower"),
    "first_output_p95_seconds": Unit("s", "lower"),
    "token_time_median_seconds": Unit("s", "lower"),
    "goodput_requests_per_second": Unit("request/s", "higher"),
    "objectives_met": Unit("1", "higher"),
    "rejected_requests": Unit("request", "lower"),
    "freed_seconds": Unit("s", "lower"),
    "next_first_output_seconds": Unit("s", "lower"),
    "reused_share": Unit("1", "higher"),
    "cleanup_seconds": Unit("s", "lower"),
    "resident_bytes": Unit("byte", "lower"),
    "peak_resident_bytes": Unit("byte", "lower"),
    "idle_resident_bytes": Unit("byte", "lower"),
    "proportional_bytes": Unit("byte", "lower"),
    "anonymous_bytes": Unit("byte", "lower"),
    "file_backed_bytes": Unit("byte", "lower"),
    "shared_memory_bytes": Unit("byte", "lower"),
    "swapped_bytes": Unit("byte", "lower"),
    "allocator_cache_bytes": Unit("byte", "lower"),
    "kv_bytes": Unit("byte", "lower"),
    "prompt_cache_bytes": Unit("byte", "lower"),
    "disk_cache_bytes": Unit("byte", "lower"),
    "active_bytes": Unit("byte", "lower"),
    "peak_active_bytes": Unit("byte", "lower"),
    "retained_bytes": Unit("byte", "lower"),
    "weight_bytes": Unit("byte", "lower"),
    "perplexity": Unit("1", "lower"),
    "kl_divergence": Unit("nat", "lower"),
    "accuracy": Unit("1", "higher"),
}
"""Every metric a sample may carry. Tokens are counted from usage, never from stream chunks."""


def _known(metrics: dict[str, float]) -> dict[str, float]:
    for name, value in metrics.items():
        if name not in METRICS:
            raise ValueError(f"unknown metric {name!r}; known: {', '.join(METRICS)}")
        if value < 0:
            raise ValueError(f"metric {name} is {value}, below 0")
    return metrics


Metrics = Annotated[dict[str, float], AfterValidator(_known)]


class Record(BaseModel):
    """Base of every record: immutable, no unknown fields, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Work(Record):
    """What a sample did. Two samples may be set in a ratio only if all of this is equal.

    `model` and `prompt` are SHA-256 digests of the model's content and of the token ids or text; `depth` is the number of tokens already in
    the cache; `machine` fingerprints host, processor and memory.
    """

    task: str
    model: str | None = None
    prompt: str | None = None
    prompt_tokens: int = Field(default=0, ge=0)
    output_tokens: int = Field(default=0, ge=0)
    concurrency: int = Field(default=1, ge=1)
    depth: int = Field(default=0, ge=0)
    sampling: str = "greedy"
    cache: str = "cold"
    machine: str | None = None


class Arm(Record):
    """One side of a comparison: what was run and with which settings, as requested (`settings`) and as it reported (`effective`)."""

    name: str
    kind: Literal["settings", "command", "revision", "engine", "server", "reference"]
    settings: dict[str, JsonValue] = {}
    effective: dict[str, JsonValue] = {}
    command: tuple[str, ...] | None = None
    revision: str | None = None


class Sample(Record):
    """One measurement of one arm. `started` is in seconds since the run began; `others_cpu` is the share of the machine that other
    processes used while it ran. Block -1 is the warm-up."""

    index: int = Field(ge=0)
    cell: str
    block: int = Field(ge=-1)
    slot: int = Field(ge=0)
    arm: str
    seed: int
    attempt: int = Field(default=1, ge=1)
    status: Status
    reason: str | None = None
    started: float = Field(ge=0)
    seconds: float = Field(ge=0)
    metrics: Metrics = {}
    work: Work | None = None
    others_cpu: float | None = None
    swap_bytes: int | None = None
    details: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _complete(self) -> Sample:
        if self.status == "ok" and (not self.metrics or self.work is None):
            raise ValueError(f"sample {self.index} is ok but lacks metrics or work")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"sample {self.index} is {self.status} but gives no reason")
        return self


class Pair(Record):
    """A block that counts: both arms' values and their log-ratio, positive where the candidate is better."""

    block: int
    seed: int
    first: str
    baseline: float
    candidate: float
    log_ratio: float


class Exclusion(Record):
    """A block that doesn't count, and why."""

    block: int
    reason: str


class Comparison(Record):
    """Candidate against baseline on one metric of one cell. `ratio`, `lower` and `upper` are above 1 where the candidate is better.

    `primary` marks the metric declared before the run; only it decides a default.
    """

    cell: str
    metric: str
    unit: str
    better: Better
    baseline: str
    candidate: str
    primary: bool
    pairs: tuple[Pair, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    ratio: float | None = None
    lower: float | None = None
    upper: float | None = None
    confidence: float = 0.95
    method: str
    outcome: Outcome
    reason: str
    next: str | None = None


class Preflight(Record):
    """State of the machine before a run. `verdict` is `quiet` only if `problems` is empty."""

    verdict: Literal["quiet", "busy"]
    problems: tuple[str, ...] = ()
    others_cpu: float
    load_1m: float | None
    memory_available_bytes: int
    swap_used_bytes: int
    on_battery: bool | None
    governor: str | None
    temperature_celsius: float | None
    thread_variables: dict[str, str]


class Provenance(Record):
    """Where numbers come from. Thread variables are those found; `neutralised` names those removed from the children that measured."""

    revision: str | None
    dirty: bool | None
    diff_sha256: str | None
    packages: dict[str, str]
    native_libraries: dict[str, str]
    python: str
    system: str
    processor: str
    cores: int
    memory_bytes: int
    device: str
    machine: str
    model_path: str | None = None
    model_sha256: str | None = None
    model_files: dict[str, str] = {}
    neutralised: tuple[str, ...] = ()


class Run(Record):
    """A whole run, complete or cut short. A `diagnostic` run (busy machine, quick mode) never counts as acceptance."""

    format: Literal[1] = FORMAT
    kind: Literal["ab", "native", "serve", "eval"]
    id: str
    name: str
    created: datetime
    finished: datetime | None = None
    complete: bool = False
    interruption: str | None = None
    diagnostic: bool = False
    planned_blocks: int = 0
    argv: tuple[str, ...] = ()
    provenance: Provenance
    preflight: Preflight
    arms: tuple[Arm, ...] = ()
    samples: tuple[Sample, ...] = ()
    comparisons: tuple[Comparison, ...] = ()


def published_schema() -> dict[str, Any]:
    """The JSON Schema of a result file."""
    schema = Run.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"Gnomon benchmark result, format {FORMAT}"
    schema["$defs"]["Sample"]["properties"]["metrics"]["propertyNames"] = {"enum": list(METRICS)}
    return schema


def schema_text() -> str:
    """The published schema as it is stored in docs/."""
    return json.dumps(published_schema(), indent=1) + "\n"
