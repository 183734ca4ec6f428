"""What codecs of keys and values cost: divergence and perplexity against plain ones, bytes, and speed in interleaved pairs with plain.

uv run python benchmarks/kv_codecs.py MODEL [--out cells.jsonl] [--data FILE] [--schemes 8,4,turbo] [--quality 512,2048,6144]
                                            [--speed 1024,4096,7168] [--pairs 5] [--kernels native]

Each cell is a line of the output file; cells that are there already are not measured again, so a run can be broken off and taken up.
Quality: all positions of a text behind its first window of 64 tokens (which is attended plain under every codec), in windows of 64, mean
over `--rows` texts. Speed: prefill of a text in windows of the engine's default chunk, then decoding; ratios are plain time over the
codec's, median of pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, KvScheme, resolve
from gnomon.config.kv import parse_scheme
from gnomon.engine.coding import coding_for
from gnomon.engine.workspace import workspace_of
from gnomon.kernels import dispatch, native
from gnomon.models.load import LoadedModel, load
from gnomon.quantize.kv import divergence
from gnomon.state.batch_state import BatchState

WINDOW = 64
DECODED = 32
SCHEMES = "8,4,turbo:k8v8,turbo:k8v4,turbo:k8v3,turbo:k4v3,turbo:k8v2,turbo:k4v2"


class Side:
    """A model under one scheme."""

    def __init__(self, loaded: LoadedModel, scheme: KvScheme) -> None:
        self.loaded, self.coding = loaded, coding_for(loaded, scheme)
        self.workspace = workspace_of(loaded, self.coding)

    def state(self) -> BatchState:
        binding = self.loaded.binding
        return BatchState(
            self.loaded.model,
            binding.make_caches(),
            pad_safe=binding.pad_safe,
            mask_ndim=binding.mask_ndim,
            coding=self.coding,
        )

    def forward(self, state: BatchState, tokens: Sequence[int]) -> mx.array:
        with dispatch.step():
            state.begin(len(tokens))
            logits = self.loaded.model(mx.array([list(tokens)]), cache=state.caches)
            state.commit()
        mx.eval(logits, state.arrays())
        return logits


def quality(plain: Side, coded: Side, rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean KL in nats, and both perplexities."""
    kl, losses, count = 0.0, [0.0, 0.0], 0
    for row in rows:
        states = [plain.state(), coded.state()]
        for start in range(0, len(row) - 1, WINDOW):
            window, targets = row[start : start + WINDOW], mx.array(list(row[start + 1 : start + WINDOW + 1]))
            found = [
                side.forward(state, window)[0, : targets.size].astype(mx.float32)
                for side, state in zip((plain, coded), states, strict=True)
            ]
            if not start:
                continue
            kl += float(divergence(*found).sum().item())
            for i, logits in enumerate(found):
                chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
                losses[i] += float((mx.logsumexp(logits, axis=-1) - chosen).sum().item())
            count += targets.size
    return {
        "kl": kl / count,
        "perplexity_plain": math.exp(losses[0] / count),
        "perplexity": math.exp(losses[1] / count),
    }


def timed(side: Side, row: Sequence[int], chunk: int) -> tuple[float, float, int]:
    """Seconds of prefill, seconds per decoded token, and bytes held at the end."""
    state, width = side.state(), side.workspace.chunk(chunk, len(row))
    begun = time.perf_counter()
    for start in range(0, len(row) - 1, width):
        side.forward(state, row[start : min(start + width, len(row) - 1)])
    prefilled = time.perf_counter()
    token = row[-1]
    for _ in range(DECODED):
        token = int(mx.argmax(side.forward(state, [token])[0, -1]).item())
    ended = time.perf_counter()
    return prefilled - begun, (ended - prefilled) / DECODED, state.nbytes()


def speed(plain: Side, coded: Side, row: Sequence[int], pairs: int, chunk: int) -> dict[str, Any]:
    """Ratios above 1 are gains of the codec."""
    ratios: list[tuple[float, float]] = []
    held = [0, 0]
    for pair in range(-1, pairs):
        order = ((0, plain), (1, coded)) if pair % 2 else ((1, coded), (0, plain))
        runs = {i: timed(side, row, chunk) for i, side in order}
        held = [runs[0][2], runs[1][2]]
        if pair >= 0:
            ratios.append((runs[0][0] / runs[1][0], runs[0][1] / runs[1][1]))
    prefill, decode = zip(*ratios, strict=True)
    return {
        "prefill_ratio": statistics.median(prefill),
        "prefill_ratios": prefill,
        "decode_ratio": statistics.median(decode),
        "decode_ratios": decode,
        "bytes_plain": held[0],
        "bytes": held[1],
    }


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    for scheme in args.schemes.split(","):
        for length in filter(None, args.quality.split(",")):
            yield "quality", scheme, int(length)
        for length in filter(None, args.speed.split(",")):
            yield "speed", scheme, int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("kv_codecs.jsonl"))
    parser.add_argument("--data", type=Path, default=None, help="text (default: this repository's documentation)")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--quality", default="512,2048,6144")
    parser.add_argument("--speed", default="1024,4096,7168")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kernels", choices=("stock", "native"), default="stock")
    args = parser.parse_args()
    loaded = load(args.model)
    kernels = native.prepare(loaded.model, args.kernels, cache=resolve().paths.cache / "kernels")
    root = Path(__file__).parent.parent
    files = [args.data] if args.data else [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    text = Tokenizer.load(args.model).encode("\n\n".join(file.read_text("utf-8") for file in files))
    about = {"model": loaded.path.name, "device": str(mx.default_device()), "native": kernels.native, "rows": args.rows}
    done = {
        (cell["cell"], cell["scheme"], cell["context"], cell["native"])
        for line in (args.out.read_text("utf-8").splitlines() if args.out.exists() else ())
        for cell in [json.loads(line)]
    }
    plain, chunk = Side(loaded, KvScheme()), EngineConfig().prefill_chunk
    for cell, scheme, context in cells(args):
        if (cell, scheme, context, kernels.native) in done:
            continue
        coded = Side(loaded, parse_scheme(scheme))
        stride = max(1, (len(text) - context - 1) // max(1, args.rows))
        rows = [text[i * stride : i * stride + context + 1] for i in range(args.rows)]
        found = quality(plain, coded, rows) if cell == "quality" else speed(plain, coded, rows[0], args.pairs, chunk)
        line = json.dumps({"cell": cell, "scheme": scheme, "context": context, **about, **found})
        with args.out.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
