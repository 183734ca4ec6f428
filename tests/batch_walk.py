"""A batch that follows fixed texts through random windows, roll-backs, joins and leaves, compared with mlx-lm's solo runs at each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState
from tiny_models import VOCAB_SIZE

CHUNK = 64


@dataclass
class Step:
    """A window: its width, and for each row (by index, repeating) how much of it is real and how much is taken back, in sixteenths."""

    width: int
    real: list[int]
    back: list[int]


@dataclass
class Join:
    """A new row with a prompt of `length` tokens."""

    length: int


@dataclass
class JoinTogether:
    """New rows with prompts of these lengths, prefilled in one batch, padded to the longest; one by one where padding does harm."""

    lengths: list[int]


@dataclass
class Leave:
    row: int
    cheaply: bool


@dataclass
class Fork:
    """A copy of a row joins; `restored` takes the way over a snapshot."""

    row: int
    restored: bool


Action = Step | Join | JoinTogether | Leave | Fork

_sixteenths = st.lists(st.integers(0, 16), min_size=3, max_size=8)
steps = st.builds(Step, st.sampled_from([1, 1, 2, 5, 17]), _sixteenths, _sixteenths)
actions: st.SearchStrategy[Action] = st.one_of(
    steps,
    steps,
    st.builds(Join, st.integers(1, 150)),
    st.builds(JoinTogether, st.lists(st.integers(1, 150), min_size=2, max_size=3)),
    st.builds(Leave, st.integers(0, 7), st.booleans()),
    st.builds(Fork, st.integers(0, 7), st.booleans()),
)


class Solos:
    """Random texts and the logits mlx-lm gives after each of their tokens, read alone in chunks."""

    def __init__(self, model: nn.Module, count: int = 3, length: int = 256) -> None:
        self.texts = np.random.default_rng(7).integers(3, VOCAB_SIZE, (count, length)).tolist()
        self.logits = [_solo(model, text) for text in self.texts]
        self.scale = max(float(np.abs(x).max()) for x in self.logits)

    def gap_of_single_steps(self, model: nn.Module) -> float:
        """Largest gap of a token that mlx-lm itself decides otherwise when it reads the same texts one token at a time."""
        tally = Tally()
        for text, logits in zip(self.texts, self.logits, strict=True):
            tally.add(_solo(model, text, chunk=1), logits)
        return tally.gap


def _solo(model: nn.Module, text: Sequence[int], chunk: int = CHUNK) -> np.ndarray:
    caches, logits = make_prompt_cache(model), []
    for start in range(0, len(text), chunk):
        logits.append(model(mx.array([text[start : start + chunk]]), cache=caches)[0].astype(mx.float32))
        mx.eval(logits, [cache.state for cache in caches])
    return np.concatenate([np.array(x) for x in logits])


@dataclass
class Tally:
    """What a comparison found: the largest difference of a logit, tokens compared, argmaxes that differ and the largest gap among those."""

    difference: float = 0.0
    compared: int = 0
    differing: int = 0
    gap: float = 0.0

    def add(self, got: np.ndarray, want: np.ndarray) -> None:
        assert np.isfinite(got).all()
        self.difference = max(self.difference, float(np.abs(got - want).max()))
        self.compared += len(got)
        for mine, theirs in zip(got, want, strict=True):
            if mine.argmax() != theirs.argmax():
                top = np.sort(theirs)[-2:]
                self.differing += 1
                self.gap = max(self.gap, float(top[1] - top[0]))


@dataclass
class Row:
    text: int
    length: int


def new_state_of(model: nn.Module) -> Callable[[], BatchState]:
    binding = bind(model)
    return lambda: BatchState(model, binding.make_caches(), pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim)


@dataclass
class Walk:
    """The batch, and for each row the text it follows and how far it is."""

    model: nn.Module
    solos: Solos
    new_state: Callable[[], BatchState]
    tally: Tally = field(default_factory=Tally)
    rows: list[Row] = field(default_factory=list)
    state: BatchState | None = None
    num_texts: int = 0

    def run(self, actions: Sequence[Action], max_rows: int = 8) -> None:
        for action in actions:
            if isinstance(action, Step):
                self.step(action)
            elif isinstance(action, Join) and len(self.rows) < max_rows:
                self.join(action.length)
            elif isinstance(action, JoinTogether) and len(self.rows) + len(action.lengths) <= max_rows:
                self.join_together(action.lengths)
            elif isinstance(action, Leave) and len(self.rows) > 1:
                self.leave(action.row % len(self.rows), action.cheaply)
            elif isinstance(action, Fork) and len(self.rows) < max_rows:
                self.fork(action.row % len(self.rows), action.restored)

    def forward(self, state: BatchState, window: list[list[int]], counts: list[int] | None = None) -> np.ndarray:
        state.begin(len(window[0]), counts)
        logits = self.model(mx.array(window), cache=state.caches)
        state.commit()
        mx.eval(logits, state.arrays())
        state.check_integrity()
        return np.array(logits.astype(mx.float32))

    def join(self, length: int) -> None:
        text, own = self.num_texts % len(self.solos.texts), self.new_state()
        self.num_texts += 1
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            logits = self.forward(own, [self.solos.texts[text][start:end]])
            self.tally.add(logits[0], self.solos.logits[text][start:end])
        self._add(own, Row(text, length))

    def join_together(self, lengths: list[int]) -> None:
        batch = self.new_state()
        if not batch.pad_safe:
            for length in lengths:
                self.join(length)
            return
        for _ in lengths[1:]:
            batch.join(self.new_state())
        texts = [(self.num_texts + i) % len(self.solos.texts) for i in range(len(lengths))]
        self.num_texts += len(lengths)
        for start in range(0, max(lengths), CHUNK):
            width = min(CHUNK, max(lengths) - start)
            counts = [max(0, min(width, length - start)) for length in lengths]
            window = [
                self.solos.texts[text][start : start + count] + [5] * (width - count)
                for text, count in zip(texts, counts, strict=True)
            ]
            logits = self.forward(batch, window, counts)
            for i, (text, count) in enumerate(zip(texts, counts, strict=True)):
                if count:
                    self.tally.add(logits[i, :count], self.solos.logits[text][start : start + count])
        self.rows += [Row(text, length) for text, length in zip(texts, lengths, strict=True)]
        if self.state is None:
            self.state = batch
        else:
            self.state.join(batch)
            self.state.check_integrity()

    def leave(self, row: int, cheaply: bool) -> None:
        assert self.state is not None
        staying = [i for i in range(len(self.rows)) if i != row]
        order = self.state.order_without({row}) if cheaply else staying[::-1]
        assert sorted(order) == staying
        self.state.keep(order)
        self.rows = [self.rows[i] for i in order]
        self.state.check_integrity()

    def fork(self, row: int, restored: bool) -> None:
        assert self.state is not None
        if restored:
            snapshot = self.state.snapshot(row)
            mx.eval(snapshot.arrays())
            own = BatchState.restore(
                self.model,
                self.state.templates,
                snapshot,
                pad_safe=self.state.pad_safe,
                mask_ndim=self.state.mask_ndim,
            )
        else:
            own = self.state.fork(row)
        mx.eval(own.arrays())
        self._add(own, Row(self.rows[row].text, self.rows[row].length))

    def step(self, step: Step) -> None:
        assert self.state is not None
        self._retire(step.width)
        if not self.rows:
            return
        width = step.width
        even = len(self.rows) == 1 or not self.state.pad_safe
        counts = [width if even else width * step.real[i % len(step.real)] // 16 for i in range(len(self.rows))]
        back = [count * step.back[i % len(step.back)] // 16 for i, count in enumerate(counts)]
        window: list[list[int]] = []
        for row, count, undone in zip(self.rows, counts, back, strict=True):
            text = self.solos.texts[row.text]
            kept = text[row.length : row.length + count - undone]
            wrong = [(token + 1) % VOCAB_SIZE for token in text[row.length + count - undone : row.length + count]]
            window.append(kept + wrong + [5] * (width - count))
        logits = self.forward(self.state, window, counts)
        self.state.rollback(back)
        mx.eval(self.state.arrays())
        self.state.check_integrity()
        for i, row in enumerate(self.rows):
            kept = counts[i] - back[i]
            if kept:
                self.tally.add(logits[i, :kept], self.solos.logits[row.text][row.length : row.length + kept])
            row.length += kept
        assert self.state.lengths == [row.length for row in self.rows]

    def _retire(self, width: int) -> None:
        """Rows whose text would end within the window go."""
        assert self.state is not None
        over = {i for i, row in enumerate(self.rows) if row.length + width > len(self.solos.texts[row.text])}
        if len(over) == len(self.rows):
            self.rows, self.state = [], None
        elif over:
            order = self.state.order_without(over)
            self.state.keep(order)
            self.rows = [self.rows[i] for i in order]

    def _add(self, state: BatchState, row: Row) -> None:
        self.rows.append(row)
        if self.state is None:
            self.state = state
        else:
            self.state.join(state)
            self.state.check_integrity()
