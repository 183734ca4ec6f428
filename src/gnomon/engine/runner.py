"""What can be computed with the loaded model: windows of prompts, steps, and one row apart from the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from gnomon.config import EngineConfig
from gnomon.engine.batch import Batch
from gnomon.engine.counters import Counters
from gnomon.engine.heart import Heart
from gnomon.engine.prefill import Prefill
from gnomon.engine.row import Row
from gnomon.engine.speculation import MAX_PROPOSALS, Speculation
from gnomon.engine.step import Stepper
from gnomon.engine.workspace import workspace_of
from gnomon.models.load import LoadedModel
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Coding
from gnomon.state.paged.pool import PAGE, PagePool
from gnomon.state.paged.table import num_pages
from gnomon.state.snapshot import RowSnapshot


class PagesLost(RuntimeError):
    """The pages that all rows share can't be computed any more."""


class DeviceFailed(RuntimeError):
    """Not even one token through a fresh state can be computed."""


def forked(state: BatchState, row: int) -> BatchState:
    """A copy of one row that is computed: a lazy one would make the next append copy the buffers it still needs."""
    copy = state.fork(row)
    mx.eval(copy.arrays())
    return copy


class Runner:
    """Makes states, prefills and steppers over one model. `prime` may fill the fresh state of a prompt before its prefill; `coding` is
    how states hold keys and values, `pages` where, if not in buffers of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        counters: Counters,
        heart: Heart,
        prime: Callable[[BatchState], None] | None = None,
        coding: Coding | None = None,
        pages: PagePool | None = None,
    ) -> None:
        self.loaded = loaded
        self.config = config
        self.counters = counters
        self.heart = heart
        self.prime = prime
        self.coding = coding
        self.pages = pages
        self.workspace = workspace_of(loaded, coding)

    def new_state(self) -> BatchState:
        binding = self.loaded.binding
        return BatchState(
            self.loaded.model,
            binding.make_caches(),
            pad_safe=binding.pad_safe,
            slack=MAX_PROPOSALS,
            mask_ndim=binding.mask_ndim,
            coding=self.coding,
            pages=self.pages,
        )

    def restored(self, snapshot: RowSnapshot) -> BatchState:
        """A state with a snapshot's bits."""
        binding = self.loaded.binding
        return BatchState.restore(
            self.loaded.model,
            binding.make_caches(),
            snapshot,
            pad_safe=binding.pad_safe,
            slack=MAX_PROPOSALS,
            mask_ndim=binding.mask_ndim,
            coding=self.coding,
            pages=self.pages,
        )

    def new_prefill(
        self,
        prompts: Sequence[Sequence[int]],
        held: Sequence[BatchState | None] | None = None,
        stops: Sequence[int] = (),
    ) -> Prefill:
        """A prefill of these prompts. `held` are the states that exist already of their beginnings; they are used up."""
        held = held or [None] * len(prompts)
        starts = [0 if one is None else one.lengths[0] for one in held]
        states = [self._new_primed() if one is None else one for one in held]
        if self.pages is not None:
            # In one go: each growth copies all there is.
            self.pages.reserve(sum(num_pages(len(p)) - start // PAGE for p, start in zip(prompts, starts, strict=True)))
        chunk = self.config.prefill_chunk
        if len(prompts) == 1:
            chunk = self.workspace.chunk(chunk, len(prompts[0]))
        return Prefill(self.loaded.model, states, prompts, chunk, starts, stops)

    def new_stepper(self, batch: Batch, speculation: Speculation | None = None) -> Stepper:
        loaded = self.loaded
        return Stepper(
            loaded.model,
            batch,
            self.config,
            self.counters,
            pad_safe=loaded.binding.pad_safe,
            speculation=speculation,
        )

    def run_window(self, prefill: Prefill) -> None:
        """Advance a prefill by a window, if any is left."""
        if prefill.finished:
            return
        tokens, begun = prefill.num_tokens, time.perf_counter()
        self.heart.beat(f"prefilling {tokens} tokens", tokens)
        prefill.advance()
        self.counters.prefill.add(tokens, time.perf_counter() - begun)
        self.counters.prefill_chunks += 1

    def prefill_alone(self, tokens: Sequence[int]) -> Prefill:
        """A finished prefill of these tokens."""
        prefill = self.new_prefill([tokens])
        while not prefill.finished:
            self.run_window(prefill)
        return prefill

    def step_alone(self, row: Row) -> BatchState:
        """The row's state after a prefill of all its tokens and one step in a batch of its own, which delivers the next token."""
        prefill = self.prefill_alone([*row.job.prompt, *row.tokens])
        batch = Batch()
        batch.join([row], prefill.state)
        stepper = self.new_stepper(batch)
        stepper.step()
        stepper.land()
        return prefill.state

    def mend(self) -> None:
        """After a failure: see that the pages are what they should be. Raises `PagesLost` if they can't be, and are empty now."""
        if self.pages is not None and not self.pages.recover():
            raise PagesLost("a failure took the pages of all requests with it")

    def probe(self) -> None:
        """Run one token through a fresh state. Raises `DeviceFailed`."""
        try:
            state = self.new_state()
            state.begin(1)
            logits = self.loaded.model(mx.array([[0]], dtype=mx.int32), cache=state.caches)
            state.commit()
            mx.eval(logits)
        except Exception as error:
            raise DeviceFailed(f"the device failed: {error}") from error

    def _new_primed(self) -> BatchState:
        state = self.new_state()
        if self.prime is not None:
            self.prime(state)
        return state
