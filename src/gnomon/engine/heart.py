"""The engine's heartbeat, beaten by its thread and felt by others."""

from __future__ import annotations

import time


class Heart:
    """`doing` says what the thread is at. A window of many tokens gets a longer `grace` than a turn of the loop."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.doing = "loading"
        self.grace = 0.0
        self.at = time.monotonic()

    def beat(self, doing: str, num_tokens: int = 0) -> None:
        """The loop turned. `num_tokens` about to be computed at once are granted a second each."""
        self.doing = doing
        self.grace = float(num_tokens)
        self.at = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self.at

    @property
    def is_late(self) -> bool:
        return self.age > self.timeout + self.grace
