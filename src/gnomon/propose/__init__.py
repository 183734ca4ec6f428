"""Proposers: what guesses a row's next tokens before the model has been asked. Every guess is verified, so none changes the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses for one row. An exception it raises fails that row's request alone."""

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` (>= 1) token ids that may follow `prompt` + `generated`; none makes it a plain step.

        Both sequences are live views of the row: read them, don't keep them.
        """
        ...
