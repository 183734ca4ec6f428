"""Cores that guess: prompt lookup, a draft model, or both, over tiny models."""

from __future__ import annotations

from engine_fixtures import Rig
from gnomon.config import EngineConfig, KvScheme, SpeculationConfig
from gnomon.engine.counters import Counters
from gnomon.engine.drafting import open_speculation
from gnomon.engine.heart import Heart
from gnomon.engine.runner import Runner
from gnomon.engine.speculation import Speculation
from gnomon.models.load import LoadedModel
from gnomon.propose import Curve, Pace

FREE = Curve({1: 1.0}, {1: {2: 1.0, 17: 1.0}})
"""Windows cost what plain steps cost."""
DEAR = Curve({1: 1.0}, {1: {2: 50.0, 17: 50.0}})
"""No window ever pays."""


class Fixed(Pace):
    """Costs are what the curve says, whatever steps take here."""

    def rests(self, num_rows: int) -> bool:
        return False

    def may_try(self, num_rows: int) -> bool:
        return False

    def stepped(self, num_rows: int, seconds: float, settled: bool = True) -> None:
        self._of(num_rows)

    def windowed(self, num_rows: int, guesses: int, seconds: float, tokens: int, is_try: bool = False) -> None:
        self._of(num_rows)


def rig_of(
    loaded: LoadedModel,
    config: SpeculationConfig,
    engine: EngineConfig | None = None,
    *,
    draft: LoadedModel | None = None,
    curve: Curve | None = None,
    kv: KvScheme | None = None,
) -> Rig:
    """A core turned by hand. `curve` None without a pinned depth tries every guess whole."""
    engine = engine or EngineConfig()
    rigs: list[Rig] = []
    pinned = config if config.num_draft_tokens is not None else None
    opened = open_speculation(
        pinned or SpeculationConfig(config.draft_model, config.draft_kind, 1, config.ngram_max, config.ngram_min),
        loaded,
        draft,
        runner_of=lambda model: Runner(model, engine, Counters(), Heart(1000)),
        kernels="stock",
        reuse=lambda: rigs[0].core.reuse,
        measurements=None,
    )
    assert opened is not None
    speculation = Speculation(config, vocab_size=loaded.vocab_size, draft=opened.draft, curve=curve)
    if speculation.pace is not None and curve is not None:
        speculation.pace = Fixed(curve)
    rigs.append(Rig(loaded, engine, speculation=speculation, kv=kv))
    return rigs[0]
