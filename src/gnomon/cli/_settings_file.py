"""Putting something into another program's settings without losing what was there: merged, kept beside, and replaced in one step."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

BEGIN = "# gnomon connect: begin"
END = "# gnomon connect: end"


class SettingsError(Exception):
    """A file that can't be changed safely; nothing was written."""


def merged_json(text: str, value: Mapping[str, Any]) -> str:
    """A JSON file's text with `value` merged in: objects key by key, entries of lists by their `id`, anything else replaced.

    Raises SettingsError for text that isn't plain JSON (comments would be lost) or has another shape.
    """
    try:
        old: Any = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise SettingsError(f"it is not plain JSON ({error})") from error
    if not isinstance(old, dict):
        raise SettingsError(f"it holds {type(old).__name__} in place of an object")
    return json.dumps(_merged(cast("dict[str, Any]", old), value, ""), indent=2, ensure_ascii=False) + "\n"


def _merged(old: dict[str, Any], new: Mapping[str, Any], at: str) -> dict[str, Any]:
    result = dict(old)
    for key, value in new.items():
        path = f"{at}.{key}" if at else key
        before = result.get(key)
        if isinstance(value, Mapping) and before is not None:
            if not isinstance(before, dict):
                raise SettingsError(f"{path} is {type(before).__name__} in place of an object")
            result[key] = _merged(cast("dict[str, Any]", before), cast("Mapping[str, Any]", value), path)
        elif isinstance(value, list) and before is not None and _named(cast("list[Any]", value)):
            if not isinstance(before, list):
                raise SettingsError(f"{path} is {type(before).__name__} in place of a list")
            names = {one["id"] for one in cast("list[Any]", value)}
            kept = [one for one in cast("list[Any]", before) if not (isinstance(one, dict) and one.get("id") in names)]
            result[key] = [*kept, *cast("list[Any]", value)]
        else:
            result[key] = value
    return result


def _named(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, dict) and "id" in one for one in value)


def merged_toml(text: str, block: str) -> str:
    """A TOML file's text with `block` (tables only) at its end, in place of the block put there before.

    Raises SettingsError when the text is no TOML, when its other tables say something of the same, or when anything else would change.
    """
    before, begin, rest = text.partition(BEGIN)
    if begin:
        old, end, after = rest.partition(END)
        if not end or BEGIN in old or BEGIN in after:
            raise SettingsError(f"its lines {BEGIN!r} and {END!r} don't match")
        text = before.rstrip("\n") + "\n" + after.lstrip("\n") if before.strip() else after.lstrip("\n")
    gap = "" if not text.strip() else "\n" if text.endswith("\n") else "\n\n"
    result = f"{text if text.strip() else ''}{gap}{BEGIN}\n{block}\n{END}\n"
    try:
        alone, added = tomllib.loads(text), tomllib.loads(block)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"it is not TOML ({error})") from error
    try:
        both = tomllib.loads(result)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"it has a table of the same name already ({error})") from error
    if both != _merged(alone, added, ""):
        raise SettingsError("something else in it would change")
    return result


def new_file(text: str, value: str) -> str:
    """The text of a file that holds nothing else. Raises SettingsError when it does."""
    if text.strip() and text.strip() != value.strip():
        raise SettingsError("it exists, and files of this kind can't be merged here")
    return value.rstrip("\n") + "\n"


def put(path: Path, text: str, *, keep: bool = True) -> Path | None:
    """Write `text` to `path` in one step, through links, and return where the old content is kept, if it was another and is to be.

    A new file is readable by its owner only, as it may hold a key. Raises SettingsError when it can't be written.
    """
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = None
        if target.exists():
            if target.read_text("utf-8") == text:
                return None
            if keep:
                kept = _free(target.with_name(target.name + ".before-gnomon"))
                shutil.copy2(target, kept)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        fresh = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            if target.exists():
                shutil.copymode(target, fresh)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"it can't be written ({error})") from error
    return kept


def _free(path: Path) -> Path:
    """`path`, or with a number where something is kept already."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
