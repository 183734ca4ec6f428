"""An engine over a tiny random model, for tests of whatever stands on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from gnomon.models.load import Binding, LoadedModel
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import tiny
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig
from gnomon.engine.engine import Engine
from gnomon.engine.row import ProposerFactory

EOS = 1
_DECODER = {"type": "ByteLevel"}


class _Bytes:
    """Ids 32 to 126 are the ASCII characters; the others are spelled <id>. There is no merging: text and ids map one to one."""

    def encode(self, text: str, special: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.piece(i) or "" for i in ids)

    def piece(self, token: int) -> str | None:
        return chr(token) if 33 <= token <= 126 else "\u0120" if token == 32 else f"<{token}>"

    def token_id(self, piece: str) -> int | None:
        return ord(piece) if len(piece) == 1 else EOS if piece == "<eos>" else None

    def added(self) -> Mapping[int, tuple[str, bool]]:
        return {EOS: ("<eos>", True)}

    def size(self) -> int:
        return tiny.VOCAB

    def decoder(self) -> Mapping[str, Any]:
        return _DECODER


def tiny_tokenizer() -> Tokenizer:
    """A tokenizer for tiny models: a character per id."""
    return Tokenizer(_Bytes(), {"eos_token": "<eos>"})


def tiny_loaded(model_type: str = "llama", dtype: mx.Dtype = mx.float32, model: nn.Module | None = None) -> LoadedModel:
    """What loading a tiny model gives."""
    built = model or tiny.model(model_type, dtype)
    return LoadedModel(
        model=built,
        config=tiny.config(model_type),
        path=Path("/nowhere/tiny"),
        model_type=model_type,
        context_length=tiny.CONTEXT,
        vocab_size=tiny.VOCAB,
        eos_token_ids=(EOS,),
        weight_bytes=sum(value.nbytes for _, value in tree_flatten(built.parameters())),
        generation_config={},
        binding=Binding(True, None, True, lambda: make_prompt_cache(built)),
    )


@contextmanager
def tiny_engine(
    model_type: str = "llama",
    config: EngineConfig | None = None,
    *,
    load: Callable[[], LoadedModel] | None = None,
    propose: ProposerFactory | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> Iterator[Engine]:
    """A running engine; its model is the tiny one of that type unless `load` gives another."""
    engine = Engine(
        load or (lambda: tiny_loaded(model_type)),
        tiny_tokenizer(),
        config,
        model_id=f"tiny-{model_type}",
        propose=propose,
        on_failure=on_failure,
    )
    try:
        engine.wait(60)
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A running engine over a tiny llama."""
    with tiny_engine() as running:
        yield running
