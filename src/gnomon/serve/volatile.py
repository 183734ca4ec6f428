"""Lines that known clients put at the front of a system prompt, that change with every request and mean nothing to a model.

Left where they are, no request would share its beginning with the one before. They are moved out of the prompt; the response header
`x-gnomon-moved` names what was. `--no-stable-prompts` leaves prompts as they come.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEADER = "x-gnomon-moved"


@dataclass(frozen=True, slots=True)
class Volatile:
    """A kind of line, by the name the header tells. `pattern` matches at the very beginning of a system prompt only."""

    name: str
    pattern: re.Pattern[str]


KNOWN = (
    # "x-anthropic-billing-header: cc_version=2.1.15.f5c; cc_entrypoint=cli; cch=0f5c1;", on its own line or run into the next block.
    Volatile("anthropic-billing", re.compile(r"x-anthropic-billing-header:(?:[ \t]*[a-z_]+=[^;\n]*;)+[ \t]*\n*")),
)


def settle(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The messages with the first system prompt freed of known lines, and the names of those. Only text is looked at, and only where a
    prompt begins; a prompt that is nothing else is left alone."""
    settled = [dict(message) for message in messages]
    if not settled or settled[0].get("role") not in ("system", "developer"):
        return settled, ()
    text, moved = settled[0].get("content"), dict[str, None]()
    if not isinstance(text, str):
        return settled, ()
    while found := next(((one, m) for one in KNOWN if (m := one.pattern.match(text))), None):
        moved[found[0].name] = None
        text = text[found[1].end() :]
    if not text:
        return settled, ()
    settled[0]["content"] = text
    return settled, tuple(moved)
