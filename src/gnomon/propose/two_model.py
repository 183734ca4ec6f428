"""A smaller model that drafts for a larger one (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import mlx.core as mx
from mlx import nn

from gnomon.kernels import dispatch
from gnomon.propose.proposer import Text
from gnomon.state.batch_state import BatchState

CATCH_UP = 32
"""Tokens a row may be behind and still be fed together with the others; one that lags more catches up alone, a chunk per step."""

Draw = Callable[[mx.array], mx.array]
"""From logits [B, 1, V] at the rows' next output step to tokens int32 [B, 1]; the next call draws the step after."""


class Memory(Protocol):
    """Where states of prefixes are kept between requests."""

    def lend(self, row: Text) -> BatchState | None:
        """The state of the longest beginning of the row's text that is held, shorter than the text."""
        ...

    def keep(self, row: Text, length: int, state: BatchState, b: int) -> None:
        """Take a copy of the state of the first `length` tokens of the row's text, row `b` of `state`."""
        ...


@dataclass(eq=False, slots=True)
class _Drafted:
    """A row here. `seen` are the tokens its state holds, drafts that were wrong included until the next call; the first `settled` of them
    are known to be the row's own. `alone` holds the state until it has caught up and joins the others."""

    row: Text
    seen: list[int]
    settled: int = 0
    alone: BatchState | None = None
    missing: list[int] = field(default_factory=list[int])


class TwoModel:
    """Drafts with a smaller model, whose state follows the rows by their texts alone: tokens that it has not seen, however they were made,
    are fed before the next draft.

    Drafts are written on into the state and taken off again once the rows' texts tell which were wrong. Where states can't be trimmed
    (sliding windows, recurrent layers) they are written into a copy instead, and the state only ever holds the rows' own tokens.
    """

    source = "two-model"
    prior = 0.6

    def __init__(
        self,
        model: nn.Module,
        new_state: Callable[[], BatchState],
        *,
        vocab_size: int,
        chunk: int,
        draws: Callable[[Sequence[Text]], Draw],
        cost: Callable[[int], float],
        memory: Memory | None = None,
        context: int | None = None,
    ) -> None:
        """`draws` makes the function that draws for these rows, `cost` gives the seconds of a step of so many; `vocab_size` is the
        target's: ids beyond it end a draft. Rows longer than `context` get none.
        """
        self.trims = new_state().can_trim
        self.model = model
        self.new_state = new_state
        self.vocab_size = vocab_size
        self.chunk = chunk
        self.draws = draws
        self.cost = cost
        self.memory = memory
        self.context = context
        self.known: dict[Text, _Drafted] = {}
        self.together: list[_Drafted] = []
        """Those in `state`, in its order."""
        self.state: BatchState | None = None

    def propose(self, rows: Sequence[Text], limits: Sequence[int]) -> list[Sequence[int]]:
        within = [row for row in rows if self.context is None or len(row.prompt) + len(row.tokens) < self.context]
        for row in within:
            self._follow(row)
        self._settle()
        for row in within:
            self._catch_up(self.known[row])
        asked = {self.known[row]: limit for row, limit in zip(rows, limits, strict=True) if row in within}
        ready = {one: asked[one] for one in self.together if asked.get(one, 0) > 0 and one.missing}
        found = self._draft(ready) if ready else {}
        return [found.get(self.known[row], ()) if row in within else () for row in rows]

    def leave(self, row: Text) -> None:
        one = self.known.pop(row, None)
        if one is None:
            return
        self._compare(one)
        if one.alone is not None:
            self._remember(one, one.alone, 0)
            return
        state, b = self.state, self.together.index(one)
        if state is not None:
            self._remember(one, state, b)
            self._drop(b)

    def clear(self) -> None:
        self.known, self.together, self.state = {}, [], None

    def nbytes(self) -> int:
        """Bytes of all states."""
        alone = [one.alone for one in self.known.values()]
        return sum(state.nbytes() for state in (self.state, *alone) if state is not None)

    # Following the rows

    def _follow(self, row: Text) -> None:
        """Know the row, and what of its text its state lacks."""
        one = self.known.get(row)
        if one is None:
            state = self.memory.lend(row) if self.memory is not None else None
            length = 0 if state is None else state.lengths[0]
            one = _Drafted(row, _text(row, 0)[:length], length, state or self.new_state())
            self.known[row] = one
        self._compare(one)
        one.missing = _text(row, one.settled)

    def _compare(self, one: _Drafted) -> None:
        """Find how much of `seen` is the row's own text, of which the last token is never counted."""
        if not self.trims:
            return
        new = _text(one.row, one.settled)
        same = 0
        for mine, own in zip(one.seen[one.settled :], new[:-1], strict=False):
            if mine != own:
                break
            same += 1
        one.settled += same

    def _settle(self) -> None:
        """Take off the shared state what turned out not to be its rows' own; rows that lag leave it."""
        state = self.state
        if state is None:
            return
        for one in self.together:
            self._compare(one)
        if self.trims:
            state.trim([len(one.seen) - one.settled for one in self.together])
        for one in self.together:
            del one.seen[one.settled :]
        for one in [one for one in self.together if len(one.missing) > CATCH_UP]:
            b = self.together.index(one)
            one.alone = state.fork(b)
            mx.eval(one.alone.arrays())
            self._drop(b)

    def _catch_up(self, one: _Drafted) -> None:
        """Feed a row that is alone a chunk of what it lacks; once little is left, let it join the others."""
        state = one.alone
        if state is None:
            return
        if len(one.missing) > CATCH_UP:
            tokens = one.missing[: min(self.chunk, len(one.missing) - 1)]
            with dispatch.step():
                state.begin(len(tokens))
                self.model(mx.array([tokens], dtype=mx.int32), cache=state.caches)
                state.commit()
            mx.eval(state.arrays())
            one.seen += tokens
            one.settled += len(tokens)
            one.missing = one.missing[len(tokens) :]
            if len(one.missing) == 1:
                self._remember(one, state, 0)
        if len(one.missing) <= CATCH_UP:
            one.alone = None
            if self.state is None:
                self.state = state
            else:
                self.state.join(state)
            self.together.append(one)

    def _drop(self, b: int) -> None:
        """Row `b` leaves the shared state."""
        state = self.state
        if state is None or len(self.together) == 1:
            self.state, self.together = None, []
            return
        order = state.order_without([b])
        state.keep(order)
        self.together = [self.together[i] for i in order]

    def _remember(self, one: _Drafted, state: BatchState, b: int) -> None:
        if self.memory is not None and one.settled:
            self.memory.keep(one.row, one.settled, state, b)

    # Drafting

    def _draft(self, ready: dict[_Drafted, int]) -> dict[_Drafted, Sequence[int]]:
        """Up to so many tokens for each of these rows of the shared state; all of their forwards are computed at once at the end."""
        state, together = self.state, self.together
        if state is None:
            return {}
        places = [b for b, one in enumerate(together) if one in ready]
        asked = [together[b] for b in places]
        draw = self.draws([one.row for one in asked])
        counts = [len(one.missing) if one in ready else 0 for one in together]
        width = max(counts)
        window = mx.array(
            [[*(one.missing if n else ()), *[0] * (width - n)] for one, n in zip(together, counts, strict=True)],
            dtype=mx.int32,
        )
        with dispatch.step():
            state.begin(width, counts)
            logits = self.model(window, cache=state.caches)
            state.commit()
            last = mx.array([max(0, n - 1) for n in counts], dtype=mx.int32)
            logits = logits[mx.arange(len(together)), last][:, None]
            drawn = [draw(_rows(logits, places, len(together)))]
            most = max(ready.values())
            ahead, rows = (state, together) if self.trims or most == 1 else (_copies(state, places), asked)
            inside = [b for b, one in enumerate(rows) if one in ready]
            for step in range(1, most):
                counts = [int(ready.get(one, 0) > step) for one in rows]
                tokens = _spread(drawn[-1], inside, len(rows))
                ahead.begin(1, counts)
                logits = self.model(tokens, cache=ahead.caches)
                ahead.commit()
                drawn.append(draw(_rows(logits, inside, len(rows))))
                mx.async_eval(drawn[-1])
        drafts = cast("list[list[int]]", mx.concatenate(drawn, axis=1).tolist())
        found: dict[_Drafted, Sequence[int]] = {}
        for one, draft in zip(asked, drafts, strict=True):
            limit = ready[one]
            if self.trims:
                one.seen += [*one.missing, *draft[: limit - 1]]
                one.settled += len(one.missing) - 1
            else:
                one.seen += one.missing
                one.settled += len(one.missing)
            found[one] = _known(draft[:limit], self.vocab_size)
        return found


def _text(row: Text, start: int) -> list[int]:
    """The row's tokens from position `start` on."""
    prompt, tokens = row.prompt, row.tokens
    if start >= len(prompt):
        return list(tokens[start - len(prompt) :])
    return [*prompt[start:], *tokens]


def _known(draft: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The draft up to a token that the target doesn't have."""
    end = next((i for i, token in enumerate(draft) if token >= vocab_size), len(draft))
    return draft[:end]


def _copies(state: BatchState, places: Sequence[int]) -> BatchState:
    """A state of copies of some rows, in that order."""
    made, *others = [state.fork(b) for b in places]
    for other in others:
        made.join(other)
    return made


def _rows(array: mx.array, places: Sequence[int], total: int) -> mx.array:
    return array if len(places) == total else array[mx.array(list(places), dtype=mx.int32)]


def _spread(tokens: mx.array, places: Sequence[int], total: int) -> mx.array:
    """Tokens [n, 1] of some rows as [total, 1], zero for the others."""
    if len(places) == total:
        return tokens
    whole = mx.zeros((total, 1), dtype=tokens.dtype)
    whole[mx.array(list(places), dtype=mx.int32)] = tokens
    return whole
