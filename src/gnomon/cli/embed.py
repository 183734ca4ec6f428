"""`gnomon embed`: vectors of texts."""

from __future__ import annotations

import argparse
import json
import sys

from gnomon.cli._verbs import CommandError
from gnomon.config import Config, EngineConfig, KernelConfig, ModelConfig

NAME = "embed"
HELP = "turn texts into vectors, with a model that gives embeddings"
GROUPS = (ModelConfig, EngineConfig, KernelConfig)
SHOWN = 6
"""Numbers of a vector that are shown on a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT", help="a text; may be repeated; without it stdin is one"
    )
    parser.add_argument("--instruct", metavar="TEXT", help="what the texts are queries for")
    parser.add_argument("--json", action="store_true", help="print whole vectors as JSON")


def run(args: argparse.Namespace) -> int:
    from gnomon.chat.embedding import prompt_for
    from gnomon.cli._library import find
    from gnomon.cli._model import start, working
    from gnomon.engine.api import EngineError

    config: Config = args.config
    if not args.text and sys.stdin.isatty():
        raise CommandError("there is no text: give --text TEXT, or pipe one in", 2)
    texts: list[str] = args.text or [sys.stdin.read()]
    if not all(texts):
        raise CommandError("a text is empty", 2)
    found = find(config)
    with working(f"loading {found.id}"):
        loaded = start(config, found)
    with loaded.engine:
        try:
            prompts = [prompt_for(loaded.tokenizer, text, args.instruct) for text in texts]
            vectors = loaded.engine.embed(prompts).result()
        except EngineError as error:
            raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps([{"text": text, "embedding": one} for text, one in zip(texts, vectors, strict=True)]))
        return 0
    for vector in vectors:
        print(f"{len(vector)} dimensions: {', '.join(f'{value:.4f}' for value in vector[:SHOWN])}, …")
    return 0
