"""What guesses a row's next tokens before the model has been asked. Every guess is verified, so none changes the output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol


class Proposer(ABC):
    """Guesses for one row, cheaply, on the host. An exception it raises fails that row's request alone.

    `source` names the kind in statistics. `prior` is the share of its guesses thought right before any was seen. `grade` tells guesses of
    one proposer apart that are worth different trust; it holds for the last one made, and acceptance is tracked for each grade. `certain`
    proposers only say what must come: they are asked first and their guesses need no evidence.
    """

    source: str = "custom"
    prior: float = 0.5
    grade: int = 0
    certain: bool = False

    @abstractmethod
    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` (>= 1) token ids that may follow `prompt` + `generated`; none if there is no guess.

        Both sequences are live views of the row: read them, don't keep them. `generated` only ever grows between calls. A guess may be
        asked for without being used.
        """


class Text(Protocol):
    """A row as batched proposers see it. Its identity tells rows apart."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def namespace(self) -> str: ...


class BatchProposer(Protocol):
    """Guesses for the rows of a batch at once, with a state of its own on the device. Everything runs on the engine thread.

    An exception leaves its state unusable: `clear` makes it usable again. `cost` gives the seconds that one guessed token for each of so
    many rows takes.
    """

    source: str
    prior: float
    cost: Callable[[int], float]

    def propose(self, rows: Sequence[Text], limits: Sequence[int]) -> list[Sequence[int]]:
        """At most `limits[b]` (>= 0) token ids for each row; none for a row whose state has to catch up first."""
        ...

    def leave(self, row: Text) -> None:
        """Forget a row, if it is known."""
        ...

    def clear(self) -> None:
        """Forget every row."""
        ...

    def nbytes(self) -> int:
        """Bytes that its states take."""
        ...
