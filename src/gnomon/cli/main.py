"""The command line: find the verb, parse, resolve the configuration, run."""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gnomon import logs
from gnomon.cli._verbs import CommandError, Verb, verbs
from gnomon.config import COMMON, Config, ConfigError, add_arguments, resolve

DEFAULT_VERB = "serve"


class _Usage(Exception):
    pass


class Parser(argparse.ArgumentParser):
    """Flags in full only, errors as exceptions."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # pyright: ignore[reportArgumentType]

    def error(self, message: str) -> NoReturn:
        raise _Usage(f"{message} (see {self.prog} --help)")


def build_parser(known: Sequence[Verb]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and that of each verb by name and alias."""
    root = Parser(prog="gnomon", description="Serve and use language models on MLX. Without a verb: serve.")
    root.add_argument("--version", action="store_true", help="print the version")
    under = root.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    by_name: dict[str, Parser] = {}
    for verb in known:
        parser = under.add_parser(verb.name, aliases=list(verb.aliases), help=verb.help, description=verb.help)
        add_arguments(parser, [*verb.groups, *(group for group in COMMON if group not in verb.groups)])
        verb.add_arguments(parser)
        parser.set_defaults(verb=verb.name)
        by_name |= dict.fromkeys((verb.name, *verb.aliases), parser)
    return root, by_name


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for a failure, 2 for wrong usage, 130 for an interrupt."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        check_platform(platform.system(), platform.machine())
        return _run(words, environ)
    except (_Usage, ConfigError) as e:
        return _complain(e, 2)
    except CommandError as e:
        return _complain(e, e.status)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`gnomon ... | head`): nothing is left to say, and flushing at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(words: list[str], environ: Mapping[str, str] | None) -> int:
    known = verbs()
    root, parsers = build_parser(known)
    words = _with_verb(words, parsers)
    args, unknown = root.parse_known_args(words)
    if unknown:
        parser = parsers[args.verb]
        raise _Usage(
            _unknown(unknown, (flag for action in parser._actions for flag in action.option_strings), parser.prog)
        )  # pyright: ignore[reportPrivateUsage]
    args.config = resolve(args, environ)
    args.parser, args.parsers = root, parsers
    logs.setup(args.config.log)
    _note(args.config)
    return next(verb for verb in known if verb.name == args.verb).run(args)


def _with_verb(words: list[str], parsers: Mapping[str, Parser]) -> list[str]:
    """The words with the default verb put first where none is named."""
    if not words:
        return [DEFAULT_VERB]
    first = words[0]
    if first in parsers:
        return words
    if first in ("-h", "--help"):
        return ["help", *words[1:]]
    if first == "--version":
        return ["version"]
    near = difflib.get_close_matches(first, parsers, 1)
    if near and not first.startswith("-") and not Path(first).exists():
        raise _Usage(
            f"no verb is called {first!r}; did you mean {near[0]}? (To serve a model of that name: gnomon serve {first})"
        )
    return [DEFAULT_VERB, *words]


def _unknown(words: Sequence[str], flags: Iterable[str], prog: str) -> str:
    word = words[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r} (see {prog} --help)"
    flag = word.partition("=")[0]
    by_bare = {known.lstrip("-"): known for known in flags}
    near = difflib.get_close_matches(flag.lstrip("-"), by_bare, 1)
    return f"unknown flag {flag}" + (f"; did you mean {by_bare[near[0]]}?" if near else f" (see {prog} --help)")


def _note(config: Config) -> None:
    import logging

    for note in config.notes:
        logging.getLogger("gnomon").warning(note)


def _complain(error: Exception, status: int) -> int:
    print(f"gnomon: {error}", file=sys.stderr)
    return status


def check_platform(system: str, machine: str) -> None:
    """Raises CommandError where Gnomon can't run. `system` and `machine` are as the platform module names them."""
    if system == "Windows":
        raise CommandError(
            "Windows is not supported: run Gnomon inside WSL2 (https://learn.microsoft.com/windows/wsl/install)"
        )
    if system == "Darwin" and machine != "arm64":
        raise CommandError(f"macOS is supported on Apple silicon only; this machine is {machine}")


if __name__ == "__main__":
    sys.exit(main())
