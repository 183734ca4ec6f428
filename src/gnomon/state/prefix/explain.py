"""Why a prompt did not match further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gnomon.state.prefix.tree import Tree, Walk

Kind = Literal["edited text", "template tail", "namespace", "evicted", "uncuttable state", "unread", "no entry"]
CONTEXT = 12
"""Tokens shown before and after the place."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The first token that had to be computed although more was hoped for, and why.

    `edited text`: the nearest stored prompt has other tokens from `position` on. `template tail`: the same, where one of the two sides was
    written by the template to open an answer. `namespace`: the tokens go on equal under another identity. `evicted`: the state was
    held once. `uncuttable state`: the tokens are known, but some layer's state exists only at other positions. `unread`: the state is on
    disk and could not be read in, or had no room in memory. `no entry`: nothing stored begins like this prompt. `before`, `ours` and
    `theirs` are token ids around `position`.
    """

    kind: Kind
    position: int
    reused: int
    prompt_tokens: int
    before: tuple[int, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def told(self, decode: Callable[[Sequence[int]], str]) -> dict[str, object]:
        """As plain JSON, both sides decoded in context."""
        return {
            "kind": self.kind,
            "position": self.position,
            "reused_tokens": self.reused,
            "prompt_tokens": self.prompt_tokens,
            "before": decode(self.before),
            "prompt": decode(self.ours),
            "stored": decode(self.theirs),
        }


def explain(
    tree: Tree, namespace: str, tokens: Sequence[int], walk: Walk, reused: int, boundary: int | None
) -> Miss | None:
    """Why no more than `reused` tokens of a prompt are lent; None if nothing is amiss: all but the last token were lent, or everything
    that is stored of it. `boundary` is where the prompt's template opens the answer."""
    limit = len(tokens) - 1
    matched = walk.matched
    if reused >= limit:
        return None

    def miss(kind: Kind, position: int, theirs: Sequence[int]) -> Miss:
        start = max(0, position - CONTEXT)
        ours = tuple(tokens[position : position + CONTEXT])
        return Miss(kind, position, reused, len(tokens), tuple(tokens[start:position]), ours, tuple(theirs))

    tails = [span for block in [*walk.whole[-1:], *(block for block, _ in walk.ends)] for span in block.tails]
    if boundary is not None:
        tails.append((boundary, len(tokens)))
    # Where the difference lies in a tail that the template wrote, state before the tail is all that could be hoped for.
    in_tail = matched < limit and any(start <= reused and start <= matched < stop for start, stop in tails)
    if reused < min(matched, limit) and not in_tail:
        kind: Kind = "evicted" if walk.lost(reused, matched) else "uncuttable state"
        return miss(kind, reused, tokens[reused : min(matched, reused + CONTEXT)])
    elsewhere = max(
        (tree.walk(other, tokens) for other in tree.roots if other != namespace), key=lambda w: w.matched, default=None
    )
    if elsewhere is not None and elsewhere.matched > matched:
        return miss("namespace", matched, tokens[matched : min(elsewhere.matched, matched + CONTEXT)])
    nearest = walk.nearest() or (walk.whole[-1] if walk.whole else tree.roots.get(namespace))
    theirs = nearest.following(matched, CONTEXT) if nearest is not None else ()
    if not matched:
        return miss("no entry", 0, theirs)
    if not theirs:
        return None
    return miss("template tail" if in_tail else "edited text", matched, theirs)
