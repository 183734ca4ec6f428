"""The engine on an NVIDIA GPU's native kernels: as near to float32 as stock operations are, and decoding is the same to the
bit in any company."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Read once, at the first product: the reference is float32's, not TF32's.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from engine_fixtures import tiny_loaded, tiny_tokenizer
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, KernelConfig, KvScheme, SpeculationConfig
from gnomon.engine.api import Delta, Failed, Request, SamplingParams
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings
from gnomon.kernels import native
from tiny_models import VOCAB_SIZE, make

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not native.is_cuda(), reason="these kernels are for NVIDIA GPUs"),
]

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS = 8
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a compiler does.",
    "Name three fruits that are red.",
    "Write a Python function that adds two numbers.",
    "Tell a short story about a fox.",
)


class Answer(NamedTuple):
    """Tokens and the log-probability that each was given."""

    ids: list[int]
    logprobs: list[float]


def tiny(model_type: str, bits: int | None, group: int = 64) -> nn.Module:
    model = make(model_type, "bfloat16", **SHAPE)
    if bits is not None:
        nn.quantize(model, group, bits)
    mx.eval(model.parameters())
    return model


def answers(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    engine.wait(120)
    streams = [engine.stream(request) for request in requests]
    found: list[Answer] = []
    for stream in streams:
        answer = Answer([], [])
        for event in stream:
            if isinstance(event, Delta):
                answer.ids.extend(event.ids)
                answer.logprobs.extend(score.logprob for score in event.logprobs)
            elif isinstance(event, Failed):
                raise AssertionError(event.message)
        found.append(answer)
    return found


def stock(model: Any, prompt: Sequence[int], tokens: int) -> Answer:
    """mlx-lm's own answer, a token at a time: its products of more rows take a minute to compile at 4 and 8 bits."""
    answer = Answer([], [])
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=tokens, prefill_step_size=1):
        answer.ids.append(int(token))
        answer.logprobs.append(float(np.array(logprobs[int(token)].astype(mx.float32))))
    return answer


def asked(prompts: Sequence[Sequence[int]], tokens: int, name: str) -> list[Request]:
    return [
        Request(f"{name} {i}", tuple(prompt), SamplingParams(temperature=0.0, logprobs=0), tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


def in_float32(model: nn.Module) -> nn.Module:
    """The same weights, each as float32 has it."""
    wide = copy.deepcopy(model)
    wide.set_dtype(mx.float32)
    wide = dequantize_model(wide)
    mx.eval(wide.parameters())
    return wide


def scores(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities [len(ids), V] of a forward over the whole text."""
    text = mx.array([*prompt, *ids[:-1]])[None]
    logits = model(text, cache=make_prompt_cache(model))[0, len(prompt) - 1 :].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def compare(wide: nn.Module, prompts: Sequence[Sequence[int]], stock: Sequence[Answer], ours: Sequence[Answer]) -> None:
    """Native operations are no further from float32, as which `wide` has the model, than stock ones are, and where texts part, both tokens
    are nearly as likely."""
    a = mx.random.normal((64, 512))
    exact = np.array(a).astype(np.float64) @ np.array(a).astype(np.float64).T
    assert np.abs(np.array(a @ a.T) - exact).max() < 1e-3, "float32 products are TF32's: set MLX_ENABLE_TF32=0"
    errors: dict[str, list[float]] = {"stock": [], "native": []}
    partings: list[float] = []
    for prompt, theirs, own in zip(prompts, stock, ours, strict=True):
        assert len(own.ids) == len(theirs.ids)
        for name, answer in (("stock", theirs), ("native", own)):
            right = scores(wide, prompt, answer.ids)
            errors[name] += np.abs(right[range(len(answer.ids)), answer.ids] - answer.logprobs).tolist()
        at = next((i for i, (x, y) in enumerate(zip(own.ids, theirs.ids, strict=True)) if x != y), None)
        if at is not None:
            partings.append(float(abs(right[at, own.ids[at]] - right[at, theirs.ids[at]])))
    rms = {name: float(np.sqrt(np.mean(np.square(each)))) for name, each in errors.items()}
    worst = max(max(each) for each in errors.values())
    print(
        f"rms error stock {rms['stock']:.5f} native {rms['native']:.5f}, worst {worst:.4f}, partings at gaps {partings}"
    )
    assert rms["native"] <= 1.25 * rms["stock"] + 1e-4
    assert all(gap <= 2 * worst for gap in partings)


@pytest.mark.parametrize(("bits", "group"), [(None, 64), (4, 64), (4, 32), (8, 128)])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_tiny_models(model_type: str, bits: int | None, group: int) -> None:
    model = tiny(model_type, bits, group)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(5, VOCAB_SIZE, length).tolist() for length in (3, 17, 40, 63, 64, 65, 90, 130)]
    # Prefilled together, these are 32 rows at most: our own products, and attention of windows. (One token alone is a step, whose
    # attention rounds otherwise.)
    short = [rng.integers(5, VOCAB_SIZE, length).tolist() for length in (2, 2, 3, 4, 4, 3, 2, 4)]
    theirs = [stock(model, prompt, 24) for prompt in prompts]
    settings = Settings(EngineConfig(batch=ROWS, prompt_cache=0), KernelConfig(kernels="native"))
    with Engine(
        lambda: tiny_loaded(model_type, model=tiny(model_type, bits, group)), tiny_tokenizer(), settings
    ) as ours:
        alone = [one for r in asked(prompts, 24, "alone") for one in answers(ours, [r])]
        together = answers(ours, asked(prompts, 24, "together"))
        short_alone = [one for r in asked(short, 40, "short alone") for one in answers(ours, [r])]
        short_together = answers(ours, asked(short, 40, "short together"))
        assert ours.stats()["kernels"]["isa"] == native.CUDA
    wide = in_float32(model)
    compare(wide, prompts, theirs, alone)
    compare(wide, prompts, theirs, together)
    assert short_together == short_alone


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5", "gemma3", "gemma4", "gpt_oss", "deepseek_v3"])
def test_other_families(model_type: str) -> None:
    """Experts, recurrent mixers, sliding windows, sinks, latent attention: kernels where there are some, the rest stock."""
    model = tiny(model_type, None)
    rng = np.random.default_rng(9)
    prompts = [rng.integers(5, VOCAB_SIZE, length).tolist() for length in (3, 40, 90)]
    theirs = [stock(model, prompt, 16) for prompt in prompts]
    settings = Settings(EngineConfig(batch=4, prompt_cache=0), KernelConfig(kernels="native"))
    with Engine(lambda: tiny_loaded(model_type, model=tiny(model_type, None)), tiny_tokenizer(), settings) as ours:
        alone = [one for r in asked(prompts, 16, "alone") for one in answers(ours, [r])]
        together = answers(ours, asked(prompts, 16, "together"))
        print(
            model_type,
            {k: v for k, v in ours.stats()["kernels"].items() if k in ("layers", "stock_calls", "graph_reason")},
        )
    # A copy can't be made of every model.
    wide = make(model_type, "bfloat16", **SHAPE)
    wide.update(tree_map(lambda x: x if x.dtype == mx.uint32 else x.astype(mx.float32), model.parameters()))
    compare(wide, prompts, theirs, alone)
    compare(wide, prompts, theirs, together)


@pytest.mark.parametrize("scheme", [KvScheme(), KvScheme("affine", bits=8)], ids=["plain", "8 bits"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_guessing_changes_no_bit(model_type: str, scheme: KvScheme) -> None:
    """Windows go through the same launch as steps; guesses come in different numbers per row, and most are wrong."""
    rng = np.random.default_rng(3)
    # Prefilled together, these are 32 rows at most.
    prompts = [(rng.integers(5, VOCAB_SIZE, 2).tolist() * 2)[:length] for length in (2, 2, 3, 4, 4, 3, 2, 4)]

    def engine(batch: int, guesses: int | None) -> Engine:
        settings = Settings(
            EngineConfig(batch=batch, prompt_cache=0),
            KernelConfig(kernels="native"),
            scheme,
            speculation=SpeculationConfig(
                draft_kind="ngram" if guesses else "auto", num_draft_tokens=guesses, ngram_max=2
            ),
        )
        model = tiny(model_type, 4)
        return Engine(lambda: tiny_loaded(model_type, model=model), tiny_tokenizer(), settings)

    with engine(1, None) as serial:
        alone = [one for r in asked(prompts, 24, "alone") for one in answers(serial, [r])]
    for batch, guesses in ((1, 4), (2, 10), (8, 3)):
        with engine(batch, guesses) as guessing:
            assert answers(guessing, asked(prompts, 24, f"{batch} at once")) == alone
            stats = guessing.stats()
        assert stats["proposals"]["proposed"] > 0
        assert stats["kernels"]["graph"]


@pytest.mark.network
def test_the_starter(starter_path: Path) -> None:
    tokenizer = Tokenizer.load(starter_path)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n") for question in QUESTIONS
    ]
    model = load_model(starter_path)[0]
    theirs = [stock(model, prompt, 48) for prompt in prompts]
    settings = Settings(EngineConfig(batch=ROWS, prompt_cache=0), KernelConfig(kernels="native"))
    with load(starter_path, settings) as ours:
        alone = [one for r in asked(prompts, 48, "alone") for one in answers(ours, [r])]
        together = answers(ours, asked(prompts, 48, "together"))
    for question, stock_answer, own in zip(QUESTIONS, theirs, alone, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(own.ids, stock_answer.ids, strict=True)) if x != y), len(own.ids))
        print(f"{question} the same for {same} tokens: {tokenizer.decode(own.ids)!r}")
    wide = in_float32(model)
    compare(wide, prompts, theirs, alone)
    compare(wide, prompts, theirs, together)
