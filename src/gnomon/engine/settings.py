"""What an engine is told at its start: settings, and what the process around it lends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.config import CacheConfig, EngineConfig, KernelConfig, KvScheme, SpeculationConfig
from gnomon.engine.ranks.link import Ranks
from gnomon.engine.resume import Store
from gnomon.engine.speculation import ProposerFactory
from gnomon.state.batch_state import BatchState
from gnomon.trace import OFF, Tracer


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's settings, by group. Alone they mean stock operations, plain keys and values, and no directory that is written to.

    `model_id` is what clients call the model, its directory's name unless told. Measured costs of steps are kept in `measurements`.
    `speculation.draft_model` is a directory here.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    kernels: KernelConfig = field(default_factory=lambda: KernelConfig(kernels="stock"))
    kv: KvScheme = field(default_factory=KvScheme)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    model_id: str | None = None
    measurements: Path | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """What the process around an engine lends it.

    `on_failure` is called from the engine's thread, once, after every open request has heard `Failed`, when the engine can't go on: the
    process should then exit non-zero. Running generations are kept in `saves`, which the engine closes at its end. `prime` may fill the
    fresh state of a prompt before its prefill, and `propose` adds a proposer to each choice; both are called on the engine's thread.
    `ranks` are the processes that the model is split over.
    """

    on_failure: Callable[[str], None] | None = None
    tracer: Tracer = OFF
    saves: Store | None = None
    prime: Callable[[BatchState], None] | None = None
    propose: ProposerFactory | None = None
    ranks: Ranks | None = None
