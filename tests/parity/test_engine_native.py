"""The engine on native kernels: what a request gets doesn't depend, to the bit, on who shares its batch."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest

from engine_fixtures import SMALLER, tiny_loaded, tiny_tokenizer
from gnomon.config import EngineConfig, KernelConfig, KvScheme, SpeculationConfig
from gnomon.engine.api import Delta, Event, Failed, Finished, Request, SamplingParams
from gnomon.engine.engine import Engine
from gnomon.engine.settings import Settings
from gnomon.kernels import build, dispatch, native
from gnomon.state.batch_state import BatchState
from kernels.built import load_kernels
from tiny_models import VOCAB_SIZE, make

Result = tuple[list[int], list[float]]
MODELS = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "gpt_oss", "gemma3")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    kernels = load_kernels()
    tools = build.Toolchain("", "", "", "", "", "", (), "")
    monkeypatch.setattr(native, "_extension", kernels)
    monkeypatch.setattr(native, "_build", build.Build(Path("kernels"), tools, 0.0))
    yield kernels
    dispatch.uninstall()


def engine(
    model_type: str, batch: int, speculation: SpeculationConfig | None = None, kv: KvScheme | None = None
) -> Engine:
    def load():
        wide = {"head_dim": 64} if kv is not None else {}
        model = make(model_type, "float32", **SMALLER.get(model_type, {}) | wide)
        mx.eval(model.parameters())
        return tiny_loaded(model_type, model=model)

    return Engine(
        load,
        tiny_tokenizer(),
        Settings(
            EngineConfig(batch=batch),
            KernelConfig(kernels="native"),
            speculation=speculation or SpeculationConfig(),
            kv=kv or KvScheme(),
        ),
        load_draft=load if speculation is not None and speculation.draft_model else None,
    )


def requests() -> list[Request]:
    lengths = (3, 40, 17, 90)
    prompts = [tuple((7 * i * i + 3 * k + 11) % (VOCAB_SIZE - 10) + 5 for i in range(n)) for k, n in enumerate(lengths)]
    sampling = [SamplingParams(logprobs=0), SamplingParams(temperature=0.8, seed=5, logprobs=0)] * 2
    return [
        Request(str(i), p, s, max_tokens=12 + 3 * i, ignore_eos=True)
        for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]


def run(engine: Engine, together: list[Request]) -> dict[str, Result]:
    engine.wait(120)
    results: dict[str, Result] = {r.id: ([], []) for r in together}
    left = threading.Semaphore(0)
    ended: list[Finished | Failed] = []

    def sink(request: Request, event: Event) -> None:
        if isinstance(event, Delta):
            results[request.id][0].extend(event.ids)
            results[request.id][1].extend(t.logprob for t in event.logprobs)
        elif isinstance(event, Finished | Failed):
            ended.append(event)
            left.release()

    for request in together:
        engine.submit(request, lambda event, r=request: sink(r, event))
    for _ in together:
        assert left.acquire(timeout=120)
    assert [type(event) for event in ended] == [Finished] * len(ended), ended
    assert {event.usage.tier for event in ended if isinstance(event, Finished)} == {engine.model.tier}
    return results


@pytest.mark.parametrize("model_type", MODELS)
def test_a_request_is_the_same_to_the_bit_alone_and_in_a_batch(loaded: ModuleType, model_type: str) -> None:
    asked = requests()
    with engine(model_type, 1) as serial:
        alone = {r.id: run(serial, [r])[r.id] for r in asked}
    with engine(model_type, 4) as batched:
        assert batched.wait(300).tier == "Lab"
        together = run(batched, asked)
        stats = batched.stats()["kernels"]
    assert together == alone
    assert all(len(ids) == r.max_tokens for r, (ids, _) in ((r, alone[r.id]) for r in asked))
    assert stats["native"]
    assert "attention" in stats["operations"]


@pytest.mark.parametrize("kind", ["ngram", "two-model"])
@pytest.mark.parametrize("model_type", MODELS)
def test_guessing_changes_no_bit(
    loaded: ModuleType, model_type: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat: list[bool] = []
    begin = BatchState.begin

    def seen(self: BatchState, width: int, counts: Sequence[int] | None = None, *, flat_: bool = False) -> None:
        flat.append(flat_)
        begin(self, width, counts, flat=flat_)

    monkeypatch.setattr(
        BatchState, "begin", lambda self, width, counts=None, flat=False: seen(self, width, counts, flat_=flat)
    )
    config = SpeculationConfig("itself" if kind == "two-model" else None, kind, num_draft_tokens=4, ngram_max=2)  # pyright: ignore[reportArgumentType]
    # Repeating prompts; the longer ones wrap the sliding layers.
    asked = [replace(r, prompt=r.prompt * 2, max_tokens=16) for r in requests()]
    with engine(model_type, 1) as serial:
        alone = {r.id: run(serial, [r])[r.id] for r in asked}
    for batch in (1, 4):
        with engine(model_type, batch, config) as guessing:
            assert run(guessing, asked) == alone
            stats = guessing.stats()
        assert kind in stats["speculation"]["sources"]
        # Random models don't repeat what they read, but they agree with themselves.
        assert stats["proposals"]["accepted" if kind == "two-model" else "proposed"] > 0
        assert stats["speculation"]["draft_failed"] is None
        # Lookup finds something in one row and nothing in another; rows that draft for themselves are always right and in step.
        if kind == "ngram":
            assert any(flat) == (batch == 4 and model_type in ("llama", "qwen3"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_5"])
def test_coded_keys_and_values_depend_on_no_company(loaded: ModuleType, model_type: str, bits: int) -> None:
    asked, scheme = requests(), KvScheme("affine", bits=bits)
    with engine(model_type, 1, kv=scheme) as serial:
        alone = {r.id: run(serial, [r])[r.id] for r in asked}
        assert serial.stats()["kernels"]["stock_calls"].get("quantized matmul") is None
    with engine(model_type, 4, SpeculationConfig(None, "ngram", num_draft_tokens=4), kv=scheme) as batched:
        assert run(batched, asked) == alone


def test_a_stock_engine_beside_a_native_one_stays_stock(loaded: ModuleType) -> None:
    asked = requests()
    with Engine(lambda: tiny_loaded("llama"), tiny_tokenizer()) as stock:
        before = run(stock, asked)
        assert stock.wait(300).tier == "L1"
        with engine("llama", 4) as other:
            run(other, asked)
            assert run(stock, asked) == before
