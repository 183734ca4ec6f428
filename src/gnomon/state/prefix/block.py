"""What the cache holds: blocks of up to 256 tokens in a tree, and checkpoints at exact positions on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnomon.state.keys import chain, root_key
from gnomon.state.snapshot import LayerPart, LayerSnapshot

__all__ = ["BLOCK", "Block", "Checkpoint", "Entry", "chain", "common", "root_key"]

BLOCK = 256
"""Tokens of a whole block."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


class Entry:
    """Something that takes bytes and can be evicted. `rank` is its place in the order of eviction, `used_at` the monotonic time of its
    last use."""

    __slots__ = ("guards", "is_local", "num_arrays", "num_bytes", "rank", "used_at")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_arrays = 0
        self.rank = 0.0
        self.used_at = 0.0
        self.is_local = False
        """It is not passed on to a slower tier."""
        self.guards = 0
        """Open sessions whose last turn it is of."""

    def weigh(self, layers: Iterator[LayerPart]) -> None:
        parts = list(layers)
        self.num_arrays = sum(len(part.owned) for part in parts)
        self.num_bytes = sum(part.nbytes for part in parts)


class Checkpoint(Entry):
    """States, after `position` tokens, of the layers that couldn't be cut there, by number of the layer."""

    __slots__ = ("block", "layers", "position")

    def __init__(self, block: Block, position: int, layers: dict[int, LayerSnapshot]) -> None:
        super().__init__()
        self.block = block
        self.position = position
        self.layers = layers
        self.weigh(iter(layers.values()))


class Block(Entry):
    """Immutable state of the tokens at `start..end`, by layer; None for a layer that could not be cut when the block was taken.

    Only whole blocks have children. A block whose state was evicted stays in the tree for a while as a *ghost*, tokens only, so that a
    later prompt can be told what became of its prefix. `refs` counts who needs the block: children that hold state, checkpoints, and
    operations in progress.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "is_ghost",
        "key",
        "lost",
        "parent",
        "parts",
        "refs",
        "start",
        "tails",
        "tokens",
    )

    def __init__(self, key: bytes, parent: Block | None, tokens: Sequence[int]) -> None:
        super().__init__()
        self.key = key
        self.parent = parent
        self.tokens = tuple(tokens)
        self.start = parent.end if parent is not None else 0
        self.parts: list[LayerPart | None] = []
        self.children: dict[bytes, Block] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.lost: set[int] = set()
        """Positions of checkpoints that were evicted."""
        self.tails: set[tuple[int, int]] = set()
        """Ranges of positions that templates wrote to open an answer."""
        self.refs = 0
        self.is_ghost = True

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == BLOCK

    @property
    def is_complete(self) -> bool:
        """Every layer could be cut: any prefix of the block is a state."""
        return not self.is_ghost and all(part is not None for part in self.parts)

    def set_parts(self, parts: list[LayerPart | None]) -> None:
        self.parts = parts
        self.is_ghost = False
        self.weigh(part for part in parts if part is not None)

    def drop_parts(self) -> None:
        self.parts, self.is_ghost = [], True
        self.num_bytes = self.num_arrays = 0

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """Up to `count` tokens from `position` on, along the first child each time."""
        found = self.tokens[position - self.start :][:count]
        block = self
        while len(found) < count and block.children:
            block = next(iter(block.children.values()))
            found = (*found, *block.tokens[: count - len(found)])
        return found
