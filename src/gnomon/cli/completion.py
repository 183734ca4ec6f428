"""`gnomon completion SHELL`: a completion script."""

from __future__ import annotations

import argparse

NAME = "completion"
HELP = "print a completion script: gnomon completion bash > ~/.local/share/bash-completion/completions/gnomon"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh", "fish", "powershell"))


def run(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(args.parser, args.shell))
    return 0
