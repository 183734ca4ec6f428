"""`gnomon help [VERB]`."""

from __future__ import annotations

import argparse

from gnomon.cli._verbs import CommandError

NAME = "help"
HELP = "print help on Gnomon or on a verb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("about", nargs="?", metavar="VERB")


def run(args: argparse.Namespace) -> int:
    if args.about is None:
        args.parser.print_help()
        return 0
    if args.about not in args.parsers:
        raise CommandError(f"no verb is called {args.about!r}; there are {', '.join(sorted(args.parsers))}", 2)
    args.parsers[args.about].print_help()
    return 0
