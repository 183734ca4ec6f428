"""Which proposers foretell a row's text from its grammar, its session or its tools, and the account of what they did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import SpeculationConfig
from gnomon.engine.api import Filled, Request
from gnomon.engine.constrained import RowConstraint
from gnomon.propose import Proposer, RowGuesses
from gnomon.propose.echo import Echo
from gnomon.propose.grammar import Grammar
from gnomon.propose.guesses import Taken, total
from gnomon.propose.strict import Strict


class Filling:
    """Makes these proposers as the settings say."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config

    @property
    def sources(self) -> Sequence[str]:
        """What may propose, in the order in which it is asked."""
        config = self._config
        named = (("strict", config.strict), ("grammar", config.grammar_jump), ("echo", config.echo))
        return [name for name, wanted in named if wanted]

    def proposers(
        self, request: Request, tokenizer: Tokenizer, eos_ids: Collection[int], constraint: RowConstraint | None
    ) -> Sequence[Proposer]:
        """Those of one choice.

        Nothing is asserted in a constrained answer, nor where log-probabilities are wanted, which would be of tokens nobody drew.
        """
        config = self._config
        made: list[Proposer] = []
        if config.strict and request.spans is not None and constraint is None and request.sampling.logprobs is None:
            made.append(Strict(request.spans, tokenizer, eos_ids, config.fill_max_span))
        if config.grammar_jump and constraint is not None:
            made.append(Grammar(constraint, config.grammar_draft_tokens))
        if config.echo:
            made.append(
                Echo(
                    config.fill_k,
                    config.fill_candidates,
                    config.fill_max_span,
                    config.fill_index_max,
                    lambda token: b"\n" in tokenizer.token_bytes(token),
                )
            )
        return made


def fill_of(rows: Iterable[RowGuesses]) -> Filled | None:
    """What was filled in for these choices; None if nothing could be."""
    rows = list(rows)
    made = [one for row in rows for one in row.proposers]
    strict = [one for one in made if isinstance(one, Strict)]
    echo = [one for one in made if isinstance(one, Echo)]
    if not strict and not echo and not any(isinstance(one, Grammar) for one in made):
        return None
    whole = total(row.tally for row in rows)
    asserted, copied, forced = (
        whole.by_source.get(name, Taken()) for name in (Strict.source, Echo.source, Grammar.source)
    )
    return Filled(
        strict=asserted.accepted,
        echo=copied.accepted,
        grammar=forced.accepted,
        spans=tuple(asserted.spans),
        wasted_samples=asserted.accepted,
        parse_fallback=sum(one.failed_parse for one in strict),
        index_truncated=any(one.truncated for one in echo),
        decode_steps=whole.calls,
        verify_events=len(copied.spans) + len(forced.spans),
        verify_drafted=copied.drafted + forced.drafted,
        branch_stops=sum(one.branch_stops for one in echo),
    )
