"""`gnomon key new NAME`: an API key for a server's key file."""

from __future__ import annotations

import argparse
import sys

from gnomon.cli._verbs import CommandError

NAME = "key"
HELP = "make an API key; its line for --api-key-file goes to stdout: gnomon key new laptop >> keys"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new",))
    parser.add_argument("name", help="what logs and metrics call the key")


def run(args: argparse.Namespace) -> int:
    from gnomon.serve.keys import new_key

    try:
        key, line = new_key(args.name)
    except ValueError as error:
        raise CommandError(str(error), 2) from error
    # The key goes where a redirection into the file doesn't follow.
    print(f"key {args.name}, shown this once: {key}", file=sys.stderr)
    print(line)
    return 0
