"""Whether the engine has a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class IsolationConfig:
    """Which process loads the model."""

    isolate: bool = option(
        False, "run the engine in a process of its own, which is started again when the device or a fault kills it"
    )
