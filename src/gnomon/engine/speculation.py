"""What the engine guesses: each row's proposers, how deep, and the account of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import SpeculationConfig
from gnomon.engine.api import Request
from gnomon.engine.constrained import RowConstraint
from gnomon.engine.filling import Filling
from gnomon.propose import (
    BatchProposer,
    Chance,
    Curve,
    Guess,
    Pace,
    Proposer,
    Rates,
    RowGuesses,
    best_depth,
    best_depths,
)
from gnomon.propose.guesses import NOTHING
from gnomon.propose.ngram import NGram
from gnomon.propose.policy import MOST_GUESSES

if TYPE_CHECKING:
    from gnomon.engine.row import Row

log = logging.getLogger(__name__)

MAX_PROPOSALS = MOST_GUESSES
"""Most proposed tokens per row and step; states can take that many back."""
MAX_DRAFTS = 8
"""Most tokens asked of a draft model at once, unless a number is set."""
MAX_FAILURES = 3
"""Failures in a row after which a batched proposer isn't asked any more."""

ProposerFactory = Callable[[Request, int], Proposer | None]
"""Makes a further proposer of one choice (request, choice index), asked first; None for none."""


class Speculation:
    """The proposers of an engine and the policy over them. Everything runs on the engine thread, except `stats`.

    Without a `curve` nothing is known of costs: every guess is tried as far as it goes.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        vocab_size: int,
        draft: BatchProposer | None = None,
        curve: Curve | None = None,
        extra: ProposerFactory | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.draft = draft
        self.curve = curve
        self.extra = extra
        self.filling = Filling(config)
        self.rates = Rates()
        self.depths: dict[int, int] = {}
        """Steps by the greatest depth chosen, over rows that could guess."""
        self.pace = Pace(None if curve is not None and curve.assumed else 1.0)
        self.failures = 0
        self.draft_failed: str | None = None
        """Why the draft model isn't asked any more."""

    # A row's life

    def begin(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        constraint: RowConstraint | None = None,
    ) -> RowGuesses | None:
        """What guesses for a choice; None if nothing does. Raises what making a proposer raises."""
        proposers: list[Proposer] = []
        if self.extra is not None and (own := self.extra(request, index)) is not None:
            proposers.append(own)
        proposers += self.filling.proposers(request, tokenizer, eos_ids, constraint)
        if self.config.ngram:
            proposers.append(NGram(self.config.ngram_max, self.config.ngram_min))
        if not proposers and self.draft is None:
            return None
        return RowGuesses(proposers, self.rates, None if constraint is None else constraint.num_legal)

    def leave(self, row: Row) -> None:
        """A row is about to go."""
        if self.draft is not None:
            self.draft.leave(row)

    def forget(self) -> None:
        """States are gone: rows are recomputed, and so must be what is kept of them here."""
        if self.draft is not None:
            self.draft.clear()

    # A step

    def wants_window(self, rows: Sequence[Row], flat: bool = False) -> bool:
        """Whether guessing pays, as far as tokens are read back: with a step in flight that is one token behind.

        So rows whose guesses don't pay go on at the pace of plain steps. In a `flat` window each row has as many positions as it needs.
        Fails rows whose proposer raises.
        """
        guesses = [self._look(row) for row in rows]
        depth = max(self._depths(rows, guesses, flat), default=0)
        self.depths[depth] = self.depths.get(depth, 0) + 1
        return depth > 0 or self._is_probe_due(rows, guesses)

    def drafts(self, rows: Sequence[Row], flat: bool = False) -> list[Sequence[int]]:
        """Each open row's guesses to verify, with everything read back. Fails rows whose proposer raises: they get none."""
        guesses = [self._look(row) for row in rows]
        depths = self._depths(rows, guesses, flat)
        pays = any(depths)
        if not pays and self._is_probe_due(rows, guesses):
            depths = [1 for _ in rows]
        if not any(depths):
            return [() for _ in rows]
        asked = [b for b, (row, guess) in enumerate(zip(rows, guesses, strict=True)) if self._may_draft(row, guess)]
        guesses = [guess.cut(depth) for guess, depth in zip(guesses, depths, strict=True)]
        drafts = [guess.tokens for guess in guesses]
        if asked and self.draft is not None:
            found = self._ask([rows[b] for b in asked], max(depths))
            for b, tokens in zip(asked, found, strict=True):
                constraint = rows[b].constraint
                if constraint is not None:
                    tokens = tokens[: constraint.num_legal(tokens)]
                drafts[b] = tokens
                own = rows[b].guesses
                if tokens and own is not None:
                    own.probed(len(rows[b].tokens), pays)
                guesses[b] = Guess(tokens, self.draft.source, prior=self.draft.prior)
        for row, guess, tokens in zip(rows, guesses, drafts, strict=True):
            if tokens and row.guesses is not None:
                row.guesses.use(guess)
        return drafts

    def _look(self, row: Row) -> Guess:
        guesses, limit = row.guesses, min(MAX_PROPOSALS, row.left - 1)
        if guesses is None or not row.open or limit < 1:
            return NOTHING
        try:
            found = guesses.look(row.prompt, row.tokens, limit)
            tokens = found.tokens
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
                raise ValueError(f"proposed token id {wrong} is outside 0..{self.vocab_size - 1}")
        except Exception as error:  # noqa: BLE001  (a proposer's failure is its row's own)
            row.job.fail(error, "proposer_error")
            return NOTHING
        return found.cut(limit)

    def _may_draft(self, row: Row, guess: Guess) -> bool:
        """Whether the draft model may be asked: rows for which something cheaper guesses don't ask it."""
        if self.draft is None or self.draft_failed is not None or guess.tokens:
            return False
        return row.open and row.guesses is not None and row.left > 1

    def _chance(self, row: Row, guess: Guess) -> Chance:
        if row.guesses is None:
            return Chance(0.0, 0.0, 0)
        if guess.tokens:
            return row.guesses.chance(guess)
        if self.draft is not None and self._may_draft(row, guess):
            rate = row.guesses.rate(self.draft.source, 0, self.draft.prior)
            most = min(MAX_PROPOSALS if self.config.num_draft_tokens else MAX_DRAFTS, row.left - 1)
            return Chance(rate.first.value, rate.later.value, most)
        return Chance(0.0, 0.0, 0)

    def _depths(self, rows: Sequence[Row], guesses: Sequence[Guess], flat: bool) -> list[int]:
        """How many guesses of each row are worth a window."""
        if self._none_pays(rows, guesses):
            return [0] * len(rows)
        chances = [self._chance(row, guess) for row, guess in zip(rows, guesses, strict=True)]
        most = max((chance.most for chance in chances), default=0)
        if self.config.num_draft_tokens is not None:
            return [min(most, self.config.num_draft_tokens) for _ in rows]
        if self.curve is None or not most:
            return [most for _ in rows]
        asks = [self._may_draft(row, guess) for row, guess in zip(rows, guesses, strict=True)]
        each = self.draft.cost(sum(asks)) if self.draft is not None and any(asks) else 0.0
        # Asserted tokens come, whether that pays or not; how many at once is chosen by what windows of them take.
        least = [int(guess.asserted and chance.most > 0) for guess, chance in zip(guesses, chances, strict=True)]
        if flat and not any(asks):
            return best_depths(chances, self.curve, self.pace.premium, least)
        return [self.depth_of(chances, each, max(least))] * len(rows)

    def _none_pays(self, rows: Sequence[Row], guesses: Sequence[Guess]) -> bool:
        """Whether even the likeliest guess is too unlikely: nearly always so where little repeats, and then nothing else is asked."""
        if self.curve is None or self.draft is not None or self.config.num_draft_tokens is not None:
            return False
        least = self.curve.least_chance(len(rows))
        return all(
            not guess.tokens or row.guesses is None or row.guesses.first(guess) <= least
            for row, guess in zip(rows, guesses, strict=True)
        )

    def depth_of(self, chances: Sequence[Chance], each: float = 0.0, least: int = 0) -> int:
        """The depth that pays best for rows with these chances, where a drafted token for them takes `each` seconds; at `least` so many."""
        if self.curve is None:
            return max((chance.most for chance in chances), default=0)
        return best_depth(chances, self.curve, lambda depth: depth * each, self.pace.premium, least)

    def observed(self, num_rows: int, width: float, seconds: float) -> None:
        """A step of this width, on the average of its rows, took so long: a plain one from one read-back to the next."""
        curve = self.curve
        if curve is None:
            return
        if width == 1:
            self.pace.stepped(curve.step(num_rows), seconds)
        else:
            self.pace.windowed(curve.window(num_rows, width), seconds)

    def _is_probe_due(self, rows: Sequence[Row], guesses: Sequence[Guess]) -> bool:
        """Whether some row's drafts haven't been tried for long: nothing else tells whether they would be right by now."""
        return self.curve is not None and any(
            row.guesses is not None and len(row.tokens) >= row.guesses.probe_at and self._may_draft(row, guess)
            for row, guess in zip(rows, guesses, strict=True)
        )

    def _ask(self, rows: Sequence[Row], depth: int) -> list[Sequence[int]]:
        draft = self.draft
        if draft is None:
            return [() for _ in rows]
        try:
            found = draft.propose(rows, [min(depth, row.left - 1) for row in rows])
        except Exception as error:
            # Drafts only save work: rows go on without. A draft model that keeps failing is told of and left alone.
            draft.clear()
            self.failures += 1
            log.exception("the draft model failed (%d in a row)", self.failures)
            if self.failures >= MAX_FAILURES:
                self.draft_failed = str(error) or type(error).__name__
            return [() for _ in rows]
        self.failures = 0
        return found

    # For /stats

    def stats(self, num_rows: int) -> dict[str, Any]:
        """As plain JSON values; read on any thread. `num_rows` are those decoding now."""
        curve, config = self.curve, self.config
        sources = [
            *self.filling.sources,
            *(["ngram"] if config.ngram else []),
            *([self.draft.source] if self.draft is not None else []),
        ]
        return {
            "sources": sources,
            "pinned": config.num_draft_tokens,
            "depths": {str(depth): count for depth, count in sorted(dict(self.depths).items())},
            "acceptance": {name: {"first": first, "later": later} for name, first, later in list(self.rates.told())},
            "curve": None
            if curve is None
            else {
                str(rows): {"1": curve.plain[rows], **{str(width): s for width, s in sorted(by_width.items())}}
                for rows, by_width in sorted(curve.windows.items())
            },
            "assumed": curve is not None and curve.assumed,
            "active_rows": num_rows,
            "premium": self.pace.premium,
            "draft_failed": self.draft_failed,
        }
