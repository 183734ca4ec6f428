"""`gnomon kv-config`: measure which layers' keys and values need their bits, and write a kv_config.json for a budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gnomon.cli._library import find, stderr
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, KernelConfig, ModelConfig

NAME = "kv-config"
HELP = "measure how layers take fewer bits of keys and values, and write a kv_config.json"
GROUPS = (ModelConfig, KernelConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bytes-per-token",
        type=float,
        metavar="N",
        help="budget: bytes of keys and values per token of context (default: half-way between all layers in 4 and in 8 bits)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="text to measure on (default: the model writes its own)"
    )
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="texts to measure on (default: 4)")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens of each text (default: 256)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: the model's kv_config.json)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    from gnomon.chat.tokenizer import Tokenizer
    from gnomon.cli._model import check_backend
    from gnomon.kernels import native
    from gnomon.models.kv import KV_CONFIG
    from gnomon.models.load import load
    from gnomon.quantize import kv

    config: Config = args.config
    for name, low in (("rows", 1), ("length", 2)):
        if getattr(args, name) < low:
            raise CommandError(f"--{name} {getattr(args, name)} is out of range: >= {low}", 2)
    check_backend()
    found = find(config)
    out: Path = args.out or found.path / KV_CONFIG
    if out.exists() and not args.force:
        raise CommandError(f"{out} is there already: --force replaces it, --out writes elsewhere")
    try:
        loaded = load(found.path)
        kernels = config.kernel
        native.prepare(
            loaded.model,
            "stock" if kernels.stock else kernels.kernels,
            cache=kernels.kernel_cache,
            threads=kernels.threads,
            graph=kernels.cuda_graph,
        )
        if args.data is not None:
            rows = _cut(Tokenizer.load(found.path).encode(args.data.read_text("utf-8")), args.rows, args.length)
        else:
            stderr().print(f"the model writes {args.rows} texts of {args.length} tokens")
            rows = kv.sample(loaded, args.rows, args.length)
    except (OSError, ValueError) as error:
        raise CommandError(f"{found.id}: {error}") from error
    measured: list[kv.Sensitivity] = []
    for one in kv.measure(loaded, rows):
        measured.append(one)
        print(
            f"layer {one.layer:3d}  KL " + "  ".join(f"{bits} bits {one.kl[bits]:.3e}" for bits in kv.CANDIDATES),
            flush=True,
        )
    if not measured:
        raise CommandError(f"{found.id} has no layer whose keys and values can be coded in groups of {kv.GROUP}")
    totals = {bits: sum(one.num_bytes[bits] for one in measured) for bits in (*kv.CANDIDATES, kv.PLAIN)}
    budget: float = args.bytes_per_token or sum(totals[bits] for bits in kv.CANDIDATES) / len(kv.CANDIDATES)
    try:
        chosen = kv.allocate(measured, budget)
    except ValueError as error:
        raise CommandError(f"--bytes-per-token: {error}", 2) from error
    entries = [{"layer_idx": layer, "bits": bits, "group_size": kv.GROUP} for layer, bits in sorted(chosen.items())]
    out.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    taken = sum(one.num_bytes[chosen[one.layer]] for one in measured)
    counts = ", ".join(
        f"{list(chosen.values()).count(bits)} layers {f'in {bits} bits' if bits else 'plain'}"
        for bits in sorted(set(chosen.values()), key=lambda bits: bits or 16)
    )
    print(f"{counts}: {taken:g} bytes per token, plain {totals[kv.PLAIN]:g}, budget {budget:g}\n{out}")
    return 0


def _cut(tokens: list[int], num_rows: int, length: int) -> list[list[int]]:
    """Evenly spaced stretches of a text. Raises ValueError if it is too short for one."""
    if len(tokens) < length:
        raise ValueError(f"--data has {len(tokens)} tokens, but --length asks for {length}")
    last = len(tokens) - length
    starts = sorted({last * i // max(1, num_rows - 1) for i in range(num_rows)})
    return [tokens[start : start + length] for start in starts]
