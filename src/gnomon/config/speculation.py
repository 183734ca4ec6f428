"""What may be guessed ahead of the model, and how much of it."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.options import option

DraftKind = Literal["auto", "two-model", "ngram"]
NGRAM_TOKENS = 10
"""Most tokens copied from an earlier occurrence at once."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What may be guessed ahead of the model, and how much of it. Guesses are verified: they change the speed, never the tokens."""

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

    @property
    def ngram(self) -> bool:
        return self.draft_kind == "ngram"

    @property
    def enabled(self) -> bool:
        return self.ngram or self.draft_model is not None
