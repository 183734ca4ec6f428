"""The blocks by their tokens: a tree per identity, and the walk of a prompt through it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gnomon.state.prefix.block import BLOCK, Block, Checkpoint, chain, common, root_key

MAX_GHOSTS = 4096
"""Evicted blocks whose tokens are remembered, about 2 kB each."""


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a prompt's tokens are known: `whole` blocks one after another, then blocks that share their first so many tokens with it.

    `sides` are blocks beside the whole ones, by how many come before: a whole block may lack layers that a shorter one beside it has.
    """

    whole: Sequence[Block]
    ends: Sequence[tuple[Block, int]]
    sides: Mapping[int, Sequence[tuple[Block, int]]]

    @property
    def base(self) -> int:
        return self.whole[-1].end if self.whole else 0

    @property
    def blocks(self) -> list[Block]:
        """All blocks that share tokens with the prompt, ghosts among them."""
        beside = [block for ends in (*self.sides.values(), self.ends) for block, _ in ends]
        return [*self.whole, *beside]

    @property
    def matched(self) -> int:
        """Tokens known, whether or not their state is still held."""
        return self.base + max((n for _, n in self.ends), default=0)

    def nearest(self) -> Block | None:
        """The block that shares most tokens with what follows the whole ones."""
        return max(self.ends, key=lambda end: end[1])[0] if self.ends else None

    def usable(self, limit: int) -> tuple[int, list[Block], Checkpoint | None]:
        """The longest state of at most `limit` tokens that is held: its length, the blocks it is made of, and the checkpoint."""
        found: tuple[int, list[Block], Checkpoint | None] = self._cut(limit)
        for checkpoint, path in self._checkpoints(limit):
            if checkpoint.position > found[0] and _has_rest(path, checkpoint):
                found = checkpoint.position, path, checkpoint
        return found

    def _cut(self, limit: int) -> tuple[int, list[Block], None]:
        path: list[Block] = []
        for block in self.whole:
            if not block.is_complete:
                break
            path.append(block)
        length = path[-1].end if path else 0
        ends = self.ends if len(path) == len(self.whole) else self.sides.get(len(path), ())
        block, n = max(((b, n) for b, n in ends if b.is_complete), key=lambda end: end[1], default=(None, 0))
        if block is not None:
            path.append(block)
            length += n
        length = min(length, limit)
        return length, [block for block in path if block.start < length], None

    def _checkpoints(self, limit: int) -> Iterator[tuple[Checkpoint, list[Block]]]:
        for i, block in enumerate(self.whole):
            for position, checkpoint in block.checkpoints.items():
                if position <= limit:
                    yield checkpoint, [*self.whole[: i + 1]]
        for i, ends in (*self.sides.items(), (len(self.whole), self.ends)):
            for block, n in ends:
                for position, checkpoint in block.checkpoints.items():
                    if position <= min(limit, block.start + n):
                        yield checkpoint, [*self.whole[:i], block]

    def lost(self, start: int, stop: int) -> bool:
        """Whether state between these positions was held once and was evicted."""
        blocks = [*self.whole, *(block for block, _ in self.ends)]
        return any(
            block.end > start
            and block.start < stop
            and (block.is_ghost or any(start < position <= stop for position in block.lost))
            for block in blocks
        )


def _has_rest(path: Sequence[Block], checkpoint: Checkpoint) -> bool:
    """The blocks hold what the checkpoint doesn't."""
    return all(
        not block.is_ghost and all(part is not None or i in checkpoint.layers for i, part in enumerate(block.parts))
        for block in path
    )


def _sharing(parent: Block, tokens: tuple[int, ...], but: Block | None = None) -> list[tuple[Block, int]]:
    """The blocks below, `but` one, that begin with some of these tokens, and with how many."""
    shared = ((child, common(child.tokens, tokens)) for child in parent.children.values() if child is not but)
    return [(child, n) for child, n in shared if n]


class Tree:
    """Blocks by identity and tokens. It knows nothing of sizes; the cache decides what enters and what goes."""

    def __init__(self) -> None:
        self.roots: dict[str, Block] = {}
        self.ghosts: OrderedDict[Block, None] = OrderedDict()

    def root(self, namespace: str) -> Block:
        if namespace not in self.roots:
            self.roots[namespace] = Block(root_key(namespace), None, ())
        return self.roots[namespace]

    def walk(self, namespace: str, tokens: Sequence[int]) -> Walk:
        """Follow `tokens` from the root of `namespace`. Every key found is verified against the tokens themselves."""
        block = self.roots.get(namespace)
        whole: list[Block] = []
        sides: dict[int, Sequence[tuple[Block, int]]] = {}
        if block is None:
            return Walk(whole, [], sides)
        tokens = tuple(tokens)
        at = 0
        while len(tokens) - at >= BLOCK:
            child = self.child(block, tokens[at : at + BLOCK])
            if child is None:
                break
            if not child.is_complete and (beside := _sharing(block, child.tokens, child)):
                sides[len(whole)] = beside
            whole.append(child)
            block, at = child, child.end
        return Walk(whole, _sharing(block, tokens[at : at + BLOCK]), sides)

    @staticmethod
    def child(parent: Block, tokens: tuple[int, ...]) -> Block | None:
        """The block of exactly these tokens."""
        child = parent.children.get(chain(parent.key, tokens))
        return child if child is not None and child.tokens == tokens else None

    def add(self, parent: Block, tokens: tuple[int, ...]) -> Block | None:
        """A new block, a ghost until it gets its parts; None if another block's key is the same."""
        key = chain(parent.key, tokens)
        if key in parent.children:
            return None
        block = parent.children[key] = Block(key, parent, tokens)
        return block

    def remove(self, block: Block) -> None:
        """Forget a block and the ghosts below it."""
        for child in list(block.children.values()):
            self.remove(child)
        self.ghosts.pop(block, None)
        if block.parent is not None and block.parent.children.get(block.key) is block:
            del block.parent.children[block.key]

    def haunt(self, block: Block) -> None:
        """The block's state is gone: remember its tokens, and forget the oldest ghosts beyond the limit."""
        self.ghosts[block] = None
        while len(self.ghosts) > MAX_GHOSTS:
            self.remove(next(iter(self.ghosts)))
