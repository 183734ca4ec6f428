"""What a request may demand of the form of its answer: read from its fields, checked, and told to the model when it can't be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

MAX_CHOICES = 4096
MAX_SOURCE = 4 << 20
"""Characters of a schema or grammar."""
MAX_DEPTH = 100
"""Levels of a schema: its grammar is built by recursion."""

FORMATS = ("text", "json_object", "json_schema")
FIELDS = ("response_format", "guided_json", "guided_grammar", "guided_regex", "guided_choice", "structured_outputs")
"""Fields of a request that `from_fields` reads."""

_OUTPUTS = ("grammar", "json", "json_object", "regex", "choice")
_OUTPUT_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern")

Kind = Literal["json", "regex", "choice", "grammar"]


class ConstraintError(ValueError):
    """A demand that makes no sense. `param` says where."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form an answer must have.

    `source` is JSON text of a schema (`json`) or of a list of strings (`choice`), a regular expression that matches the whole answer
    (`regex`), or a Lark or GBNF grammar (`grammar`). JSON is compact, with at most one space behind a comma or colon, unless
    `any_whitespace`. `strict` demands are refused when they can't be enforced. `param` is the request's field. `turn` tells that the
    grammar holds from the turn's first token, reasoning included, and not from where the answer begins.
    """

    kind: Kind
    source: str
    any_whitespace: bool = False
    strict: bool = False
    param: str = "response_format"
    turn: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether the demand is known to be well formed, so that an engine that can't compile it is what falls short."""
        if self.kind != "regex":
            return self.kind != "grammar"
        try:
            re.compile(self.source)
        except (re.error, OverflowError, RecursionError):
            return False
        return True


def json_object(*, any_whitespace: bool = False, param: str = "response_format") -> Constraint:
    """Any JSON object."""
    return Constraint("json", '{"type":"object"}', any_whitespace, param=param)


def json_schema(
    schema: Any, *, any_whitespace: bool = False, strict: bool = False, param: str = "response_format"
) -> Constraint:
    """JSON that a schema accepts: an object or boolean, or its JSON text. Raises ConstraintError saying where it is no schema."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"{param} is not valid JSON: {error}", param) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConstraintError(f"{param} must be a JSON schema, got {_show(schema)}", param)
    check_schema(cast("dict[str, Any]", schema), param)
    return Constraint("json", _source(json.dumps(schema), param), any_whitespace, strict, param)


def regex(pattern: Any, param: str = "guided_regex") -> Constraint:
    """Text that a regular expression matches as a whole. Raises ConstraintError."""
    return Constraint("regex", _source(_text(pattern, param), param), param=param)


def choice(options: Any, param: str = "guided_choice") -> Constraint:
    """One of some strings. Raises ConstraintError."""
    if not isinstance(options, Sequence) or isinstance(options, str):
        raise ConstraintError(f"{param} must be a list of str, got {_show(options)}", param)
    texts = [_text(option, f"{param}[{i}]") for i, option in enumerate(cast("Sequence[Any]", options))]
    if not texts or len(texts) > MAX_CHOICES:
        raise ConstraintError(f"{param} must have 1 to {MAX_CHOICES} strings, got {len(texts)}", param)
    return Constraint("choice", _source(json.dumps(texts, ensure_ascii=False), param), param=param)


def grammar(text: Any, param: str = "guided_grammar") -> Constraint:
    """Text that a grammar derives, in Lark's or GBNF's notation. Raises ConstraintError."""
    return Constraint("grammar", _source(_text(text, param), param), param=param)


def from_fields(fields: Mapping[str, Any]) -> Constraint | None:
    """What a request's fields (those in `FIELDS`; None is absent) demand, None if nothing.

    Of several the first counts: guided_grammar, a json_schema, guided_json, json_object, structured_outputs, guided_regex,
    guided_choice. Raises ConstraintError for a field of a wrong shape, whether or not another outranks it.
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    form = _response_format(given["response_format"]) if "response_format" in given else None
    object_only = form is not None and given["response_format"]["type"] == "json_object"
    ranked = (
        grammar(given["guided_grammar"]) if "guided_grammar" in given else None,
        None if object_only else form,
        json_schema(given["guided_json"], param="guided_json") if "guided_json" in given else None,
        form,
        _structured_outputs(given["structured_outputs"]) if "structured_outputs" in given else None,
        regex(given["guided_regex"]) if "guided_regex" in given else None,
        choice(given["guided_choice"]) if "guided_choice" in given else None,
    )
    return next((found for found in ranked if found is not None), None)


def instruction(constraint: Constraint) -> str:
    """What a model is told of a demand that is not enforced, or not in full."""
    source = constraint.source
    match constraint.kind:
        case "json":
            any_object = source == '{"type":"object"}'
            schema = "" if any_object else f" that is valid under this JSON schema:\n{source}"
            return f"Answer with a JSON {'object' if any_object else 'value'} and nothing else{schema or '.'}"
        case "regex":
            return f"Answer with text that this regular expression matches as a whole, and nothing else:\n{source}"
        case "choice":
            return f"Answer with exactly one of these strings, without its quotes, and nothing else:\n{source}"
        case "grammar":
            return f"Answer with text that this grammar derives, and nothing else:\n{source}"


def _response_format(form: Any) -> Constraint | None:
    kind: Any = cast("dict[str, Any]", form).get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in FORMATS:
        wanted = ", ".join(f'"{name}"' for name in FORMATS)
        raise ConstraintError(
            f"response_format must be an object with type {wanted}, got {_show(form)}", "response_format"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object()
    where = "response_format.json_schema"
    body: Any = cast("dict[str, Any]", form).get("json_schema")
    if not isinstance(body, dict) or cast("dict[str, Any]", body).get("schema") is None:
        raise ConstraintError(f"{where} must be an object with a schema, got {_show(body)}", where)
    body = cast("dict[str, Any]", body)
    return json_schema(
        body["schema"],
        any_whitespace=_flag(body, "any_whitespace", where),
        strict=_flag(body, "strict", where),
        param=f"{where}.schema",
    )


def _structured_outputs(given: Any) -> Constraint:
    """A bare schema, or vLLM's object that names one kind of demand."""
    where = "structured_outputs"
    names = cast("dict[str, Any]", given).keys() if isinstance(given, dict) else ()
    if not names or not all(name in _OUTPUTS or name in _OUTPUT_OPTIONS for name in names):
        return json_schema(given, param=where)
    given = cast("dict[str, Any]", given)
    wanted = [name for name in _OUTPUTS if given.get(name) not in (None, False)]
    if len(wanted) != 1:
        raise ConstraintError(f"{where} must have exactly one of {', '.join(_OUTPUTS)}, got {_show(given)}", where)
    name, value, param = wanted[0], given[wanted[0]], f"{where}.{wanted[0]}"
    match name:
        case "json":
            return json_schema(value, param=param)
        case "json_object":
            return json_object(param=param)
        case "regex":
            return regex(value, param)
        case "choice":
            return choice(value, param)
        case _:
            return grammar(value, param)


def _flag(body: Mapping[str, Any], name: str, where: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConstraintError(f"{where}.{name} must be of type bool, got {_show(value)}", f"{where}.{name}")
    return bool(value)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise ConstraintError(f"{param} must be of type str, got {_show(value)}", param)
    return value


def _source(text: str, param: str) -> str:
    if len(text) > MAX_SOURCE:
        raise ConstraintError(f"{param} must have at most {MAX_SOURCE} characters, got {len(text)}", param)
    return text


def _check_depth(schema: Any, param: str) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ConstraintError(f"{param} must have at most {MAX_DEPTH} levels", param)
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (cast("dict[str, Any]", node).values() if isinstance(node, dict) else cast("list[Any]", node))
        ]


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raise ConstraintError with the place of the first thing that is wrong: against its draft's own schema, or a dangling reference."""
    _check_depth(schema, param)
    # Takes a tenth of a second to import, which only such requests need.
    from jsonschema import Draft202012Validator, FormatChecker, validators
    from jsonschema.exceptions import SchemaError

    named: Any = schema.get("$schema")
    chosen: Any = validators.validator_for(schema, default=Draft202012Validator) if isinstance(named, str) else None
    checker = FormatChecker(formats=())
    checker.checks("regex", raises=(re.error, OverflowError, RecursionError))(_is_pattern)
    try:
        (chosen or Draft202012Validator).check_schema(schema, format_checker=checker)
    except SchemaError as error:
        where = _path(param, error.absolute_path)
        raise ConstraintError(f"{where} is not valid in a JSON schema: {_cut(error.message)}", where) from None
    for path, reference in _references(schema, (), "$id" in schema):
        if not _resolves(schema, reference):
            where = _path(param, path)
            raise ConstraintError(f"{where}: nothing is at {_show(reference)}", where)


def _is_pattern(pattern: object) -> bool:
    """Whether this reads as a regular expression: Python's notation, and what only ECMA's has. Raises re.error."""
    if isinstance(pattern, str):
        re.compile(re.sub(r"\\[pP]\{[^}]*\}|\\c[A-Za-z]", "x", pattern))
    return True


def _references(node: Any, path: tuple[str | int, ...], based: bool) -> list[tuple[tuple[str | int, ...], str]]:
    """Every reference within the document by JSON pointer, with its place; those under another base identity are left out."""
    if isinstance(node, list):
        parts = [_references(item, (*path, i), based) for i, item in enumerate(cast("list[Any]", node))]
        return [found for part in parts for found in part]
    if not isinstance(node, dict) or (path and "$id" in node):
        return []
    found: list[tuple[tuple[str | int, ...], str]] = []
    for key, value in cast("dict[str, Any]", node).items():
        if key == "$ref" and isinstance(value, str):
            if value == "#" or value.startswith("#/"):
                found.append(((*path, key), value))
        elif key not in ("const", "enum", "default", "examples"):
            found += _references(value, (*path, key), based)
    return found


def _resolves(schema: Any, pointer: str) -> bool:
    from urllib.parse import unquote

    node: Any = schema
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = cast("dict[str, Any]", node)[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(cast("list[Any]", node)):
            node = cast("list[Any]", node)[int(key)]
        else:
            return False
    return True


def _path(param: str, path: Any) -> str:
    return param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def _show(value: Any) -> str:
    try:
        return _cut(json.dumps(value, ensure_ascii=False, default=repr), 80)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
