"""How far a prompt is known in a directory, told from the files' headers alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.state.ssd.format import Entry
from gnomon.state.ssd.manifest import Listed

SHOWN = 12


@dataclass(frozen=True, slots=True)
class Known:
    """What one namespace of one identity has of a prompt: `usable` tokens have a state, `known` are in some file. `ours` and `theirs` are
    the tokens from there on."""

    identity: str
    namespace: str
    usable: int
    known: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    why: str


def explain(listed: Sequence[Listed], tokens: Sequence[int]) -> list[Known]:
    """For every namespace that knows some of the tokens, the most first."""
    tokens = tuple(tokens)
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for one in listed:
        groups[one.entry.identity, one.entry.namespace].append(one.entry)
    told = [_known(identity, namespace, entries, tokens) for (identity, namespace), entries in groups.items()]
    return sorted((one for one in told if one.known), key=lambda one: (one.usable, one.known), reverse=True)


def _known(identity: str, namespace: str, entries: Sequence[Entry], tokens: tuple[int, ...]) -> Known:
    below: dict[bytes, list[Entry]] = defaultdict(list)
    for entry in entries:
        below[entry.parent].append(entry)
    parent, path = bytes.fromhex(namespace), list[Entry]()
    usable = known = 0
    theirs: tuple[int, ...] = ()
    while True:
        start = path[-1].end if path else 0
        follow: Entry | None = None
        for entry in below[parent]:
            n = _common(entry.tokens, tokens[start:])
            if start + n > known or (start + n == known and not theirs):
                known, theirs = start + n, entry.tokens[n:]
            if entry.kind == "block":
                if len(entry.layers) == entry.count and all(len(one.layers) == one.count for one in path):
                    usable = max(usable, min(start + n, len(tokens) - 1))
                if n == len(entry.tokens) and (follow is None or len(entry.layers) > len(follow.layers)):
                    follow = entry if below.get(entry.key) else follow
            elif n == len(entry.tokens) and entry.end < len(tokens) and _is_complete(entry, [*path, *below[parent]]):
                usable = max(usable, entry.end)
        if follow is None:
            break
        path.append(follow)
        parent = follow.key
    if usable >= len(tokens) - 1:
        why = "all but the last token have a state"
    elif usable < known:
        why = f"the tokens from {usable} to {known} are known, but no file holds a state between them"
    elif theirs:
        why = f"from token {known} on the nearest stored prompt has other tokens"
    else:
        why = f"nothing stored goes on after token {known}"
    return Known(identity, namespace, usable, known, tokens[known : known + SHOWN], theirs[:SHOWN], why)


def _is_complete(checkpoint: Entry, blocks: Sequence[Entry]) -> bool:
    """The blocks before a checkpoint, and one that begins with its tokens, hold the layers that it doesn't."""
    rest = set(range(checkpoint.count)) - set(checkpoint.layers)

    def has(entry: Entry) -> bool:
        return entry.kind == "block" and rest.issubset(entry.layers)

    before = [entry for entry in blocks if entry.end <= checkpoint.start]
    n = len(checkpoint.tokens)
    beside = [one for one in blocks if one.start == checkpoint.start and one.tokens[:n] == checkpoint.tokens]
    return all(map(has, before)) and any(map(has, beside))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
