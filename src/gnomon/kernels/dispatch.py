"""The one place that decides which implementation of an operation runs inside the engine's step. Only stock operations exist yet."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

_local = threading.local()


@contextmanager
def step() -> Generator[None]:
    """Mark the calling thread as inside an engine step: dispatched operations may take native versions until it ends."""
    depth = getattr(_local, "depth", 0)
    _local.depth = depth + 1
    try:
        yield
    finally:
        _local.depth = depth


def in_step() -> bool:
    """Whether the calling thread is inside an engine step."""
    return getattr(_local, "depth", 0) > 0
