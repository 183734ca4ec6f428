"""What the evaluations of texts have alike in the store: a complete run of kind `eval` with one arm and one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from gnomon.bench.preflight import preflight
from gnomon.bench.provenance import provenance
from gnomon.bench.schema import Arm, Run, Sample, Work
from gnomon.bench.store import new_id, now
from gnomon.engine.api import ModelInfo


@dataclass(frozen=True, slots=True)
class TextResult:
    """What a model made of a text.

    `prompt` is the digest of the windows, so that results of equal questions can be told; `parts` are the windows' tokens.
    """

    name: str
    task: str
    cell: str
    prompt: str
    parts: Sequence[Sequence[int]]
    metrics: Mapping[str, float]
    details: Mapping[str, JsonValue]
    settings: Mapping[str, JsonValue]

    def run(self, model: ModelInfo, seconds: float, *, argv: Sequence[str], hash_cache: Path) -> Run:
        """The run, with the weights' bytes among the metrics. `hash_cache` is where digests of model files are kept."""
        origin = provenance(Path(model.path), hash_cache)
        work = Work(
            task=self.task,
            model=origin.model_sha256,
            prompt=self.prompt,
            prompt_tokens=sum(map(len, self.parts)),
            machine=origin.machine,
        )
        sample = Sample(
            index=0,
            cell=self.cell,
            block=0,
            slot=0,
            arm="gnomon",
            seed=0,
            status="ok",
            started=0.0,
            seconds=seconds,
            metrics={**self.metrics, "weight_bytes": float(model.weight_bytes)},
            work=work,
            details=dict(self.details),
        )
        arm = Arm(name="gnomon", kind="engine", settings=dict(self.settings), effective={"tier": model.tier})
        return Run(
            kind="eval",
            id=new_id(),
            name=self.name,
            created=now(),
            finished=now(),
            complete=True,
            planned_blocks=1,
            argv=tuple(argv),
            provenance=origin,
            preflight=preflight(),
            arms=(arm,),
            samples=(sample,),
        )
