"""`gnomon eval`: how well a model predicts a text, and how far it is from a reference."""

from __future__ import annotations

import argparse
from pathlib import Path

from gnomon.cli import _eval_text
from gnomon.config import EngineConfig, KernelConfig, KvConfig, ModelConfig

NAME = "eval"
HELP = "measure quality: perplexity of a text, divergence from a reference"
GROUPS = (ModelConfig, EngineConfig, KernelConfig, KvConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--perplexity", type=Path, metavar="FILE", help="perplexity of a text in UTF-8, in windows that don't overlap"
    )
    what.add_argument(
        "--kl",
        type=Path,
        metavar="FILE",
        help="divergence from a reference's distributions over a text, position by position",
    )
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where results lie (default: as for bench)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _eval_text.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return _eval_text.perplexity(args) if args.perplexity is not None else _eval_text.divergence(args)
