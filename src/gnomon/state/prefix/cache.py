"""The prefix cache in memory: states of token prefixes, lent to prompts that begin alike."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from gnomon.state.batch_state import BatchState
from gnomon.state.paged.pool import PagePool
from gnomon.state.prefix.assemble import assemble
from gnomon.state.prefix.block import BLOCK, Block, Checkpoint, Entry
from gnomon.state.prefix.explain import explain
from gnomon.state.prefix.lending import Adopted, Below, Counts, Lent
from gnomon.state.prefix.retention import Policy, Retention, may_go
from gnomon.state.prefix.tree import Tree
from gnomon.state.snapshot import LayerPart, LayerSnapshot

CLEAR_BYTES = 256 << 20
"""Evicted bytes after which MLX is told to give spare buffers back to the system."""
MAX_ARRAYS = 200_000
"""Arrays held at most: Metal allows about 499,000 buffers, and the model and its rows need theirs."""


@dataclass(eq=False)
class PrefixCache:
    """States by identity and tokens, of at most `max_bytes`.

    State that can be cut is held in blocks of 256 tokens, each stored once however many prompts share it, and a prompt may be lent any
    prefix of them. State that can't (recurrent layers, sliding windows that have wrapped) is held in checkpoints at the positions where
    `publish` saw it. Everything is copied out of the rows, so a row never shares memory with the cache when it is written to; only whole
    blocks of paged rows are shared, which nobody writes to. Use it from one thread, the one that evaluates the states.
    """

    max_bytes: int
    policy: Policy = "lru"
    max_arrays: int = MAX_ARRAYS
    below: Below | None = None
    pages: PagePool | None = None
    """Where whole blocks are held, if the rows' states are."""
    counts: Counts = field(default_factory=Counts)
    num_bytes: int = 0
    num_arrays: int = 0
    num_blocks: int = 0
    num_checkpoints: int = 0
    version: int = 0
    """Changes whenever a lookup might find something else."""

    def __post_init__(self) -> None:
        self.tree = Tree()
        self.retention = Retention(self.policy)
        self.allowed = self.max_bytes
        self._since_clear = 0
        self._news: list[Block | Checkpoint] = []

    def peek(self, namespace: str, tokens: Sequence[int]) -> int:
        """How many tokens `lend` would give now."""
        return self.tree.walk(namespace, tokens).usable(len(tokens) - 1)[0]

    def lend(self, namespace: str, tokens: Sequence[int], boundary: int | None = None, slots: int = 0) -> Lent:
        """The longest state held of at most all tokens but the last, evaluated.

        `boundary` is the position at which the prompt's template opens the answer, where known; it serves the explanation only. A state
        that will grow is copied once more then, unless it is given so many `slots` here; see `assemble`.
        """
        walk = self.tree.walk(namespace, tokens)
        length, blocks, checkpoint = walk.usable(len(tokens) - 1)
        miss = explain(self.tree, namespace, tokens, walk, length, boundary)
        if not length:
            self.counts.misses += 1
            return Lent(0, None, miss)
        snapshot = assemble(blocks, length, checkpoint, slots)
        mx.eval(snapshot.arrays())
        for entry in reversed(blocks):
            self.retention.touch(entry)
        if checkpoint is not None:
            self.retention.touch(checkpoint)
        self.retention.tidy(self.num_blocks + self.num_checkpoints)
        self.counts.hits += 1
        self.counts.reused_tokens += length
        return Lent(length, snapshot, miss)

    def publish(
        self,
        namespace: str,
        tokens: Sequence[int],
        state: BatchState,
        row: int = 0,
        *,
        boundary: int | None = None,
        whole_only: bool = False,
        is_local: bool = False,
    ) -> None:
        """Keep a row's state. `tokens` are the row's as far as they are known; only those are kept whose state exists.

        Layers that can't be cut get a checkpoint at the row's length, if all its tokens are known. `boundary`, of a prompt, is where its
        template opens the answer, which lasts up to the end of `tokens`. `whole_only` keeps whole blocks only, and nothing of a row
        that can't be cut. `is_local` keeps the state from a slower tier.
        """
        held = state.lengths[row]
        can_cut = state.can_cut(held)
        if not can_cut and (whole_only or held > len(tokens)):
            return
        length = min(held, len(tokens))
        if whole_only:
            length -= length % BLOCK
        if not length:
            return
        tokens = tuple(tokens)
        fresh: list[mx.array] = []
        with self._pinned() as path:
            block = self.tree.root(namespace)
            for start in range(0, length, BLOCK):
                placed = self._place(block, tokens[start : min(start + BLOCK, length)], state, row, start, fresh)
                if placed is None:
                    self.counts.refused += 1
                    break
                path.append(placed)
                placed.refs += 1
                block = placed
                if boundary is not None and placed.end > boundary:
                    placed.tails.add((boundary, len(tokens)))
            else:
                if not can_cut:
                    self._checkpoint(block, length, state.uncut(row), fresh)
            if fresh:
                # A spare buffer may be up to twice as large as what is put into it, and would stay so as long as the cache holds it.
                mx.clear_cache()
                mx.eval(fresh)
            for one in self._news:
                one.is_local = is_local
            self._pass_on()
        self.retention.tidy(self.num_blocks + self.num_checkpoints)
        self._give_back()

    def adopt(
        self,
        namespace: str,
        path: Sequence[Adopted],
        checkpoint: tuple[int, Mapping[int, LayerSnapshot]] | None = None,
    ) -> None:
        """Take back what a slower tier kept: blocks one after another from the first on, and a checkpoint at a position on the last.

        Arrays must be evaluated. Stops at a block that neither is here nor comes, or has no room.
        """
        published = self.counts.published_tokens
        with self._pinned() as pinned:
            block = self.tree.root(namespace)
            for one in path:
                placed = self._adopted(block, one)
                if placed is None:
                    break
                pinned.append(placed)
                placed.refs += 1
                block = placed
            else:
                if checkpoint is not None and block.start < checkpoint[0] <= block.end:
                    self._checkpoint(block, checkpoint[0], dict(checkpoint[1]), [])
            self._news.clear()
        self.counts.published_tokens = published
        self.retention.tidy(self.num_blocks + self.num_checkpoints)
        self._give_back()

    def demote(self, used_before: float) -> int:
        """Give up what was last used before this monotonic time and would not be lost; how many entries that were."""
        below, count = self.below, 0
        if below is None:
            return 0
        while True:
            idle = [
                one
                for one in self.entries()
                if not one.is_local and one.used_at < used_before and may_go(one) and below.holds(one)
            ]
            for entry in idle:
                # A block without all its layers goes with the checkpoint that needed it.
                if may_go(entry):
                    self._evict(entry)
                    count += 1
            if not idle:
                break
        self._give_back()
        return count

    def entries(self) -> list[Block | Checkpoint]:
        """All that is held."""
        blocks = [block for root in self.tree.roots.values() for block in _below(root) if not block.is_ghost]
        return [*(one for block in blocks for one in block.checkpoints.values()), *blocks]

    def entries_of(self, namespace: str, tokens: Sequence[int]) -> list[Block | Checkpoint]:
        """What the longest state of these tokens is made of."""
        _, blocks, checkpoint = self.tree.walk(namespace, tokens).usable(len(tokens))
        return [*blocks, checkpoint] if checkpoint is not None else list(blocks)

    def allow(self, num_bytes: int) -> None:
        """Hold no more than this for now (and never more than `max_bytes`): memory that rows need is given up at once."""
        self.allowed = max(0, min(num_bytes, self.max_bytes))
        self._make_room(0, 0)
        self._give_back()

    def shed(self, num_bytes: int) -> None:
        """Give up so much now, or as much as can go; later publications may take it again."""
        allowed = self.allowed
        self.allowed = max(0, self.num_bytes - num_bytes)
        self._make_room(0, 0)
        self.allowed = allowed
        self._give_back()

    def clear(self) -> None:
        """Forget everything."""
        for entry in self.entries():
            # The tree's blocks hold each other: their pages would go only when the interpreter finds that out.
            if isinstance(entry, Block):
                entry.drop_parts()
        self.tree = Tree()
        self.retention = Retention(self.policy)
        self.num_bytes = self.num_arrays = self.num_blocks = self.num_checkpoints = 0
        self.version += 1
        self._news.clear()
        mx.clear_cache()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the books disagree with what the tree holds."""
        entries = self.entries()
        blocks = [one for one in entries if isinstance(one, Block)]
        checkpoints = [one for one in entries if isinstance(one, Checkpoint)]
        have = len(blocks), len(checkpoints), sum(e.num_bytes for e in entries), sum(e.num_arrays for e in entries)
        said = self.num_blocks, self.num_checkpoints, self.num_bytes, self.num_arrays
        if have != said:
            raise RuntimeError(
                f"the prefix cache holds {have} blocks, checkpoints, bytes and arrays, its books say {said}"
            )
        if self.num_bytes > self.allowed or self.num_arrays > self.max_arrays:
            raise RuntimeError(f"the prefix cache holds {self.num_bytes} bytes, {self.allowed} are allowed")
        for block in blocks:
            refs = len(block.checkpoints) + sum(not child.is_ghost for child in block.children.values())
            if block.refs != refs:
                raise RuntimeError(f"a block at {block.start} has {block.refs} references, {refs} are known")
            if block.parent is not None and block.parent.parent is not None and block.parent.is_ghost:
                raise RuntimeError(f"the block at {block.start} hangs on one whose state is gone")

    # Placing

    def _place(
        self, parent: Block, tokens: tuple[int, ...], state: BatchState, row: int, start: int, fresh: list[mx.array]
    ) -> Block | None:
        """The block under `parent` that holds the state of these tokens, made if there is none; None when there is no room."""
        block = self.tree.child(parent, tokens)
        if block is None or block.is_ghost:
            block = self._covering(parent, tokens, state, row) or block
        if block is not None and not block.is_ghost and not _lacks(block, state, row):
            self.retention.touch(block)
            return block
        parts = state.cut(row, start, start + len(tokens))
        if block is not None and not block.is_ghost:
            # A window that had wrapped when the block was taken has not at this length.
            parts = [mine if mine is not None else new for mine, new in zip(block.parts, parts, strict=True)]
        return self._insert(parent, block, tokens, parts, fresh)

    def _adopted(self, parent: Block, one: Adopted) -> Block | None:
        """The block under `parent` that holds what comes, or more."""
        block = self.tree.child(parent, one.tokens)
        held = block is not None and not block.is_ghost
        if one.layers is None:
            return block if held else None
        if block is not None and held and all(block.parts[i] is not None for i in one.layers):
            return block
        n = len(one.tokens)
        for child in parent.children.values():
            longer = not child.is_ghost and len(child.tokens) > n and child.tokens[:n] == one.tokens
            if longer and all(child.parts[i] is not None for i in one.layers):
                return child
        mine = block.parts if block is not None and held else [None] * one.count
        parts = [part if part is not None else one.layers.get(i) for i, part in enumerate(mine)]
        if self.pages is not None and n == BLOCK:
            parts = list[LayerPart | None](self.pages.imported([part for part in parts if part is not None]))
        return self._insert(parent, block, one.tokens, parts, [])

    def _insert(
        self,
        parent: Block,
        block: Block | None,
        tokens: tuple[int, ...],
        parts: list[LayerPart | None],
        fresh: list[mx.array],
    ) -> Block | None:
        """Give a block, made if there is none, these parts; None when there is no room."""
        new = [part for part in parts if part is not None]
        added = [a for part in new for a in part.owned]
        before = (block.num_bytes, block.num_arrays) if block is not None else (0, 0)
        if block is not None:
            block.refs += 1
        room = self._make_room(sum(part.nbytes for part in new) - before[0], len(added) - before[1])
        if block is not None:
            block.refs -= 1
        if not room:
            return None
        if block is None and (block := self.tree.add(parent, tokens)) is None:
            return None
        if block.is_ghost:
            self.tree.ghosts.pop(block, None)
            self.num_blocks += 1
            self.counts.published_tokens += len(tokens)
            parent.refs += 1
        block.set_parts(parts)
        self.num_bytes += block.num_bytes - before[0]
        self.num_arrays += block.num_arrays - before[1]
        fresh += added
        self.version += 1
        self._news.append(block)
        self.retention.touch(block)
        self._supersede(parent, block)
        return block

    def _covering(self, parent: Block, tokens: tuple[int, ...], state: BatchState, row: int) -> Block | None:
        """A longer block that begins with these tokens and holds all that could be kept of them."""
        n = len(tokens)
        for child in parent.children.values():
            longer = not child.is_ghost and len(child.tokens) > n and child.tokens[:n] == tokens
            if longer and not _lacks(child, state, row):
                return child
        return None

    def _supersede(self, parent: Block, block: Block) -> None:
        """Drop shorter blocks that `block` begins with; their checkpoints move to it."""
        for child in list(parent.children.values()):
            n = len(child.tokens)
            if child is block or n >= len(block.tokens) or block.tokens[:n] != child.tokens:
                continue
            if not child.is_ghost:
                if any(old is not None and new is None for old, new in zip(child.parts, block.parts, strict=True)):
                    continue
                if child.refs > len(child.checkpoints):
                    continue
                self._forget(child)
                parent.refs -= 1
            for position, checkpoint in child.checkpoints.items():
                if position in block.checkpoints:
                    self._forget(checkpoint)
                else:
                    checkpoint.block = block
                    block.checkpoints[position] = checkpoint
                    block.refs += 1
            child.checkpoints = {}
            block.lost |= child.lost
            block.tails |= child.tails
            child.drop_parts()
            self.tree.remove(child)

    def _checkpoint(self, block: Block, position: int, layers: dict[int, LayerSnapshot], fresh: list[mx.array]) -> None:
        if position in block.checkpoints:
            self.retention.touch(block.checkpoints[position])
            return
        checkpoint = Checkpoint(block, position, layers)
        if not self._make_room(checkpoint.num_bytes, checkpoint.num_arrays):
            self.counts.refused += 1
            return
        block.checkpoints[position] = checkpoint
        block.lost.discard(position)
        block.refs += 1
        self.num_checkpoints += 1
        self.num_bytes += checkpoint.num_bytes
        self.num_arrays += checkpoint.num_arrays
        self.version += 1
        self._news.append(checkpoint)
        self.retention.touch(checkpoint)
        fresh += [a for layer in layers.values() for a in layer.arrays.values()]

    def _pass_on(self) -> None:
        """Tell the slower tier what came, of what is still here."""
        if self.below is not None:
            for one in self._news:
                if not one.is_local and (isinstance(one, Checkpoint) or not one.is_ghost):
                    self.below.keep(one)
        self._news.clear()

    @contextmanager
    def _pinned(self) -> Generator[list[Block]]:
        """Blocks appended to the list (by whoever adds one to their `refs`) can't be evicted until the end."""
        path: list[Block] = []
        try:
            yield path
        finally:
            for block in reversed(path):
                self._release(block)

    # Evicting

    def _make_room(self, num_bytes: int, num_arrays: int) -> bool:
        """Evict until so much more can be held. False if that is impossible."""
        if num_bytes > self.allowed or num_arrays > self.max_arrays:
            return False
        while self.num_bytes + num_bytes > self.allowed or self.num_arrays + num_arrays > self.max_arrays:
            entry = self.retention.next()
            if entry is None:
                return False
            self._evict(entry)
        return True

    def _evict(self, entry: Entry) -> None:
        self.version += 1
        self.counts.evictions += 1
        self.counts.evicted_bytes += entry.num_bytes
        if isinstance(entry, Checkpoint):
            self._spill(entry)
            self._forget(entry)
            del entry.block.checkpoints[entry.position]
            entry.block.lost.add(entry.position)
            self._release(entry.block)
        elif isinstance(entry, Block):
            self._drop(entry)

    def _drop(self, block: Block) -> None:
        """The block's state goes, its tokens stay as a ghost."""
        self._spill(block)
        self._forget(block)
        block.drop_parts()
        self.tree.haunt(block)
        if block.parent is not None:
            self._release(block.parent)

    def _release(self, block: Block) -> None:
        """One need less of a block."""
        block.refs -= 1
        if block.refs or block.is_ghost or block.parent is None:
            return
        if block.is_complete:
            self.retention.offer(block)
        else:
            # Nothing can be made of it without a checkpoint further on.
            self._drop(block)

    def _spill(self, entry: Block | Checkpoint) -> None:
        # What came in the publication that makes room isn't evaluated yet, and is pinned anyway.
        if self.below is not None and not entry.is_local and entry not in self._news:
            self.below.spill(entry)

    def _forget(self, entry: Block | Checkpoint) -> None:
        """Take an entry's size off the books."""
        if isinstance(entry, Checkpoint):
            self.num_checkpoints -= 1
            # The order of eviction may name it for a while yet.
            entry.layers = {}
        else:
            self.num_blocks -= 1
        self.num_bytes -= entry.num_bytes
        self.num_arrays -= entry.num_arrays
        self._since_clear += entry.num_bytes

    def _give_back(self) -> None:
        """Return buffers to the system after large evictions: MLX would keep them for reuse."""
        if self._since_clear >= min(CLEAR_BYTES, max(1, self.max_bytes // 4)):
            mx.clear_cache()
            self._since_clear = 0
            self.counts.buffer_returns += 1


def _lacks(block: Block, state: BatchState, row: int) -> bool:
    """The row could give a layer's part that the block doesn't have."""
    length = state.lengths[row]
    return any(part is None and layer.can_cut(length) for part, layer in zip(block.parts, state.layers, strict=True))


def _below(root: Block) -> Iterable[Block]:
    for child in root.children.values():
        yield child
        yield from _below(child)
