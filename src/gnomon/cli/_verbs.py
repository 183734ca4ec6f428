"""The verbs of the command line: every module of this package whose name has no leading underscore, except `main`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gnomon.cli
from gnomon.config import Group


class CommandError(Exception):
    """Ends a verb with this message on stderr and `status` as exit status; for what a user can put right."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Verb:
    """What a verb's module declares: NAME, HELP, `run`, and optionally ALIASES, GROUPS (of `gnomon.config`), `add_arguments`.

    `run(args)` finds the resolved configuration in `args.config` and returns the exit status. Modules import what is heavy inside `run`.
    """

    name: str
    help: str
    aliases: Sequence[str]
    groups: Sequence[Group]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _none(_: argparse.ArgumentParser) -> None:
    """A verb without arguments of its own."""


def verbs() -> list[Verb]:
    """All verbs, by name."""
    found: list[Verb] = []
    for info in pkgutil.iter_modules(gnomon.cli.__path__):
        if info.name.startswith("_") or info.name == "main":
            continue
        module = importlib.import_module(f"gnomon.cli.{info.name}")
        found.append(
            Verb(
                module.NAME,
                module.HELP,
                getattr(module, "ALIASES", ()),
                getattr(module, "GROUPS", ()),
                getattr(module, "add_arguments", _none),
                module.run,
            )
        )
    return sorted(found, key=lambda verb: verb.name)
