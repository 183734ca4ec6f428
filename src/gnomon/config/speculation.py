"""What may be guessed ahead of the model, and how much of it."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.options import option

FillKind = Literal["off", "strict", "echo", "both"]
DraftKind = Literal["auto", "two-model", "ngram"]
NGRAM_TOKENS = 10
"""Most tokens copied from an earlier occurrence at once."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What may be guessed ahead of the model, and how much of it. Guesses are verified: they change the speed, never the tokens. Only
    strict fill asserts instead, and therefore has to be asked for."""

    draft_model: str | None = option(
        None, "smaller model with the same tokenizer that drafts: a directory, or the name of a model that is present"
    )
    draft_kind: DraftKind = option(
        "auto",
        "auto: the draft model, if one is given; two-model: the same; ngram: repeat what followed the same words earlier, "
        "and where they are new ask the draft model, if one is given",
    )
    num_draft_tokens: int | None = option(
        None,
        "tokens guessed per step, always; unset: as many as pay on this machine, down to none",
        low=1,
        high=16,
        unit="tokens",
    )
    ngram_max: int = option(3, "most last tokens that must have occurred before", low=1, high=16, unit="tokens")
    ngram_min: int = option(1, "fewest last tokens that must have occurred before", low=1, high=16, unit="tokens")

    grammar_jump: bool = option(True, "propose what a grammar forces: keys, brackets, names")
    grammar_draft_tokens: int = option(16, "most tokens of it per step", low=1, high=16, unit="tokens")
    fill: FillKind = option(
        "off",
        "echo: copy passages of the session, verified; strict: write what tools and template settle of a tool call without asking the "
        "model; both",
    )
    fill_max_span: int = option(32, "most tokens copied or written at once", low=2, high=1024, unit="tokens")
    fill_k: int = option(
        8, "last tokens that must have occurred before for a passage to be copied", low=2, high=64, unit="tokens"
    )
    fill_candidates: int = option(24, "nearest earlier occurrences that must agree on what follows", low=1, high=1024)
    fill_index_max: int = option(
        131_072,
        "tokens of a session that are indexed for copying; later ones are not",
        low=1024,
        high=1e8,
        unit="tokens",
    )

    @property
    def echo(self) -> bool:
        return self.fill in ("echo", "both")

    @property
    def strict(self) -> bool:
        return self.fill in ("strict", "both")

    @property
    def ngram(self) -> bool:
        return self.draft_kind == "ngram"

    @property
    def enabled(self) -> bool:
        """Whether something was asked for. What only grammars force is there without."""
        return self.ngram or self.draft_model is not None or self.fill != "off"
