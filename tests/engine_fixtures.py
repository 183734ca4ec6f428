"""An engine over a tiny random model, for tests of whatever stands on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig
from gnomon.engine import admission
from gnomon.engine.api import Delta, Event, Failed, Finished, ModelInfo, Request
from gnomon.engine.core import Core
from gnomon.engine.counters import Counters
from gnomon.engine.engine import Engine
from gnomon.engine.heart import Heart
from gnomon.engine.mailbox import Cancel, Mailbox, Submit
from gnomon.engine.row import Job, ProposerFactory
from gnomon.models.load import Binding, LoadedModel

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


class Rig:
    """The engine's core without its thread, turned by hand, so that joins, leaves and faults happen at chosen steps."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig | None = None, propose: ProposerFactory | None = None
    ) -> None:
        self.events: dict[str, list[Event]] = {}
        self.closed: list[str] = []
        self.mailbox = Mailbox()
        self.counters = Counters()
        self.core = Core(
            loaded,
            tiny_tokenizer(),
            config or EngineConfig(),
            self.mailbox,
            self.counters,
            Heart(1000),
            propose,
            lambda job: self.closed.append(job.request.id),
        )
        self.loaded = loaded

    def submit(self, request: Request, seed: int = 0) -> Job:
        model = ModelInfo("tiny", "", "tiny", self.loaded.context_length, self.loaded.vocab_size, (EOS,), 0, 0)
        events = self.events[request.id] = []
        limit = admission.token_limit(request, model, None)
        sampling = request.sampling
        job = Job(request, events.append, limit, seed if sampling.seed is None else sampling.seed)
        self.mailbox.post(Submit(job))
        return job

    def cancel(self, request_id: str) -> None:
        self.mailbox.post(Cancel(request_id))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.read_mail()
            self.core.turn()

    def finish(self, most: int = 10_000) -> None:
        """Turn until nothing is open."""
        for _ in range(most):
            self.turn()
            if not self.core.has_work:
                return
        raise AssertionError(f"still open after {most} turns: {list(self.core.jobs)}")

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        """Tokens delivered to a choice so far."""
        return [i for e in self.events[request_id] if isinstance(e, Delta) and e.index == index for i in e.ids]

    def end(self, request_id: str) -> Finished | Failed:
        """The request's last event, after which and before which there is no other such."""
        ends = [e for e in self.events[request_id] if isinstance(e, Finished | Failed)]
        assert len(ends) == 1
        assert self.events[request_id][-1] is ends[0]
        return ends[0]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A running engine over a tiny llama."""
    with tiny_engine() as running:
        yield running
