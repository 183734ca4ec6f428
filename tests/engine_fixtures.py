"""An engine over a tiny random model, for tests of whatever stands on an engine."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx import nn
from mlx.utils import tree_flatten

import tiny_models
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import CacheConfig, EngineConfig, KvScheme, SpeculationConfig
from gnomon.engine import admission
from gnomon.engine.api import Delta, Event, Failed, Finished, ModelInfo, Replayed, Request, Usage
from gnomon.engine.budget import Budget
from gnomon.engine.coding import coding_for
from gnomon.engine.core import Core, Served, Shared
from gnomon.engine.counters import Counters
from gnomon.engine.engine import Engine
from gnomon.engine.heart import Heart
from gnomon.engine.mailbox import Cancel, Mailbox, Submit
from gnomon.engine.paging import pages_for
from gnomon.engine.resume import Store, claim
from gnomon.engine.row import Job
from gnomon.engine.settings import Host, Settings
from gnomon.engine.speculation import ProposerFactory, Speculation
from gnomon.grammar import Compiler, Vocabulary
from gnomon.models.bindings import bind
from gnomon.models.load import LoadedModel

EOS_ID = tiny_models.EOS_ID
VOCAB_SIZE = tiny_models.VOCAB_SIZE
CONTEXT = 2048
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "qwen3_5": {"full_attention_interval": 2},
    "gemma3": {"sliding_window_pattern": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
    "deepseek_v3": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "mamba2": {"num_hidden_layers": 2},
}
"""Fewer layers than `tiny_models` has, but still every kind of them: engine tests take thousands of steps."""


@cache
def tiny_model(model_type: str, dtype: str = "float32") -> nn.Module:
    return tiny_models.make(model_type, dtype, **SMALLER.get(model_type, {}))


@cache
def tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        tiny_models.tokenizer().save(f"{directory}/tokenizer.json")
        settings = {"eos_token": tiny_models.EOS, "chat_template": tiny_models.CHAT_TEMPLATE}
        Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer.load(directory)


@cache
def tiny_compiler() -> Compiler:
    return Compiler(Vocabulary(tiny_tokenizer(), {EOS_ID}))


@cache
def tiny_path(model_type: str) -> Path:
    """A directory that stands for that of a tiny model's files: what it holds tells models apart."""
    path = Path(tempfile.mkdtemp()) / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny_models.config(model_type)))
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return path


def tiny_loaded(model_type: str = "llama", dtype: str = "float32", model: nn.Module | None = None) -> LoadedModel:
    """What loading a tiny model gives; the default one is shared by all tests of a process."""
    built = model or tiny_model(model_type, dtype)
    return LoadedModel(
        model=built,
        config=tiny_models.config(model_type),
        path=tiny_path(model_type),
        model_type=model_type,
        context_length=CONTEXT,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
        weight_bytes=sum(value.nbytes for _, value in tree_flatten(built.parameters())),
        generation_config={},
        binding=bind(built),
    )


@contextmanager
def tiny_engine(
    model_type: str = "llama",
    config: EngineConfig | None = None,
    *,
    load: Callable[[], LoadedModel] | None = None,
    propose: ProposerFactory | None = None,
    on_failure: Callable[[str], None] | None = None,
    saves: Store | None = None,
    kv: KvScheme | None = None,
    cache: CacheConfig | None = None,
    speculation: SpeculationConfig | None = None,
    load_draft: Callable[[], LoadedModel] | None = None,
) -> Iterator[Engine]:
    """A running engine; its model is the tiny one of that type unless `load` gives another."""
    engine = Engine(
        load or (lambda: tiny_loaded(model_type)),
        tiny_tokenizer(),
        Settings(
            config or EngineConfig(),
            kv=kv or KvScheme(),
            cache=cache or CacheConfig(),
            speculation=speculation or SpeculationConfig(),
            model_id=f"tiny-{model_type}",
        ),
        Host(propose=propose, on_failure=on_failure, saves=saves),
        load_draft=load_draft,
    )
    try:
        engine.wait(300)
        yield engine
    finally:
        engine.stop()


class Rig:
    """The engine's core without its thread, turned by hand, so that joins, leaves and faults happen at chosen steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        propose: ProposerFactory | None = None,
        budget: Budget | None = None,
        cache: CacheConfig | None = None,
        operations: str = "stock",
        saves: Store | None = None,
        speculation: Speculation | None = None,
        kv: KvScheme | None = None,
    ) -> None:
        self.saves = saves
        self.events: dict[str, list[Event]] = {}
        self.closed: list[str] = []
        self.mailbox = Mailbox()
        self.counters = Counters()
        if propose is not None:
            alone = SpeculationConfig(grammar_jump=False)
            speculation = Speculation(alone, vocab_size=loaded.vocab_size, extra=propose)
        coding = None if kv is None else coding_for(loaded, kv)
        pages = None if kv is None else pages_for(loaded, kv, coding)
        self.core = Core(
            Served(loaded, tiny_tokenizer(), budget or Budget(None, None, 0), coding, operations, pages),
            Settings(config or EngineConfig(), cache=cache or CacheConfig()),
            Host(saves=saves),
            Shared(self.mailbox, self.counters, Heart(1000), lambda job: self.closed.append(job.request.id)),
            speculation,
        )
        self.loaded = loaded

    def submit(self, request: Request, seed: int = 0) -> Job:
        model = ModelInfo("tiny", "", "tiny", self.loaded.context_length, self.loaded.vocab_size, (EOS_ID,), 0, 0)
        events = self.events[request.id] = []
        limit = admission.token_limit(request, model, None)
        grammar = None if request.constraint is None else tiny_compiler().compile(request.constraint)
        slot, record = None, None
        if self.saves is not None:
            request, slot, record = claim(self.saves, request, "tiny", tiny_tokenizer(), model.vocab_size, grammar)
        if request.sampling.seed is not None:
            seed = request.sampling.seed
        elif record is not None:
            seed = record.seed
        job = Job(request, events.append, limit, seed, grammar, slot=slot, record=record)
        self.mailbox.post(Submit(job))
        return job

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        self.mailbox.post(Cancel(request_id, answered))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.read_mail(1.0 if self.core.is_waiting else 0.0)
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
        return [i for e in self.deltas(request_id) if e.index == index for i in e.ids]

    def deltas(self, request_id: str) -> list[Delta]:
        """Deltas so far, replayed ones among them."""
        found: list[Delta] = []
        for event in self.events[request_id]:
            found += event.deltas if isinstance(event, Replayed) else [event] if isinstance(event, Delta) else []
        return found

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


def ask(rig: Rig, name: str, prompt: tuple[int, ...], tokens: int = 4, **how: Any) -> list[int]:
    """Run a request to its end; its tokens."""
    rig.submit(Request(name, prompt, max_tokens=tokens, ignore_eos=True, **how))
    rig.finish()
    return rig.ids(name)


def usage(rig: Rig, name: str) -> Usage:
    """What a request that ended well used."""
    end = rig.end(name)
    assert isinstance(end, Finished)
    return end.usage
