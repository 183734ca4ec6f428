"""The two real models, from package to greedy answer."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx_lm import load
from mlx_lm.generate import generate_step


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def test_the_starter_answers(starter_path: Path) -> None:
    model, tokenizer = load(str(starter_path))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert len(prompt) == 37
    answer = greedy(model, prompt, 8)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] in tokenizer.eos_token_ids


def test_gemma_answers(gemma_path: Path) -> None:
    model, tokenizer = load(str(gemma_path))
    prompt = tokenizer.encode("The capital of France is")
    assert prompt[0] == tokenizer.bos_token_id == 2
    said = tokenizer.decode(greedy(model, prompt, 12))
    assert said == " the capital of the country of France. It is the largest"
