"""What the engine guesses: each row's proposers, how deep, and the account of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
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
from gnomon.propose.pace import CHECK
from gnomon.propose.policy import MOST_GUESSES

if TYPE_CHECKING:
    from gnomon.engine.row import Row

log = logging.getLogger(__name__)

MAX_PROPOSALS = MOST_GUESSES
"""Most proposed tokens per row and step; states can take that many back."""
MAX_DRAFTS = 8
"""Most tokens asked of a draft model at once, unless a number is set."""
TRIED = 0.25
"""Tokens that a guess must promise for a window that does not seem to pay to be tried with it."""
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
        keep: Callable[[int, Mapping[int, float]], None] | None = None,
    ) -> None:
        """`keep` is told of seconds, by number of rows and width, that a measured curve has wrong."""
        self.config = config
        self.vocab_size = vocab_size
        self.draft = draft
        self.curve = curve
        self.extra = extra
        self.filling = Filling(config)
        self.rates = Rates()
        self.depths: dict[int, int] = {}
        """Steps by the greatest depth chosen, over rows that could guess."""
        self.pace = None if curve is None or config.num_draft_tokens is not None else Pace(curve)
        """What steps really take; None where the depth depends on nothing."""
        self.keep = keep
        self._tries = False
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

        So rows whose guesses don't pay go on at the pace of plain steps, and where no guess could pay none is looked for. In a `flat`
        window each row has as many positions as it needs. Fails rows whose proposer raises.
        """
        depth, self._tries = 0, False
        if not self._is_out(len(rows)):
            may_try = self.pace is not None and self.pace.may_try(len(rows))
            depths, self._tries = self._choose(rows, [self._look(row) for row in rows], flat, may_try)
            depth = max(depths)
        self.depths[depth] = self.depths.get(depth, 0) + 1
        return depth > 0 or (self.draft is not None and self._is_probe_due(rows))

    def rests(self, num_rows: int) -> bool:
        """Whether only plain steps are made for now, so that they are timed."""
        return self.pace is not None and self.pace.rests(num_rows)

    def _is_out(self, num_rows: int) -> bool:
        """Whether there will be no window, whatever would be guessed."""
        pace = self.pace
        if pace is None:
            return False
        if pace.rests(num_rows):
            pace.rested(num_rows)
            return True
        return self.draft is None and pace.least_chance(num_rows) >= 1 and not pace.may_try(num_rows)

    def drafts(self, rows: Sequence[Row], flat: bool = False) -> list[Sequence[int]]:
        """Each open row's guesses to verify, with everything read back. Fails rows whose proposer raises: they get none."""
        guesses = [self._look(row) for row in rows]
        depths, self._tries = self._choose(rows, guesses, flat, self._tries)
        pays = any(depths)
        if not pays and self.draft is not None and self._is_probe_due(rows):
            depths = [1 for _ in rows]
        if not any(depths):
            return [() for _ in rows]
        asked = [b for b, (row, guess) in enumerate(zip(rows, guesses, strict=True)) if self._may_draft(row, guess)]
        guesses = [guess.cut(depth) if depth else NOTHING for guess, depth in zip(guesses, depths, strict=True)]
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

    def asserted(self, rows: Sequence[Row]) -> Mapping[Row, int]:
        """The next token of rows of which it is asserted, with everything read back."""
        found = ((row, self._look(row)) for row in rows if row.guesses is not None and row.guesses.waits)
        return {row: guess.tokens[0] for row, guess in found if guess.asserted and guess.tokens}

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

    def _choose(
        self, rows: Sequence[Row], guesses: Sequence[Guess], flat: bool, may_try: bool
    ) -> tuple[list[int], bool]:
        """How many guesses of each row are worth a window, and whether it is only tried."""
        pace, num_rows = self.pace, len(rows)
        if pace is None:
            most = max((self._chance(*each).most for each in zip(rows, guesses, strict=True)), default=0)
            pinned = self.config.num_draft_tokens
            return [most if pinned is None else min(most, pinned)] * num_rows, False
        least = pace.least_chance(num_rows)
        # Nearly always nothing pays where little repeats, and then nothing else is asked.
        if self.draft is not None or self._likeliest(rows, guesses) > least:
            depths = self._depths(pace, rows, guesses, flat)
            if any(depths):
                return depths, False
        if self.draft is None and may_try:
            depths = self._depths(pace, rows, guesses, flat, is_try=True)
            if any(depths):
                return depths, True
            if least >= 1 or self._tries:
                pace.looked_in_vain(num_rows)
        return [0] * num_rows, False

    def _likeliest(self, rows: Sequence[Row], guesses: Sequence[Guess]) -> float:
        return max(
            (
                row.guesses.first(guess)
                for row, guess in zip(rows, guesses, strict=True)
                if guess.tokens and row.guesses is not None
            ),
            default=0.0,
        )

    def _depths(
        self, pace: Pace, rows: Sequence[Row], guesses: Sequence[Guess], flat: bool, *, is_try: bool = False
    ) -> list[int]:
        """The depths that pay best; in a try at least one of each row's guess that promises something."""
        chances = [self._chance(row, guess) for row, guess in zip(rows, guesses, strict=True)]
        asks = [self._may_draft(row, guess) for row, guess in zip(rows, guesses, strict=True)]
        least = [int(is_try and chance.tokens(MOST_GUESSES) >= TRIED) for chance in chances]
        if flat and not any(asks):
            depths = best_depths(chances, pace, least)
            if any(depths):
                # A window asserts what it holds; in plain steps it is done singly.
                depths = [max(depth, int(guess.asserted)) for depth, guess in zip(depths, guesses, strict=True)]
            return depths
        return [self.depth_of(chances, sum(asks), max(least))] * len(rows)

    def depth_of(self, chances: Sequence[Chance], drafted: int = 0, least: int = 0) -> int:
        """The depth that pays best for rows with these chances, of which so many are `drafted`; at `least` so many."""
        pace = self.pace
        if pace is None:
            return max((chance.most for chance in chances), default=0)
        each = 0.0
        if self.draft is not None and drafted:
            plain = pace.seconds(len(chances))
            each = 0.0 if plain is None else self.draft.cost(drafted) / plain
        return best_depth(chances, pace, lambda depth: depth * each, least)

    def stepped(self, num_rows: int, seconds: float, settled: bool) -> None:
        """A plain step took so long, from the read-back before to its own (`Pace.stepped`)."""
        pace = self.pace
        if pace is None:
            return
        pace.stepped(num_rows, seconds, settled)
        if settled and self.keep is not None and pace.rows[num_rows].num_plain % CHECK == 0:
            found = pace.corrections(num_rows)
            if found:
                self.keep(num_rows, found)

    def windowed(self, num_rows: int, guesses: int, seconds: float, tokens: int) -> None:
        """A window with `guesses` more positions than rows took so long and gave `tokens`."""
        if self.pace is not None:
            self.pace.windowed(num_rows, guesses, seconds, tokens, self._tries)

    def disturbed(self) -> None:
        """Something else was computed since the last step."""
        if self.pace is not None:
            self.pace.disturbed()

    def _is_probe_due(self, rows: Sequence[Row]) -> bool:
        """Whether some row's drafts haven't been tried for long: nothing else tells whether they would be right by now."""
        return self.pace is not None and any(
            row.guesses is not None
            and len(row.tokens) >= row.guesses.probe_at
            and self._may_draft(row, self._look(row))
            for row in rows
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
            "steps": None if self.pace is None else self.pace.stats(),
            "active_rows": num_rows,
            "draft_failed": self.draft_failed,
        }
