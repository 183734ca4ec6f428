"""`gnomon eval`: how well a model predicts a text, how far it is from a reference, and how many questions it answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from gnomon.cli import _eval_task, _eval_text
from gnomon.cli._verbs import CommandError
from gnomon.config import ClientConfig, EngineConfig, KernelConfig, KvConfig, ModelConfig

NAME = "eval"
HELP = "measure quality: perplexity of a text, divergence from a reference, questions with known answers"
GROUPS = (ModelConfig, EngineConfig, KernelConfig, KvConfig, ClientConfig)


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
    what.add_argument(
        "--task",
        metavar="TASK",
        help="ask a task over HTTP, of --server or of the model: a name, or a file of JSON lines",
    )
    what.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two results of one task, item by item: McNemar's test"
    )
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where results lie (default: as for bench)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _eval_text.add_arguments(parser)
    _eval_task.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.task is not None:
        return _eval_task.task(args)
    if args.compare is not None:
        return _eval_task.compare(args)
    if args.config.client.server is not None:
        raise CommandError("--server is for --task: the other measurements need the model's own distributions", 2)
    return _eval_text.perplexity(args) if args.perplexity is not None else _eval_text.divergence(args)
