"""A draft model beside the model: whether they fit, and what the engine lends the drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import SpeculationConfig
from gnomon.engine.costs import assumed_curve, correct, curve_of
from gnomon.engine.reuse import Reuse
from gnomon.engine.row import Row
from gnomon.engine.runner import Runner
from gnomon.engine.sampling import BatchSampler
from gnomon.engine.speculation import ProposerFactory, Speculation
from gnomon.models.load import LoadedModel, UnsupportedModel
from gnomon.propose import Text
from gnomon.propose.two_model import Draw, TwoModel
from gnomon.state.batch_state import BatchState

log = logging.getLogger(__name__)


class DraftMismatch(ValueError):
    """A draft model that can't draft for the model; the message names the difference."""


def check_tokenizers(own: Tokenizer, draft: Tokenizer) -> None:
    """Raise `DraftMismatch` unless every id means the same to both."""
    if own.vocab_size != draft.vocab_size:
        raise DraftMismatch(
            f"the draft model's tokenizer has {draft.vocab_size} ids, the model's has {own.vocab_size}: it must be the same"
        )
    for token in range(own.vocab_size):
        mine, theirs = own.piece(token), draft.piece(token)
        if mine != theirs:
            raise DraftMismatch(
                f"the draft model's tokenizer is another: id {token} is {theirs!r} there and {mine!r} in the model's"
            )


def check_draft(draft: LoadedModel) -> None:
    """Raise `DraftMismatch` for a draft model that can't follow rows of different lengths."""
    if not (draft.binding.batchable and draft.binding.pad_safe):
        raise DraftMismatch(
            f"a draft model must take ragged batches, {draft.model_type} models don't: "
            f"{draft.binding.why_not or 'padding disturbs them'}"
        )


def open_speculation(
    config: SpeculationConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    *,
    runner_of: Callable[[LoadedModel], Runner],
    kernels: str,
    reuse: Callable[[], Reuse],
    measurements: Path | None,
    extra: ProposerFactory | None = None,
) -> Speculation | None:
    """What guesses for a model's rows; None if nothing may. Costs are measured for what was asked for, unless the depth is pinned; where
    only what grammars force may be proposed, which is nearly always right, they are assumed.

    `kernels` names what runs, `reuse` gives the engine's once it is there. Raises `UnsupportedModel` for a model that takes no windows.
    """
    wanted = config.enabled or extra is not None
    if not wanted and not config.grammar_jump:
        return None
    if not loaded.binding.window_safe:
        if not wanted:
            log.info("a window of several tokens disturbs %s models: forced text isn't proposed", loaded.model_type)
            return None
        raise UnsupportedModel(
            f"a window of several tokens disturbs {loaded.model_type} models, so nothing can be guessed for them"
        )
    curve, draft_curve, keep = None, None, None
    if config.enabled and config.num_draft_tokens is None:
        runner = runner_of(loaded)
        rows = runner.config.batch
        curve = curve_of(runner, name=kernels, most_rows=rows, cache=measurements)
        keep = partial(correct, loaded, name=kernels, cache=measurements)
        if draft is not None:
            draft_curve = curve_of(runner_of(draft), name=kernels, most_rows=rows, cache=measurements, widths=())
    elif not wanted and config.num_draft_tokens is None:
        curve = assumed_curve(runner_of(loaded).config.batch, name=kernels)
    proposer = None
    if draft is not None:
        runner = runner_of(draft)
        proposer = TwoModel(
            draft.model,
            runner.new_state,
            vocab_size=loaded.vocab_size,
            chunk=runner.config.prefill_chunk,
            draws=draws,
            cost=_nothing if draft_curve is None else draft_curve.step,
            memory=DraftMemory(runner, reuse),
            context=draft.context_length,
        )
    return Speculation(config, vocab_size=loaded.vocab_size, draft=proposer, curve=curve, extra=extra, keep=keep)


def _nothing(num_rows: int) -> float:  # noqa: ARG001  (costs don't matter where the depth is pinned)
    return 0.0


def draws(rows: Sequence[Text]) -> Draw:
    """Draws as the rows' own samplers would, with the same randomness: where both models agree on the scores they agree on the token."""
    own = [row for row in rows if isinstance(row, Row)]
    if all(row.job.request.sampling.greedy and not row.has_processors for row in own):
        return lambda logits: mx.argmax(logits, axis=-1).astype(mx.int32)
    sampler = BatchSampler([row.sampling() for row in own])

    def draw(logits: mx.array) -> mx.array:
        tokens = sampler.draw(logits).tokens
        sampler.commit(tokens, [1] * len(own))
        return tokens

    return draw


class DraftMemory:
    """The draft model's states in the engine's own prefix cache, under their own identity and the same budget."""

    def __init__(self, runner: Runner, reuse: Callable[[], Reuse]) -> None:
        self.runner = runner
        self.reuse = reuse

    def lend(self, row: Text) -> BatchState | None:
        snapshot = self.reuse().lend_companion(self.runner, row.namespace, [*row.prompt, *row.tokens])
        return None if snapshot is None else self.runner.restored(snapshot)

    def keep(self, row: Text, length: int, state: BatchState, b: int) -> None:
        tokens = [*row.prompt, *row.tokens][:length]
        self.reuse().publish_companion(self.runner, row.namespace, tokens, state, b)
