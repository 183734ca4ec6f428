"""Tool calls that a request insists on, as a grammar in the model's own notation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gnomon.chat.constraint import Constraint, ConstraintError, check_schema
from gnomon.chat.tools import ToolFormat
from gnomon.chat.tools.tagged import Tagged

NOTATIONS = ("json", "nemotron", "qwen_xml")
"""Formats whose tags are text and whose calls may be JSON objects."""
PARAM = "tool_choice"


def tool_call(
    format: ToolFormat | None, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, single: bool = False
) -> Constraint:
    """Demands one call or more (`single`: exactly one) of these tools, or of the one called `name`, with arguments by its schema.

    `tools` are OpenAI's. Keywords that can't be enforced count only in `strict` tools. Raises ConstraintError.
    """
    if not isinstance(format, Tagged) or format.name not in NOTATIONS:
        notation = "none" if format is None else format.name
        raise ConstraintError(f"{PARAM} can't be enforced in this model's notation of calls ({notation})", PARAM)
    functions = [cast("Mapping[str, Any]", tool["function"]) for tool in tools]
    chosen = [(i, function) for i, function in enumerate(functions) if name in (None, function["name"])]
    if not chosen:
        known = ", ".join(str(function["name"]) for function in functions) or "none"
        about = "a call" if name is None else f"a call of {name!r}"
        raise ConstraintError(f"{PARAM} demands {about}, but the tools are: {known}", PARAM)
    one_of = " | ".join(f"c{i}" for i, _ in chosen)
    opened, closed = _literal(f"{format.openers[0]}\n"), _literal(f"\n{format.close}")
    rules = [
        "%llguidance {}",
        "start: call" if single else 'start: call ("\\n" call)*',
        f"call: {opened} ({one_of}) {closed}",
    ]
    for i, function in chosen:
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        schema = _arguments(function, f"tools[{i}].function.parameters")
        rules += [f'c{i}: {_literal(head)} a{i} "}}"', f"a{i}: %json {json.dumps(schema)}"]
    strict = any(function.get("strict") for _, function in chosen)
    return Constraint("grammar", "\n".join(rules), strict=strict, param=PARAM)


def _arguments(function: Mapping[str, Any], param: str) -> dict[str, Any]:
    schema: dict[str, Any] = dict(function.get("parameters") or {})
    check_schema(schema, param)
    exact = bool(function.get("strict"))
    spacing = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    return {
        "type": "object",
        **schema,
        "x-guidance": {**spacing, "lenient": not exact, "coerce_one_of": not exact},
    }


def _literal(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
