"""What `gnomon eval` measures on a text: perplexity, and divergence from a reference."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.cli._verbs import CommandError
from gnomon.config import Config, KvConfig, ModelConfig

if TYPE_CHECKING:
    from gnomon.bench.schema import Run
    from gnomon.evals.comparison import Named
    from gnomon.evals.divergence import Interval, Summary
    from gnomon.hub.resolve import Found

REFERENCES = "references"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window (default: 512)")
    parser.add_argument("--windows", type=int, metavar="N", help="so many windows at most, from the text's beginning")
    of = parser.add_argument_group("the reference of --kl; what isn't given is as for the model itself")
    of.add_argument("--against", metavar="MODEL", help="another model with the same tokenizer")
    of.add_argument("--against-kernels", choices=("auto", "native", "stock"), help="other kernels")
    of.add_argument("--against-kv", metavar="SCHEME", help="other keys and values: off, 4, 8, turbo[:kXvY], config")
    of.add_argument(
        "--step", type=int, metavar="N",
        help="tokens computed at once on both sides (default: 64 if keys or values of a side are coded, else the whole window)",
    )  # fmt: skip
    of.add_argument(
        "--reference-size", type=float, default=2.0, metavar="GIB",
        help="size of the kept references; if a text's whole distributions don't fit, the likeliest tokens are kept (default: 2)",
    )  # fmt: skip


def perplexity(args: argparse.Namespace) -> int:
    """`--perplexity FILE`. Raises CommandError."""
    from gnomon.bench.store import Store
    from gnomon.cli._library import find
    from gnomon.cli._model import start, working
    from gnomon.engine.api import EngineError
    from gnomon.evals.perplexity import measure, record, windows

    config: Config = args.config
    if config.kv.scheme.mode != "off":
        raise CommandError(
            "--perplexity computes a window at once, and a row's first window attends to plain keys and values: "
            "--kl FILE --against-kv off measures --kv-quant, with both perplexities",
            2,
        )
    text = _read(args.perplexity)
    found = find(config)
    with working(f"loading {found.id}"):
        loaded = start(config, found)
    with loaded.engine as engine:
        try:
            parts = windows(loaded.tokenizer.encode(text), args.window)[: args.windows]
            begun = time.perf_counter()
            made = measure(engine, parts, _progress("windows", len(parts)))
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


def divergence(args: argparse.Namespace) -> int:
    """`--kl FILE`. Raises CommandError."""
    from gnomon.bench.store import Store
    from gnomon.cli._library import find
    from gnomon.cli._model import check_backend
    from gnomon.engine.api import EngineError

    config: Config = args.config
    text = _read(args.kl)
    check_backend()
    theirs = _against(args, config)
    founds = find(theirs), find(config)
    try:
        result, found = _compare(args, text, (theirs, config), founds)
    except (EngineError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    path = Store(args.out or config.paths.cache / "bench").save(result)
    print(json.dumps({**asdict(found), "file": str(path)}) if args.json else f"{_told(found)}\n{path}")
    return 0


def _against(args: argparse.Namespace, config: Config) -> Config:
    """The reference's configuration."""
    model = config.model if args.against is None else ModelConfig(model=args.against)
    kernel, kv = config.kernel, config.kv
    if args.against_kernels is not None:
        kernel = replace(kernel, kernels=args.against_kernels, l1=False)
    if args.against_kv is not None:
        kv = KvConfig(kv_quant=args.against_kv, fused_sdpa=kv.fused_sdpa)
    return replace(config, model=model, kernel=kernel, kv=kv)


def _compare(
    args: argparse.Namespace, text: str, configs: tuple[Config, Config], founds: tuple[Found, Found]
) -> tuple[Run, Summary]:
    from gnomon.cli._model import start, working
    from gnomon.evals.comparison import fill, measure, record, step_of
    from gnomon.evals.divergence import summarise
    from gnomon.evals.reference import Plan, ReferenceStore, extent

    cache = configs[1].paths.cache
    reference, candidate = _named(configs, founds, cache)
    parts, vocab_size = _parts(args, text, founds)
    coded = any(config.kv.scheme.mode != "off" for config in configs)
    step, skipped = step_of(args.step, args.window, vocab_size, coded)
    plan = Plan(parts, step)
    limit = round(args.reference_size * (1 << 30))
    size = extent(plan, vocab_size, limit)
    held = ReferenceStore(cache / REFERENCES, limit).open(reference.side, plan, size)
    if held.missing():
        with working(f"loading {founds[0].id}, the reference"):
            loaded = start(configs[0], founds[0])
        with loaded.engine as engine:
            fill(held, engine, _progress("windows of the reference", len(parts)))
    with working(f"loading {founds[1].id}"):
        loaded = start(configs[1], founds[1])
    with loaded.engine as engine:
        begun = time.perf_counter()
        windows = measure(held, candidate.side, engine, _progress("windows", len(parts)))
        seconds, model = time.perf_counter() - begun, engine.model
    windows = [window.after(skipped) for window in windows]
    found = summarise(windows)
    result = record(
        args.kl, plan, skipped, (reference, candidate), model, found, windows, seconds,
        top=size.top, argv=sys.argv, hash_cache=cache / "hashes.json",
    )  # fmt: skip
    return result, found


def _named(configs: tuple[Config, Config], founds: tuple[Found, Found], cache: Path) -> tuple[Named, Named]:
    from gnomon.evals.comparison import Named, side_of

    reference, candidate = (
        Named(found.id, side_of(found.path, config.kernel, config.kv.scheme, cache))
        for config, found in zip(configs, founds, strict=True)
    )
    if reference.side == candidate.side:
        raise CommandError(
            "reference and model are the same: name another one with --against, --against-kernels or --against-kv", 2
        )
    return reference, candidate


def _parts(args: argparse.Namespace, text: str, founds: tuple[Found, Found]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Windows of the text, and the width of a distribution. Raises ValueError for two tokenizers that differ on it."""
    from gnomon.chat.tokenizer import Tokenizer
    from gnomon.evals.perplexity import windows
    from gnomon.models.load import read_config

    theirs, tokenizer = (Tokenizer.load(found.path) for found in founds)
    ids = tokenizer.encode(text)
    if ids != theirs.encode(text):
        raise ValueError(f"the tokenizers of {founds[0].id} and {founds[1].id} make different ids of the text")
    config = read_config(founds[1].path)
    declared = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0
    return tuple(windows(ids, args.window)[: args.windows]), max(int(declared), tokenizer.vocab_size)


def _told(found: Summary) -> str:
    def shown(name: str, one: Interval, form: str = ".3e") -> str:
        bounds = "" if one.lower is None or one.upper is None else f" [{one.lower:{form}}, {one.upper:{form}}]"
        return f"{name} {one.value:{form}}{bounds}"

    kl = ", ".join(
        (
            shown("mean", found.mean),
            shown("median", found.median),
            shown("99 %", found.percentile_99),
            f"max {found.largest:.3e}",
        )
    )
    lines = [f"KL in nats over {found.positions:,} positions of {found.texts} windows: {kl}"]
    if found.mean_upper > found.mean.value * (1 + 1e-9):
        lines.append(
            f"only the likeliest tokens of the reference were kept: the mean lies between this and {found.mean_upper:.3e}"
        )
    lines.append(shown("the same likeliest token", found.agreement, ".2%"))
    lines.append(f"perplexity {found.perplexity_reference:.4f} of the reference, {found.perplexity:.4f} here")
    return "\n".join(lines)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} can't be read: {error}") from error


def _progress(what: str, total: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} {what}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return tell
