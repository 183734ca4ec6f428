"""What outlives a killed server."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What outlives a killed server."""

    generation_checkpoint: int | None = option(
        None,
        "save a running answer every so many tokens, so that the identical request goes on from there after a kill (unset: never)",
        low=1,
        high=1e6,
        unit="tokens",
    )
