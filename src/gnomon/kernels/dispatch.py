"""The one place that decides which implementation of an operation runs inside the engine's step.

A dispatcher stands over a few public functions of `mlx.core`. It calls the stock function unless the calling thread is inside an engine
step and has chosen native kernels, so anything else in the same process (an oracle, a user's code, another engine) stays stock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


class Thread(threading.local):
    """What the calling thread chose, and whether it is inside a step. `active` is both, in one look-up."""

    depth = 0
    native = False
    active = False
    integer = False
    """Whether native products of 4- and 8-bit weights round activations to 8 bits instead of 16 (see `integer`)."""

    def __init__(self) -> None:
        self.orders: dict[int, tuple[object, Any]] = {}
        self.masks: dict[Hashable, Any] = {}
        """What the layers of a step share, by what it depends on."""


thread = Thread()

stock_calls: Counter[str] = Counter()
"""Calls inside native steps that a kernel's contract doesn't cover, by operation: they ran as stock operations."""


def choose(native: bool, integer: bool = False) -> None:
    """Let the calling thread's steps take native kernels (`integer`: activations of 8 bits), or stock operations, from now on."""
    thread.native = native
    thread.integer = integer
    thread.active = native and thread.depth > 0


@contextmanager
def step() -> Generator[None]:
    """Mark the calling thread as inside an engine step: dispatched operations may take native versions until it ends."""
    depth, active = thread.depth, thread.active
    thread.depth = depth + 1
    thread.active = thread.native
    try:
        yield
    finally:
        thread.depth = depth
        thread.active = active
        thread.orders.clear()
        thread.masks.clear()


def in_step() -> bool:
    """Whether the calling thread is inside an engine step."""
    return thread.depth > 0


def walk(keys: object, order: Any) -> None:
    """Let attention over the array `keys` `[B, heads, S, dim]` add up its slots in the order `[B, S]` or `[1, S]`, until the step ends.

    A ring of keys tells so where its oldest key is: the sum is then the same as if the keys lay from oldest to newest. Attention over
    another array, and stock operations, take slots as they lie.
    """
    thread.orders[id(keys)] = keys, order


def order_of(keys: object) -> Any:
    """What `walk` was told of this very array, or None."""
    found = thread.orders.get(id(keys))
    return None if found is None else found[1]


def uncovered(operation: str, why: str) -> None:
    """Count a call that goes to the stock function inside a native step; the first one of an operation is logged."""
    if operation not in stock_calls:
        log.info("no native kernel for this %s (%s): it runs as stock operations", operation, why)
    stock_calls[operation] += 1


@dataclass(frozen=True, slots=True)
class Operation:
    """A public function `attribute` of `owner` and what may run in its place: `make(stock, extension)` returns the dispatching function."""

    name: str
    owner: Any
    attribute: str
    make: Callable[[Callable[..., Any], Any], Callable[..., Any]]
    contract: str


_installed: dict[str, tuple[Operation, Callable[..., Any]]] = {}
_lock = threading.Lock()


def install(operations: Sequence[Operation], extension: ModuleType | None) -> None:
    """Put the dispatchers in place. Doing so again for an operation changes nothing."""
    with _lock:
        for operation in operations:
            if operation.name in _installed:
                continue
            stock = getattr(operation.owner, operation.attribute)
            _installed[operation.name] = (operation, stock)
            setattr(operation.owner, operation.attribute, operation.make(stock, extension))


def uninstall() -> None:
    """Put the stock functions back."""
    with _lock:
        # Several may stand over one function: the last one goes first.
        for operation, stock in reversed(_installed.values()):
            setattr(operation.owner, operation.attribute, stock)
        _installed.clear()


def installed() -> list[str]:
    """Names of the operations that have a native version in this process."""
    return sorted(_installed)
