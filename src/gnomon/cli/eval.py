"""`gnomon eval`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from gnomon.cli._verbs import CommandError
from gnomon.config import Config, EngineConfig, KernelConfig, ModelConfig

NAME = "eval"
HELP = "measure quality: perplexity of a text"
GROUPS = (ModelConfig, EngineConfig, KernelConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--perplexity",
        type=Path,
        required=True,
        metavar="FILE",
        help="perplexity of a text in UTF-8, in windows that don't overlap",
    )
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window (default: 512)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where results lie (default: as for bench)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from gnomon.bench.perplexity import measure, record, windows
    from gnomon.bench.store import Store
    from gnomon.cli._library import find
    from gnomon.cli._model import start, working
    from gnomon.engine.api import EngineError

    config: Config = args.config
    try:
        text = args.perplexity.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{args.perplexity} can't be read: {error}") from error
    found = find(config)
    with working(f"loading {found.id}"):
        loaded = start(config, found)
    with loaded.engine as engine:
        try:
            parts = windows(loaded.tokenizer.encode(text), args.window)
            begun = time.perf_counter()
            made = measure(engine, parts, lambda done: _tell(done, len(parts)))
        except (EngineError, ValueError) as error:
            raise CommandError(str(error)) from error
        seconds = time.perf_counter() - begun
        hashes = config.paths.cache / "hashes.json"
        result = record(engine, args.perplexity, parts, made, seconds, argv=sys.argv, hash_cache=hashes)
    path = Store(args.out or config.paths.cache / "bench").save(result)
    if args.json:
        told = {
            "perplexity": made.value,
            "standard_error": made.standard_error,
            "tokens": made.tokens,
            "file": str(path),
        }
        print(json.dumps(told))
    else:
        print(f"perplexity {made.value:.4f} ± {made.standard_error:.4f} over {made.tokens} tokens\n{path}")
    return 0


def _tell(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} windows", end="\n" if done == total else "", file=sys.stderr, flush=True)
