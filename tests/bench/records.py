"""Records built by hand for tests."""

from __future__ import annotations

from typing import Any

from gnomon.bench.schema import Arm, Preflight, Provenance, Run, Sample, Work
from gnomon.bench.store import now

WORK = Work(task="decode", model="a" * 64, prompt="b" * 64, prompt_tokens=1, output_tokens=32, machine="m1")
RATE = "decode_tokens_per_second"


def sample(index: int, block: int, arm: str, rate: float | None, **changes: Any) -> Sample:
    """An ok decode sample, or whatever `changes` make of it; without a rate it has neither metrics nor work."""
    fields: dict[str, Any] = {
        "index": index, "cell": "decode:32@0", "block": block, "slot": index % 2, "arm": arm, "seed": block,
        "status": "ok", "started": float(index), "seconds": 1.0,
    }  # fmt: skip
    if rate is not None:
        fields |= {"metrics": {RATE: rate}, "work": WORK}
    return Sample.model_validate({**fields, **changes})


def pairs(rates: list[tuple[float, float]]) -> list[Sample]:
    """Blocks of ok samples of the arms A and B."""
    return [
        sample(2 * n + i, n, arm, rate)
        for n, both in enumerate(rates)
        for i, (arm, rate) in enumerate(zip("AB", both, strict=True))
    ]


def provenance(**changes: Any) -> Provenance:
    fields: dict[str, Any] = {
        "revision": "c" * 40, "dirty": False, "diff_sha256": None, "packages": {"mlx": "0.32.4"}, "native_libraries": {},
        "python": "3.11", "system": "test", "processor": "none", "cores": 2, "memory_bytes": 1, "device": "cpu", "machine": "m1",
    }  # fmt: skip
    return Provenance.model_validate({**fields, **changes})


def preflight(**changes: Any) -> Preflight:
    fields: dict[str, Any] = {
        "verdict": "quiet", "others_cpu": 0.0, "load_1m": 0.0, "memory_available_bytes": 1, "swap_used_bytes": 0,
        "on_battery": None, "governor": None, "temperature_celsius": None, "thread_variables": {},
    }  # fmt: skip
    return Preflight.model_validate({**fields, **changes})


def run(samples: list[Sample] | None = None, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "kind": "ab", "id": "0123abcd", "name": "test", "created": now(), "provenance": provenance(), "preflight": preflight(),
        "arms": (Arm(name="A", kind="settings"), Arm(name="B", kind="settings")), "samples": tuple(samples or ()),
    }  # fmt: skip
    return Run(**{**fields, **changes})
