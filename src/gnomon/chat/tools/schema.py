"""The offered tools and what their parameters may be, as far as reading a call needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

STRING = frozenset({"string"})
"""The types of a parameter that is a string and nothing else."""
MAX_DEPTH = 32
"""Schemas within schemas that are followed to find a parameter's types."""

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """`tools` in OpenAI's shape: `{"type": "function", "function": {"name", "parameters"}}`."""
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = _mapping(tool.get("function"))
            if isinstance(name := function.get("name"), str):
                self._schemas[name] = _mapping(function.get("parameters"))

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __len__(self) -> int:
        return len(self._schemas)

    def types(self, tool: str, parameter: str) -> frozenset[str] | None:
        """JSON Schema's names of the types a parameter may have: empty if it has none, None if there is no such parameter."""
        schema = self._schemas.get(tool, {})
        found = _mapping(schema.get("properties")).get(parameter)
        if found is None:
            found = schema.get("additionalProperties")
        return _types(found, schema, set(), MAX_DEPTH) if isinstance(found, dict) else None


def _types(part: Any, root: Mapping[str, Any], followed: set[str], left: int) -> frozenset[str]:
    """Each reference is followed once, so that the work is bounded by the schema's size."""
    if not isinstance(part, dict) or left == 0:
        return frozenset()
    schema = cast("dict[str, Any]", part)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference in followed:
            return frozenset()
        followed.add(reference)
        return _types(resolve(reference, root), root, followed, left - 1)
    declared = schema.get("type")
    found: set[str] = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found |= {one for one in cast("list[Any]", declared) if isinstance(one, str)}
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found |= {kind_of(one) for one in cast("list[Any]", values)}
    if not found and "const" in schema:
        found.add(kind_of(schema["const"]))
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        for choice in cast("Sequence[Any]", choices) if isinstance(choices, list) else ():
            found |= _types(choice, root, followed, left - 1)
    return frozenset(found)


def kind_of(value: Any) -> str:
    """JSON Schema's name of a value's type."""
    return next(name for kind, name in _KINDS if isinstance(value, kind))


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer leads to; an empty mapping where it leads nowhere."""
    found: Any = root
    for step in reference[2:].split("/"):
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
