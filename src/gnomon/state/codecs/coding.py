"""Which codec each layer of a model has, and from when on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gnomon.state.codecs.codec import Codec


@dataclass(frozen=True, slots=True)
class Coding:
    """A codec for each of a model's caches, None for those that stay plain, and the `start` from which on rows are coded.

    A row's first window is attended plain, whatever its length; before a later window a row of `start` tokens and more is coded. That is
    when mlx-lm converts.
    """

    codecs: tuple[Codec | None, ...]
    start: int = 0

    @property
    def name(self) -> str:
        """Part of a state's identity: equal names, equal meaning of the stored words."""
        runs: list[list[str]] = []
        for one in self._names():
            if runs and runs[-1][0] == one:
                runs[-1][1] = str(int(runs[-1][1]) + 1)
            else:
                runs.append([one, "1"])
        return ",".join(f"{name}x{count}" for name, count in runs) + f"@{self.start}"

    def _names(self) -> Iterable[str]:
        return (codec.name if codec is not None else "plain" for codec in self.codecs)
