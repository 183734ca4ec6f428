"""A request in the engine (`Job`) and the choices it decodes (`Row`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from gnomon.chat.tokenizer import Tokenizer
from gnomon.engine.api import (
    CacheMiss,
    CacheTier,
    ChoiceFinished,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Replayed,
    Request,
    Sink,
    Speculated,
    Tier,
    Usage,
)
from gnomon.engine.constrained import RowConstraint
from gnomon.engine.output import TextOutput, token_logprob
from gnomon.engine.resume import Record, Slot
from gnomon.engine.sampling import RowSampling, Score
from gnomon.engine.speculation import Speculation
from gnomon.grammar import Compiled
from gnomon.propose import RowGuesses
from gnomon.propose.guesses import total
from gnomon.state.prefix import Miss

log = logging.getLogger(__name__)


class Job:
    """One request: its choices share a prompt, a prefill and an end. `limit` is the most tokens a choice may get, `tier` that of the
    engine's operations. `slot` is where its generation is saved, and `record` what an earlier one had come to."""

    def __init__(
        self,
        request: Request,
        sink: Sink,
        limit: int,
        seed: int,
        grammar: Compiled | None = None,
        *,
        tier: Tier = "L1",
        slot: Slot | None = None,
        record: Record | None = None,
    ) -> None:
        self.request = request
        # Tone-curve sampling has no oracle outside.
        self.tier: Tier = tier if request.sampling.hlg is None else "Lab"
        self.sink = sink
        self.limit = limit
        self.seed = seed
        self.grammar = grammar
        self.slot = slot
        self.record = record
        self.feed = request.prompt if record is None else (*request.prompt, *record.tokens)
        """The tokens that the first row starts from: the state holds all but the last."""
        self.rows: list[Row] = []
        """Choices begun so far, closed ones included."""
        self.open = True
        self.cancelled = False
        self.answered = False
        """The client had all it wanted when it was cancelled."""
        self.fatal = False
        self.error: Exception | None = None
        self.batched = False
        self.num_cached = 0
        """Prompt tokens whose state was lent."""
        self.num_in_memory: int | None = None
        """Of them, those that memory alone would have lent; None if nothing was read from disk."""
        self.miss: Miss | None = None
        self.num_processed = 0
        """Prompt tokens whose state exists."""
        self.num_generated = 0
        self.submitted = time.monotonic()
        self.admitted = 0.0
        self.prefilled = 0.0
        self.first_token = 0.0

    @property
    def prompt(self) -> Sequence[int]:
        return self.request.prompt

    @property
    def num_unstarted(self) -> int:
        return self.request.n - len(self.rows)

    @property
    def num_unfinished(self) -> int:
        """Choices that still need a row or have one."""
        return self.request.n - sum(not row.open for row in self.rows) if self.open else 0

    def begin_row(self, tokenizer: Tokenizer, eos_ids: Collection[int], speculation: Speculation | None) -> Row:
        """The next choice. Raises what making its text output or proposers raises."""
        request, index = self.request, len(self.rows)
        output = TextOutput(tokenizer, request.stop, () if request.ignore_eos else eos_ids)
        constraint = None
        if self.grammar is not None:
            constraint = RowConstraint(self.grammar.start(), tokenizer, request.thinking)
        # A constrained row takes no proposals: its mask is known one token at a time.
        guesses = speculation.begin(request, index) if speculation is not None and constraint is None else None
        row = Row(self, index, tokenizer, output, guesses, (*eos_ids, *tokenizer.newline_ids), constraint)
        self.rows.append(row)
        if self.record is not None:
            row.replay(self.record)
        return row

    def tell_progress(self, processed: int) -> None:
        """Raises what the sink raises."""
        self.num_processed = processed
        if self.open:
            self.sink(Progress(self.request.id, processed, len(self.prompt)))

    def cancel(self, *, answered: bool = False) -> None:
        """Close every choice and the request, whatever it was doing; held-back text is given out first."""
        if not self.open:
            return
        self.cancelled, self.answered = True, answered
        closed = {row.index for row in self.rows if not row.open}
        for row in self.rows:
            if row.open:
                row.open = False
                self._tell(row.flush())
        for index in range(self.request.n):
            if index not in closed:
                self._tell(ChoiceFinished(self.request.id, index, "cancelled"))
        self.finish()

    def fail(self, error: Exception, code: str = "engine_error", fatal: bool = False) -> None:
        """Close the request with an error; its sink hears nothing after."""
        if not self.open:
            return
        if not fatal:
            log.warning("request %s failed: %s", self.request.id, error, exc_info=error)
        self.open = False
        self.error, self.fatal = error, fatal
        for row in self.rows:
            row.open = False
        self._tell(Failed(self.request.id, str(error) or type(error).__name__, code, fatal))

    def finish(self) -> None:
        """Close the request with its usage."""
        self.open = False
        self._tell(Finished(self.request.id, self.usage()))

    def usage(self) -> Usage:
        now = time.monotonic()
        admitted = self.admitted or now
        first = self.first_token or now
        miss = self.miss if self.miss is not None and self.miss.position < len(self.prompt) else None
        speculated = self._speculated()
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=self.num_generated,
            queue_seconds=admitted - self.submitted,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
            tier=self.tier,
            lane="batched" if self.batched else "serial+spec" if speculated and speculated.rounds else "serial",
            # Of what is replayed the client has no idea.
            cached_tokens=min(self.num_cached, len(self.prompt) - 1),
            cache_tier=self._cache_tier(),
            cache_miss=None if miss is None else CacheMiss(miss.kind, miss.position),
            speculation=speculated,
        )

    def _speculated(self) -> Speculated | None:
        tallies = [row.guesses.tally for row in self.rows if row.guesses is not None]
        if not tallies:
            return None
        whole = total(tallies)
        return Speculated(
            drafted=sum(whole.drafted_at),
            accepted=sum(whole.lengths),
            target_calls=whole.calls,
            lengths=tuple(whole.lengths),
            drafted_at=tuple(whole.drafted_at),
            accepted_at=tuple(whole.accepted_at),
        )

    def _cache_tier(self) -> CacheTier:
        if not self.num_cached:
            return "none"
        return "ram" if self.num_in_memory is None or self.num_cached <= self.num_in_memory else "ssd"

    def _tell(self, event: Event | None) -> None:
        """Emit one of a request's last events: a sink that raises now can't be told anything more."""
        if event is None:
            return
        try:
            self.sink(event)
        except Exception as error:  # noqa: BLE001  (a sink is the caller's code; its failure must not reach other requests)
            self.error = self.error or error


class Row:
    """One choice of a request. `tokens` are those read back, their text delivered or held back."""

    __slots__ = (
        "_tokenizer",
        "constraint",
        "exempt",
        "guesses",
        "index",
        "job",
        "left",
        "num_lent",
        "num_saved",
        "open",
        "output",
        "scores",
        "tokens",
    )

    def __init__(
        self,
        job: Job,
        index: int,
        tokenizer: Tokenizer,
        output: TextOutput,
        guesses: RowGuesses | None = None,
        exempt: tuple[int, ...] = (),
        constraint: RowConstraint | None = None,
    ) -> None:
        self.job = job
        self.index = index
        self.output = output
        self.guesses = guesses
        self.exempt = exempt
        self.constraint = constraint
        self.tokens: list[int] = []
        self.scores: list[Score] = []
        """Of the tokens, if they are to be saved with them."""
        self.num_saved = 0
        """Tokens in the newest checkpoint."""
        self.num_lent = len(job.feed)
        """Tokens, prompt included, when the row's state was last given to the prefix cache."""
        self.left = job.limit
        """Tokens the row may still get."""
        self.open = True
        self._tokenizer = tokenizer

    @property
    def prompt(self) -> Sequence[int]:
        return self.job.prompt

    @property
    def namespace(self) -> str:
        return self.job.request.namespace

    @property
    def has_processors(self) -> bool:
        """Whether anything changes the scores before a token is drawn from them."""
        params = self.job.request.sampling
        return bool(params.logit_bias or RowSampling(params, 0).penalty_windows)

    @property
    def last(self) -> int:
        """The token the row feeds next, of those read back."""
        return self.tokens[-1] if self.tokens else self.job.prompt[-1]

    def sampling(self) -> RowSampling:
        """How the row's next tokens are drawn, as of what it has generated."""
        job = self.job
        return RowSampling(
            params=job.request.sampling,
            seed=job.seed,
            choice=self.index,
            step=len(self.tokens),
            history=[*job.prompt, *self.tokens],
            exempt=self.exempt,
        )

    def take(self, token: int, score: Score | None = None) -> None:
        """Deliver a token that was read back. It may close the row, and with its last row the request.

        Raises what the constraint, the output or the sink raises.
        """
        if delta := self._read(token, score):
            self.job.sink(delta)
        self._close_if_over()

    def replay(self, record: Record) -> None:
        """Deliver what an earlier generation had come to, as if it had just been read back. Raises as `take` does."""
        deltas: list[Delta] = []
        for i, token in enumerate(record.tokens):
            if delta := self._read(token, record.scores[i] if record.scores else None):
                deltas.append(delta)
            if self._is_over:
                break
        self.num_saved = len(self.tokens)
        self.job.sink(Replayed(self.job.request.id, self.index, tuple(deltas)))
        self._close_if_over()

    def record(self, key: str) -> Record:
        """What the row has come to."""
        job = self.job
        return Record(key, job.seed, tuple(job.prompt), tuple(self.tokens), tuple(self.scores))

    def _read(self, token: int, score: Score | None) -> Delta | None:
        """Take a token in; the text it makes."""
        job = self.job
        if self.constraint is not None:
            self.constraint.advance(token)
        self.tokens.append(token)
        if score is not None and job.slot is not None:
            self.scores.append(score)
        self.left -= 1
        if self.guesses is not None:
            self.guesses.saw(token)
        job.num_generated += 1
        if not job.first_token:
            job.first_token = time.monotonic()
            job.tell_progress(len(job.prompt))
        logprob = None if score is None else token_logprob(self._tokenizer, token, score.logprob, score.top)
        piece = self.output.push(token, logprob)
        return Delta(job.request.id, self.index, piece.text, piece.ids, piece.logprobs) if piece else None

    @property
    def _is_whole(self) -> bool:
        return self.constraint is not None and self.constraint.finished

    @property
    def _is_over(self) -> bool:
        return self.output.finished or not self.left or self._is_whole

    def _close_if_over(self) -> None:
        if self.output.finished:
            self._close("stop")
        elif self._is_over:
            if last := self.flush():
                self.job.sink(last)
            # A stop string may lie in what was still held back.
            self._close("stop" if self.output.ended or self._is_whole else "length")

    def flush(self) -> Delta | None:
        """End the text: what was held back."""
        piece = self.output.finish()
        return Delta(self.job.request.id, self.index, piece.text, piece.ids, piece.logprobs) if piece else None

    def _close(self, reason: FinishReason) -> None:
        self.open = False
        job = self.job
        job.sink(ChoiceFinished(job.request.id, self.index, reason, self.output.stop))
        if not job.num_unstarted and not any(row.open for row in job.rows):
            job.finish()
