"""The tokenizers of two real models against transformers and mlx-lm."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.chat.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "  indented\n\n\tdef f(x): return [x, 1, 23]  # naïve café",
    "你好世界 こんにちは 👩‍👩‍👧 🏳️‍🌈 Zażółć gęślą jaźń",
    "<|im_start|>user\nhi<|im_end|>\n<start_of_turn>user\nhi<end_of_turn>",
    "",
    "\n",
]


@pytest.fixture(scope="module", params=["starter_path", "gemma_path"])
def model_path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def ours(model_path: Path) -> Tokenizer:
    return Tokenizer.load(model_path)


@pytest.mark.network
def test_ids_and_text_as_transformers(model_path: Path, ours: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.encode(text, special=True) == theirs.encode(text)
        assert ours.decode(ids, hide=False) == theirs.decode(ids)
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert ours.vocab_size == len(theirs)
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_ids
    assert ours.chat_template == theirs.chat_template


@pytest.mark.network
def test_text_streams_as_mlx_lms(model_path: Path, ours: Tokenizer) -> None:
    from mlx_lm.tokenizer_utils import load

    theirs = load(model_path)
    for text in TEXTS:
        stream, oracle = ours.stream(hide=False), theirs.detokenizer
        joined = ""
        for token in ours.encode(text):
            joined += stream.push(token)
            oracle.add_token(token)
        oracle.finalize()
        # mlx-lm drops spaces at the very beginning of byte-level text; they are kept here.
        assert joined.lstrip(" ") == oracle.text.lstrip(" ")
        assert joined == text
