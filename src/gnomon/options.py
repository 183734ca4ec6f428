"""Options as fields of dataclasses: how one is named, parsed, checked and shown, and how argparse takes it."""
# ruff: noqa: ARG002  (argparse fixes the arguments of an action)

from __future__ import annotations

import argparse
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, cast


class ConfigError(ValueError):
    """A flag or variable whose value can't be used. `source` is its name as the user wrote it."""

    def __init__(self, source: str, message: str) -> None:
        super().__init__(f"{source}: {message}")
        self.source = source


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is named on the command line and in the environment, and what values it takes.

    `low` and `high` are inclusive and in the unit the user writes; the stored value is that times `scale`.
    """

    help: str
    flag: str = ""
    aliases: tuple[str, ...] = ()
    env: str = ""
    env_aliases: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    unit: str = ""
    scale: int = 1
    metavar: str = ""
    secret: bool = False

    @property
    def range(self) -> str:
        if self.low is not None and self.high is not None:
            return f"[{self.low:.12g}, {self.high:.12g}]"
        if self.low is not None:
            return f">= {self.low:.12g}"
        return f"<= {self.high:.12g}" if self.high is not None else ""


def option(default: Any, help: str, **how: Any) -> Any:
    """A dataclass field with an `Option`."""
    return field(default=default, metadata={"option": Option(help, **how)})


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of one group, with its type taken apart."""

    group: str
    name: str
    option: Option
    default: Any
    kind: Literal["flag", "switch", "int", "float", "str", "path", "list", "choice"]
    choices: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        return f"{self.group}.{self.name}"

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return self.option.env or "GNOMON_" + self.flag.lstrip("-").replace("-", "_").upper()

    def parse(self, source: str, text: str) -> Any:
        """The value of `text`, or ConfigError naming `source`, the value and what would be taken."""
        if self.kind in ("flag", "switch"):
            return _parse_bool(source, text)
        if self.kind == "choice":
            if text not in self.choices:
                raise ConfigError(source, f"{text!r} is not one of {', '.join(self.choices)}")
            return text
        if self.kind in ("int", "float"):
            return self._parse_number(source, text)
        if not text:
            raise ConfigError(source, "the value is empty")
        return Path(text).expanduser() if self.kind == "path" else text

    def _parse_number(self, source: str, text: str) -> int | float:
        o = self.option
        whole = self.kind == "int" and o.scale == 1
        unit = f" {o.unit}" if o.unit else ""
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            of = f" of {o.unit}" if o.unit else ""
            raise ConfigError(source, f"{text!r} is not {'a whole number' if whole else 'a number'}{of}") from None
        if not math.isfinite(value) or (o.low is not None and value < o.low) or (o.high is not None and value > o.high):
            raise ConfigError(source, f"{text} is out of range: {o.range}{unit}")
        return round(value * o.scale) if self.kind == "int" else value

    def show(self, value: Any) -> str:
        """The value as a user would write it, secrets hidden."""
        if value is None or value == ():
            return "unset"
        if self.option.secret:
            return "(set)"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ", ".join(cast("tuple[str, ...]", value))
        if isinstance(value, int | float):
            return f"{value / self.option.scale:.12g} {self.option.unit}".strip()
        return str(value)


def _parse_bool(source: str, text: str) -> bool:
    # Variables know only 1 and 0, so that a stray "no" can't read as yes; flags also take words.
    words = {"1": True, "0": False}
    if not source.startswith("GNOMON_"):
        words |= {"true": True, "on": True, "false": False, "off": False}
    if text.lower() not in words:
        raise ConfigError(source, f"{text!r} is not one of {', '.join(words)}")
    return words[text.lower()]


def kind_of(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """The `Setting.kind` and the choices of a field with this type."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, Union):
        inner = next(a for a in args if a is not type(None))
        return ("switch" if inner is bool else kind_of(inner)[0]), ()
    if typing.get_origin(hint) is Literal:
        return "choice", args
    if typing.get_origin(hint) is tuple:
        return "list", ()
    return {bool: "flag", int: "int", float: "float", str: "str", Path: "path"}[hint], ()


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as the user wrote it. `text` is None for a value flag with nothing after it: the default holds."""

    flag: str
    text: str | None


class Take(argparse.Action):
    """Keep the spelling with the value; the option's own name wins over its aliases, wherever they stand."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        before: list[Given] = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*before, Given(flag, values if isinstance(values, str) else None)])


class TakeFlag(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        setattr(namespace, self.dest, [Given(flag, "off" if flag.startswith("--no-") else "on")])
