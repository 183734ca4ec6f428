"""Tool calls that a request insists on, or whose arguments must be exact, as a grammar in the model's own notation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gnomon.chat.constraint import Constraint, ConstraintError, check_schema
from gnomon.chat.tools import ToolFormat
from gnomon.chat.tools.rules import Function, Inexpressible, Rules, Split

PARAM = "tool_choice"


class Unwritable(ConstraintError):
    """A demand that makes sense, but that no grammar of this model's notation tells."""


def plain(text: str) -> Sequence[str | int]:
    """The split of a vocabulary without special tokens."""
    return (text,) if text else ()


def tool_call(
    format: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    required: bool = True,
    single: bool = False,
    answer: Constraint | None = None,
    split: Split = plain,
) -> Constraint:
    """Demands one call or more (`single`: exactly one) of these tools, or of the one called `name`, with arguments by its schema.

    Unless `required` the model may also answer in prose, or in the form of `answer`, which must be JSON. `tools` are OpenAI's.
    Keywords that can't be enforced count only in `strict` tools. Raises ConstraintError, and Unwritable where only the notation is
    in the way.
    """
    functions = [cast("Mapping[str, Any]", tool["function"]) for tool in tools]
    chosen = [(i, function) for i, function in enumerate(functions) if name in (None, function["name"])]
    if not chosen:
        known = ", ".join(str(function["name"]) for function in functions) or "none"
        about = "a call" if name is None else f"a call of {name!r}"
        raise ConstraintError(f"{PARAM} demands {about}, but the tools are: {known}", PARAM)
    offered = [_function(function, f"tools[{i}].function") for i, function in chosen]
    strict = any(function.exact for function in offered)
    if format is None:
        raise Unwritable("this model's notation of calls is not known", PARAM if required else "tools")
    g = Rules(split)
    try:
        said = None if answer is None else g.answer(answer.source, answer.any_whitespace, exact=answer.strict)
        start = format.turn(g, offered, required=required, single=single, answer=said)
    except Inexpressible as error:
        raise Unwritable(str(error), error.param) from error
    source = g.source(start)
    return Constraint("grammar", source, strict=strict, param=PARAM if required else "tools", turn=format.whole_turn)


def _function(function: Mapping[str, Any], path: str) -> Function:
    schema: dict[str, Any] = dict(function.get("parameters") or {})
    check_schema(schema, f"{path}.parameters")
    return Function(str(function["name"]), schema, bool(function.get("strict")), path)
