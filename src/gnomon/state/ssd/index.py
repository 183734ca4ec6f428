"""What is on disk, in memory: the same tree of tokens as the cache in memory has, without the states."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.prefix.explain import Miss, explain
from gnomon.state.prefix.tree import Tree
from gnomon.state.snapshot import LayerSnapshot
from gnomon.state.ssd.format import Entry

_HELD = LayerSnapshot("full", {}, {})
"""Stands for a layer's state that a file has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The longest state on disk: its length, its blocks from the first on, and its checkpoint."""

    length: int
    blocks: Sequence[Entry]
    checkpoint: Entry | None


@dataclass(eq=False)
class Index:
    """Entries by name and by tokens. Any thread may use it."""

    tree: Tree = field(default_factory=Tree)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _blocks: dict[bytes, Block] = field(default_factory=dict[bytes, Block])
    """Blocks in the tree by key, whole ones and others."""
    _of: dict[Block | Checkpoint, Entry] = field(default_factory=dict[Block | Checkpoint, Entry])
    _orphans: dict[bytes, dict[str, Entry]] = field(default_factory=dict[bytes, dict[str, Entry]])
    """Entries whose parent isn't known, by its key: their tokens can't be told from the beginning."""
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    _ids: dict[int, int] = field(default_factory=dict[int, int])

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, entry: Entry, size: int) -> None:
        """There is a file, or soon will be, of about `size` bytes."""
        with self._lock:
            self._sizes[entry.name] = size
            if entry.name not in self._entries:
                self._entries[entry.name] = entry
                self._place(entry)

    def remove(self, name: str) -> None:
        """Its file is gone. Its tokens are remembered for a while."""
        with self._lock:
            entry = self._entries.pop(name, None)
            self._sizes.pop(name, None)
            if entry is None:
                return
            self._orphans.get(entry.parent, {}).pop(name, None)
            parent = self._parent(entry)
            if parent is None:
                return
            if entry.kind == "checkpoint":
                for block in parent.children.values():
                    checkpoint = block.checkpoints.get(entry.end)
                    if checkpoint is not None and self._of.get(checkpoint) == entry:
                        del block.checkpoints[entry.end], self._of[checkpoint]
                        block.lost.add(entry.end)
            else:
                self._remove_block(parent.children.get(entry.key), entry)

    def superseded(self, entry: Entry) -> list[Entry]:
        """Entries that hold nothing beside what a new block does: the same with fewer layers, and its beginnings."""
        with self._lock:
            parent = self._parent(entry)
            if parent is None or entry.kind != "block":
                return []
            n, mine = len(entry.tokens), set(entry.layers)
            return [
                one
                for block in parent.children.values()
                if (one := self._of.get(block)) is not None
                and one.name != entry.name
                and len(one.tokens) <= n
                and entry.tokens[: len(one.tokens)] == one.tokens
                and mine.issuperset(one.layers)
                and not (len(one.tokens) == n and set(one.layers) == mine)
            ]

    def plan(self, namespace: str, tokens: Sequence[int], room: int) -> Plan:
        """The longest state of at most all tokens but the last, of which no more than about `room` bytes are taken."""
        with self._lock:
            length, blocks, checkpoint = self.tree.walk(namespace, tokens).usable(len(tokens) - 1)
            entries = [self._of[block] for block in blocks]
            at = self._of[checkpoint] if checkpoint is not None else None
            sizes = [self._sizes[one.name] for one in entries]
            size_at = self._sizes[at.name] if at is not None else 0
        if at is not None:
            return Plan(length, entries, at) if sum(sizes) + size_at <= room else Plan(0, [], None)
        for i, size in enumerate(accumulate(sizes)):
            if size > room:
                return Plan(entries[i].start, entries[:i], None)
        return Plan(length, entries, None)

    def explain(
        self, namespace: str, tokens: Sequence[int], reused: int, boundary: int | None
    ) -> tuple[int, Miss | None]:
        """How many tokens of a prompt are known here, and why no more than `reused` were lent."""
        with self._lock:
            walk = self.tree.walk(namespace, tokens)
            return walk.matched, explain(self.tree, namespace, tokens, walk, reused, boundary)

    def longest(self, identity: str, without: Container[str]) -> int:
        """Tokens of the longest state of an identity, of files other than those named."""
        with self._lock:
            return max(
                (
                    entry.end
                    for held, entry in self._of.items()
                    if entry.identity == identity
                    and entry.name not in without
                    and (isinstance(held, Checkpoint) or held.is_complete)
                ),
                default=0,
            )

    # The tree

    def _parent(self, entry: Entry) -> Block | None:
        root = bytes.fromhex(entry.namespace)
        if entry.parent == root:
            if entry.namespace not in self.tree.roots:
                self.tree.roots[entry.namespace] = Block(root, None, ())
            return self.tree.roots[entry.namespace]
        return self._blocks.get(entry.parent)

    def _place(self, entry: Entry) -> None:
        parent = self._parent(entry)
        if parent is None:
            self._orphans.setdefault(entry.parent, {})[entry.name] = entry
            return
        if entry.kind == "checkpoint":
            self._place_checkpoint(parent, entry)
            return
        block = self._block(parent, entry.tokens)
        if block is None:
            return
        known = self._of.get(block)
        if known is not None and not set(entry.layers) > set(known.layers):
            return
        self.tree.ghosts.pop(block, None)
        self._of[block] = entry
        block.set_parts([_HELD if i in entry.layers else None for i in range(entry.count)])
        n = len(entry.tokens)
        for other in list(parent.children.values()):
            if other is not block and len(other.tokens) < n and entry.tokens[: len(other.tokens)] == other.tokens:
                for checkpoint in list(other.checkpoints.values()):
                    self._hang(checkpoint, block)
                if other.is_ghost and not other.checkpoints:
                    self._forget(other)
        for orphan in self._orphans.pop(entry.key, {}).values():
            self._place(orphan)

    def _place_checkpoint(self, parent: Block, entry: Entry) -> None:
        block = self._covering(parent, entry.tokens) or self._block(parent, entry.tokens)
        if block is None or entry.end in block.checkpoints:
            return
        checkpoint = Checkpoint(block, entry.end, dict.fromkeys(entry.layers, _HELD))
        block.checkpoints[entry.end] = checkpoint
        block.lost.discard(entry.end)
        self._of[checkpoint] = entry

    def _block(self, parent: Block, tokens: Sequence[int]) -> Block | None:
        """The block of these tokens, a ghost if there was none."""
        tokens = tuple(self._ids.setdefault(token, token) for token in tokens)
        block = self.tree.child(parent, tokens)
        if block is None and (block := self.tree.add(parent, tokens)) is not None:
            self._blocks[block.key] = block
        return block

    def _covering(self, parent: Block, tokens: tuple[int, ...]) -> Block | None:
        """A held block that begins with these tokens, the one with most layers."""
        n = len(tokens)
        held = [block for block in parent.children.values() if block in self._of and block.tokens[:n] == tokens]
        return max(held, key=lambda block: len(self._of[block].layers), default=None)

    def _remove_block(self, block: Block | None, entry: Entry) -> None:
        if block is None or self._of.get(block) != entry:
            return
        del self._of[block]
        block.drop_parts()
        parent = block.parent
        for checkpoint in list(block.checkpoints.values()):
            other = self._covering(parent, self._of[checkpoint].tokens) if parent is not None else None
            if other is not None:
                self._hang(checkpoint, other)
        # A ghost that something stands on must not be forgotten, or that would go with it.
        if not block.children and not block.checkpoints:
            self._haunt(block)

    def _hang(self, checkpoint: Checkpoint, block: Block) -> None:
        del checkpoint.block.checkpoints[checkpoint.position]
        if checkpoint.position in block.checkpoints:
            del self._of[checkpoint]
            return
        checkpoint.block = block
        block.checkpoints[checkpoint.position] = checkpoint

    def _haunt(self, block: Block) -> None:
        oldest = next(iter(self.tree.ghosts), None)
        self.tree.haunt(block)
        if oldest is not None and oldest not in self.tree.ghosts:
            self._blocks.pop(oldest.key, None)

    def _forget(self, block: Block) -> None:
        self.tree.remove(block)
        self._blocks.pop(block.key, None)
