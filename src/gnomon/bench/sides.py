"""The two sides of `bench native`, each in its own process: Gnomon's engine and mlx-lm, on the same frozen token ids."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Protocol

import mlx.core as mx
from pydantic import JsonValue

from gnomon.bench.provenance import machine, sha256_ids, sha256_text
from gnomon.bench.schema import Work
from gnomon.bench.synthetic import fill, probed
from gnomon.bench.workload import ArmFailed, Measurement, Unsupported, Workload
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, KernelConfig, KvConfig
from gnomon.engine.api import Delta, Event, Failed, Finished, Request, Sink
from gnomon.engine.engine import Engine
from gnomon.engine.settings import Host, Settings
from gnomon.models.load import LoadedModel, load
from gnomon.state.batch_state import BatchState

REFERENCE_SETTINGS = ("prefill_step_size", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
"""Settings of mlx-lm's generation that the reference side takes."""


LOAD_TIMEOUT = 600.0


class Side(Protocol):
    """One implementation inside its worker process."""

    effective: dict[str, JsonValue]

    def measure(self, workload: Workload) -> Measurement: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class RowTimes:
    """When one request's tokens came: `first` and `last` in seconds of `perf_counter`, and the tokens in order."""

    ids: list[int] = field(default_factory=list[int])
    first: float = 0.0
    last: float = 0.0

    def add(self, ids: Iterable[int]) -> None:
        """Note tokens that have just arrived."""
        new = list(ids)
        if new:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.ids += new

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first; None if there are no two of them."""
        return (len(self.ids) - 1) / (self.last - self.first) if len(self.ids) > 1 and self.last > self.first else None


def settled() -> int:
    """Bytes MLX holds once all work is done and unused buffers are returned."""
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def summarise(
    workload: Workload, rows: Sequence[RowTimes], begun: float, memory: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of one measurement from its rows' arrival times. Raises `ValueError` if a row got no token."""
    if not all(row.ids for row in rows):
        raise ValueError("a row got no token")
    cell = workload.cell
    firsts = [row.first - begun for row in rows]
    end = max(row.last for row in rows)
    metrics: dict[str, float] = {"total_seconds": end - begun, **memory}
    if cell.task != "batch":
        metrics["first_token_seconds"] = firsts[0]
        metrics["prefill_tokens_per_second"] = cell.prompt_tokens / firsts[0]
        rate = rows[0].decode_rate
        if rate is not None:
            metrics["decode_tokens_per_second"] = rate
    else:
        metrics["first_output_median_seconds"] = median(firsts)
        metrics["first_output_max_seconds"] = max(firsts)
        metrics["aggregate_tokens_per_second"] = sum(len(row.ids) for row in rows) / (end - begun)
    return metrics


def work_done(
    workload: Workload, model: str | None, prompts: Sequence[Sequence[int]], rows: Sequence[RowTimes]
) -> Work:
    """What was really done: counts come from the tokens that arrived."""
    return Work(
        task=workload.cell.task,
        model=model,
        prompt=sha256_ids(token for prompt in prompts for token in (*prompt, -1)),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(len(row.ids) for row in rows),
        concurrency=len(rows),
        depth=workload.cell.depth,
        machine=machine(),
    )


def _measurement(
    workload: Workload,
    model: str | None,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[RowTimes],
    begun: float,
    before: int,
) -> Measurement:
    ended = time.perf_counter()
    peak = mx.get_peak_memory()
    mx.synchronize()
    mx.clear_cache()
    cleanup = time.perf_counter() - ended
    after = settled()
    memory = {
        "peak_active_bytes": float(peak),
        "active_bytes": float(after),
        "retained_bytes": float(max(0, after - before)),
        "cleanup_seconds": cleanup,
    }
    details: dict[str, JsonValue] = {"output_sha256": sha256_ids(token for row in rows for token in (*row.ids, -1))}
    return Measurement(summarise(workload, rows, begun, memory), work_done(workload, model, prompts, rows), details)


def vocabulary(path: Path) -> int:
    """The model's vocabulary size, as its config says. Raises `ValueError` if it doesn't."""
    config = json.loads((path / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{path / 'config.json'} has no vocab_size")
    return size


class ReferenceSide:
    """Unmodified mlx-lm: `stream_generate` for one request, `BatchGenerator` for several. End-of-sequence tokens don't stop it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], model_sha256: str | None) -> None:
        unknown = sorted(set(settings) - set(REFERENCE_SETTINGS))
        if unknown:
            raise ValueError(f"unknown mlx-lm setting {unknown[0]!r}; known: {', '.join(REFERENCE_SETTINGS)}")
        import mlx_lm

        self._lm: Any = mlx_lm
        self._model, self._tokenizer = mlx_lm.load(str(path))[:2]
        self._eos = set(self._tokenizer.eos_token_ids)
        self._tokenizer.eos_token_ids = []
        self._path = path
        self._settings = dict(settings)
        self._sha = model_sha256
        self.effective: dict[str, JsonValue] = {"prefill_step_size": 2048, **settings}

    def measure(self, workload: Workload) -> Measurement:
        cell = workload.cell
        if cell.task == "stream":
            return self._stream(workload)
        prompts = [workload.ids(self._vocabulary(), row, self._eos) for row in range(cell.rows)]
        before = settled()
        mx.reset_peak_memory()
        rows = [RowTimes() for _ in prompts]
        begun = self._one(workload, prompts[0], rows[0]) if cell.rows == 1 else self._batch(workload, prompts, rows)
        return _measurement(workload, self._sha, prompts, rows, begun, before)

    def _vocabulary(self) -> int:
        return vocabulary(self._path)

    def _one(self, workload: Workload, prompt: Sequence[int], row: RowTimes) -> float:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self._model, self._settings.get("max_kv_size"))
        if workload.cell.depth:
            probe = probed(self._model, make_prompt_cache(self._model))
            fill(cache, probe, workload.cell.depth, workload.seed)
        settled()
        mx.reset_peak_memory()
        options = {name: value for name, value in self._settings.items() if name != "max_kv_size"}
        begun = time.perf_counter()
        steps = self._lm.stream_generate(
            self._model,
            self._tokenizer,
            list(prompt),
            max_tokens=workload.cell.output_tokens,
            prompt_cache=cache,
            **options,
        )
        for response in steps:
            row.add([response.token])
        return begun

    def _stream(self, workload: Workload) -> Measurement:
        """A text prompt through `stream_generate`, as a server would get it: end-of-sequence tokens count."""
        if workload.cell.rows != 1:
            raise Unsupported("stream_generate takes one request")
        text = workload.text()
        row, tokens, begun = RowTimes(), 0, 0.0
        self._tokenizer.eos_token_ids = self._eos
        try:
            begun = time.perf_counter()
            steps = self._lm.stream_generate(
                self._model, self._tokenizer, text, max_tokens=workload.cell.output_tokens, **self._settings
            )
            for response in steps:
                row.add([response.token])
                tokens = response.prompt_tokens
        finally:
            self._tokenizer.eos_token_ids = []
        metrics = {"first_output_seconds": row.first - begun, "total_seconds": row.last - begun}
        if row.decode_rate is not None:
            metrics["decode_tokens_per_second"] = row.decode_rate
        settled()
        work = Work(
            task="stream",
            model=self._sha,
            prompt=sha256_text(text),
            prompt_tokens=tokens,
            output_tokens=len(row.ids),
            machine=machine(),
        )
        return Measurement(metrics, work, {"text_sha256": sha256_text(self._tokenizer.decode(row.ids))})

    def _batch(self, workload: Workload, prompts: Sequence[Sequence[int]], rows: Sequence[RowTimes]) -> float:
        from mlx_lm.generate import BatchGenerator

        if workload.cell.depth or set(self._settings) - {"prefill_step_size"}:
            raise Unsupported("mlx-lm batches neither from a synthetic state nor with KV settings")
        begun = time.perf_counter()
        generator = BatchGenerator(self._model, max_tokens=workload.cell.output_tokens, **self._settings)
        try:
            uids = dict(zip(generator.insert([list(p) for p in prompts]), rows, strict=True))
            open_rows = set(uids)
            while open_rows:
                _, responses = generator.next()
                for response in responses:
                    uids[response.uid].add([response.token])
                    if response.finish_reason is not None:
                        open_rows.discard(response.uid)
        finally:
            generator.close()
        return begun

    def close(self) -> None:
        """Nothing runs between measurements."""


class GnomonSide:
    """Gnomon's engine, driven through its public door. Settings are the fields of `EngineConfig`, `KernelConfig` and `KvConfig`."""

    def __init__(self, path: Path, settings: Mapping[str, Any], model_sha256: str | None) -> None:
        of_kernels = {f.name for f in fields(KernelConfig)}
        of_kv = {f.name for f in fields(KvConfig)}
        known = [f.name for group in (EngineConfig, KernelConfig, KvConfig) for f in fields(group)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"unknown Gnomon setting {unknown[0]!r}; known: {', '.join(known)}")
        # Repeated prompts are to be computed each time.
        config = replace(
            EngineConfig(prompt_cache=0),
            **{name: value for name, value in settings.items() if name not in of_kernels | of_kv},
        )
        chosen: dict[str, Any] = {name: value for name, value in settings.items() if name in of_kernels}
        if "kernel_cache" in chosen:
            chosen["kernel_cache"] = Path(chosen["kernel_cache"])
        kernels = KernelConfig(**chosen)
        said: dict[str, Any] = {name: value for name, value in settings.items() if name in of_kv}
        if "kv_quant" in said:
            said["kv_quant"] = str(said["kv_quant"])  # 4 and 8 are read as numbers
        kv = KvConfig(**said)
        tokenizer = Tokenizer.load(path)
        self._depth, self._seed = 0, 0
        self._engine = Engine(
            lambda: self._load(path),
            tokenizer,
            Settings(config, kernels, kv.scheme),
            Host(prime=self._prime),
        )
        self._engine.wait(LOAD_TIMEOUT)
        self._path = path
        self._sha = model_sha256
        self.effective: dict[str, JsonValue] = {
            **asdict(config),
            **asdict(kernels),
            **asdict(kv),
            "kernel_cache": str(kernels.kernel_cache),
            "kernels": ("int8" if kernels.kernels == "int8" else "native")
            if self._engine.model.tier == "Lab"
            else "stock",
        }

    def measure(self, workload: Workload) -> Measurement:
        cell = workload.cell
        self._depth, self._seed = cell.depth, workload.seed
        eos = self._engine.model.eos_token_ids
        prompts = [workload.ids(vocabulary(self._path), row, eos) for row in range(cell.rows)]
        self._rest()
        before = settled()
        mx.reset_peak_memory()
        rows = [RowTimes() for _ in prompts]
        begun = self._run(workload, prompts, rows)
        self._rest()
        return _measurement(workload, self._sha, prompts, rows, begun, before)

    def _run(self, workload: Workload, prompts: Sequence[Sequence[int]], rows: Sequence[RowTimes]) -> float:
        ended: SimpleQueue[str | None] = SimpleQueue()

        def sink(row: RowTimes) -> Sink:
            def take(event: Event) -> None:
                if isinstance(event, Delta):
                    row.add(event.ids)
                elif isinstance(event, Finished):
                    # Text may be held back where a token ends inside a character; the engine knows when its first token was there.
                    row.last = time.perf_counter()
                    row.first = row.last - event.usage.decode_seconds
                    ended.put(None)
                elif isinstance(event, Failed):
                    ended.put(event.message)

            return take

        begun = time.perf_counter()
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            request = Request(
                id=f"bench-{workload.nonce}-{number}",
                prompt=tuple(prompt),
                max_tokens=workload.cell.output_tokens,
                ignore_eos=True,
            )
            self._engine.submit(request, sink(row))
        for _ in rows:
            error = ended.get(timeout=workload.timeout)
            if error is not None:
                raise ArmFailed(error)
        return begun

    def _load(self, path: Path) -> LoadedModel:
        # On the engine thread, as is _prime.
        self._loaded = load(path)
        return self._loaded

    def _prime(self, state: BatchState) -> None:
        if self._depth:
            loaded = self._loaded
            probe = probed(loaded.model, loaded.binding.make_caches())
            fill(state.caches, probe, self._depth, self._seed, state.begin, state.commit)

    def _rest(self) -> None:
        """Wait until the engine has said goodbye to every request and let its buffers go."""
        deadline = time.perf_counter() + 10
        while self._engine.stats()["engine"]["doing"] != "idle":
            if time.perf_counter() > deadline:
                raise ArmFailed("the engine isn't idle ten seconds after its last request")
            time.sleep(0.001)

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.stop()


SIDES: dict[str, Callable[[Path, Mapping[str, Any], str | None], Side]] = {
    "gnomon": GnomonSide,
    "mlx-lm": ReferenceSide,
}
