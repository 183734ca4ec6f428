"""What codecs of keys and values cost: divergence and perplexity against plain ones, bytes, and speed in interleaved pairs with plain.

uv run python benchmarks/kv_codecs.py MODEL [--out FOLDER] [--data FILE] [--schemes 8,4,turbo] [--quality 2048,6144,512]
                                            [--speed 4096,1024,7168] [--pairs 5] [--kernels native] [--cells PATTERN ...] [--minutes N]
                                            [--random 1B-16] [--batch 1,8]

A cell is a scheme, a context, and of speed a pair; several processes may share them (benchmarks/cells.py), and each ends with a table of
all that is there. Quality is `gnomon eval`'s divergence: all positions of a text behind its first step of 64 tokens (which attends to
plain keys and values under every codec), in steps of 64, over `--rows` texts. Speed: prefill of a text in windows of the engine's
default chunk, then decoding by turns; ratios are plain time over the codec's, median of pairs. With `--batch` so many copies of the row
decode together (those beyond 1 are cells of their own). `--random` makes a model of random weights
in the folder MODEL, if it isn't there, in a shape of cuda_kernels.py; its text is random too, so only speed and bytes mean something.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx

from cells import Cell, add_arguments, results, run
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, KernelConfig, KvScheme
from gnomon.config.kv import parse_scheme
from gnomon.engine.coding import coding_for
from gnomon.engine.workspace import workspace_of
from gnomon.evals.divergence import Positions, compare, condense, summarise
from gnomon.kernels import dispatch, native
from gnomon.models.load import LoadedModel, load
from gnomon.state.batch_state import BatchState

STEP = 64
DECODED = 48
SCHEMES = "turbo:k8v3,8,4,turbo:k8v4,turbo:k8v8,turbo:k4v3,turbo:k8v2,turbo:k4v2"
"""The default of `turbo` and the affine ones first."""


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
        """A window of these tokens in all rows."""
        with dispatch.step():
            state.begin(len(tokens))
            logits = self.loaded.model(mx.array([list(tokens)] * state.num_rows), cache=state.caches)
            state.commit()
        mx.eval(logits, state.arrays())
        return logits


def quality(plain: Side, coded: Mapping[str, Side], rows: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Divergence of each codec's distributions from plain ones, and both perplexities. All go through the text in step."""
    found: dict[str, list[Positions]] = {name: [] for name in coded}
    for row in rows:
        state, states = plain.state(), {name: side.state() for name, side in coded.items()}
        steps: dict[str, list[Positions]] = {name: [] for name in coded}
        for start in range(0, len(row) - 1, STEP):
            window, targets = row[start : start + STEP], mx.array(list(row[start + 1 : start + STEP + 1]))
            logits = plain.forward(state, window)[0, : targets.size]
            reference = condense(logits, targets, logits.shape[-1]) if start else None
            for name, side in coded.items():
                own = side.forward(states[name], window)[0, : targets.size]
                if reference is not None:
                    steps[name].append(compare(reference, own, targets))
        for name, one in steps.items():
            found[name].append(Positions.join(one))
    summaries = {name: summarise(one) for name, one in found.items()}
    return {name: {**asdict(summary), "kl": summary.mean.value} for name, summary in summaries.items()}


def prefilled(side: Side, row: Sequence[int], chunk: int) -> tuple[BatchState, float]:
    """The state of all tokens but the last, and the seconds that took."""
    state, width = side.state(), side.workspace.chunk(chunk, len(row))
    begun = time.perf_counter()
    for start in range(0, len(row) - 1, width):
        side.forward(state, row[start : min(start + width, len(row) - 1)])
    return state, time.perf_counter() - begun


def widened(state: BatchState, batch: int) -> BatchState:
    """The same with so many copies of its row."""
    for copy in [state.fork(0) for _ in range(batch - 1)]:
        state.join(copy)
    mx.eval(state.arrays())
    return state


def speed(plain: Side, coded: Side, row: Sequence[int], pair: int, chunk: int, batch: int) -> dict[str, Any]:
    """One pair; who goes first alternates. Ratios above 1 are gains of the codec. Tokens are decoded by turns: medians of their times."""
    sides = (plain, coded) if pair % 2 else (coded, plain)
    states = {side: prefilled(side, row, chunk) for side in sides}
    for state, _ in states.values():
        widened(state, batch)
    seconds: dict[Side, list[float]] = {side: [] for side in sides}
    tokens = dict.fromkeys(sides, row[-1])
    for _ in range(DECODED):
        for side in sides:
            begun = time.perf_counter()
            tokens[side] = int(mx.argmax(side.forward(states[side][0], [tokens[side]])[0, -1]).item())  # pyright: ignore[reportArgumentType]
            seconds[side].append(time.perf_counter() - begun)
    decode, coded_decode = (statistics.median(seconds[side]) for side in (plain, coded))
    (state, prefill), (coded_state, coded_prefill) = states[plain], states[coded]
    return {
        "prefill_ratio": prefill / coded_prefill,
        "decode_ratio": decode / coded_decode,
        "plain_prefill_rate": (len(row) - 1) / prefill,
        "plain_decode_rate": 1 / decode,
        "bytes_plain": state.nbytes(),
        "bytes": coded_state.nbytes(),
    }


def text(args: argparse.Namespace) -> Sequence[int]:
    """The tokens of a file, or of this repository's documentation."""
    root = Path(__file__).parent.parent
    files = [args.data] if args.data else [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return Tokenizer.load(args.model).encode("\n\n".join(file.read_text("utf-8") for file in files))


def random_text(loaded: LoadedModel) -> Sequence[int]:
    """65,536 tokens."""
    tokens = mx.random.randint(0, int(loaded.config["vocab_size"]), (1 << 16,), key=mx.random.key(3))
    return tokens.tolist()  # pyright: ignore[reportReturnType]


def make_random(folder: Path, name: str) -> None:
    """A Llama of random weights in a folder."""
    from mlx.utils import tree_flatten

    from cuda_kernels import MODELS, ROPE, SHAPES, build

    shape = SHAPES[MODELS[name][0]]
    model = build(name)
    config: dict[str, Any] = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": ROPE,
        **shape,
    }
    if MODELS[name][1] < 16:
        config["quantization"] = {"group_size": 64, "bits": MODELS[name][1]}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))  # pyright: ignore[reportArgumentType]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


class Bench:
    """A model, a text, and the sides that cells ask for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        if args.random and not args.model.is_dir():
            make_random(args.model, args.random)
        self.loaded = load(args.model)
        self.kernels = native.prepare(self.loaded.model, args.kernels, cache=KernelConfig().kernel_cache)
        self.text = random_text(self.loaded) if args.random else text(args)
        self.plain = Side(self.loaded, KvScheme())
        self.sides: dict[str, Side] = {}
        self.found: dict[tuple[str, int], dict[str, Any]] = {}
        self.warm: set[tuple[Side, int, int]] = set()

    def coded(self, scheme: str) -> Side:
        """A scheme's side, warm. Raises ValueError for one that the model can't run under."""
        if scheme not in self.sides:
            side = self.sides[scheme] = Side(self.loaded, parse_scheme(scheme))
            for one in (self.plain, side):
                prefilled(one, self.text[: 2 * STEP], STEP)
        return self.sides[scheme]

    def warmed(self, coded: Side, row: Sequence[int], batch: int) -> None:
        """A prefill and a few steps of either side beforehand on a GPU, where plans and graphs are made for lengths."""
        for side in (self.plain, coded):
            if mx.default_device() == mx.Device(mx.gpu) and (side, len(row), batch) not in self.warm:
                self.warm.add((side, len(row), batch))
                state = widened(prefilled(side, row, EngineConfig().prefill_chunk)[0], batch)
                for _ in range(4):
                    side.forward(state, [row[-1]])

    def rows(self, context: int) -> list[Sequence[int]]:
        if len(self.text) <= context:
            raise ValueError(f"the text has {len(self.text)} tokens, {context + 1} are needed")
        stride = max(1, (len(self.text) - context - 1) // max(1, self.args.rows))
        return [self.text[i * stride : i * stride + context + 1] for i in range(self.args.rows)]

    def quality(self, scheme: str, context: int, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Measured for all schemes that come after it too, since plain ones cost as much as any."""
        if (scheme, context) not in self.found:
            schemes = self.args.schemes.split(",")
            sides = {one: self.coded(one) for one in schemes[schemes.index(scheme) :]}
            self.found |= {(name, context): one for name, one in quality(self.plain, sides, rows).items()}
        return self.found[scheme, context]

    def cell(self, kind: str, scheme: str, context: int, pair: int, batch: int = 1) -> dict[str, Any]:
        coded, rows = self.coded(scheme), self.rows(context)
        about = {
            "kind": kind,
            "scheme": scheme,
            "context": context,
            "batch": batch,
            "model": self.loaded.path.name,
            "device": str(mx.default_device()),
            "kernels": self.kernels.name,
        }
        if kind == "quality":
            return {**about, **self.quality(scheme, context, rows)}
        self.warmed(coded, rows[0], batch)
        return {**about, "pair": pair, **speed(self.plain, coded, rows[0], pair, EngineConfig().prefill_chunk, batch)}


def cells(bench: Callable[[], Bench], args: argparse.Namespace) -> Iterator[Cell]:
    """The middle context first, each with all schemes; one pair of each speed before the second of any."""
    schemes = args.schemes.split(",")
    lengths = {
        kind: [int(one) for one in filter(None, getattr(args, kind).split(","))] for kind in ("quality", "speed")
    }
    for quality_at, speed_at in zip_longest(lengths["quality"], lengths["speed"]):
        for kind, context, pairs in (("quality", quality_at, 1), ("speed", speed_at, args.pairs)):
            batches = [int(one) for one in args.batch.split(",")] if kind == "speed" else [1]
            for pair, batch, scheme in product(range(pairs if context is not None else 0), batches, schemes):
                name = f"{kind} {args.kernels} {scheme} {context}"
                if kind == "speed":
                    name += f" pair {pair}" if batch == 1 else f" batch {batch} pair {pair}"
                yield Cell(name, partial(lambda *what: bench().cell(*what), kind, scheme, context, pair, batch))


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| Scheme | Kernels | Context | KL, nats | 99 % | Same token | Perplexity | Bytes / plain | Prefill ratio | Decode ratio | Pairs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    good = [one for one in found if "error" not in one]
    for key in sorted({_key(one) for one in good}):
        own = [one for one in good if _key(one) == key]
        kernels, scheme, context, batch = key
        pairs = [one for one in own if one["kind"] == "speed"]
        told = ["", "", "", "", "", "", ""]
        for one in own:
            if one["kind"] == "quality":
                told[:3] = (
                    f"{one['kl']:.2e}",
                    f"{one['percentile_99']['value']:.2e}",
                    f"{one['agreement']['value']:.1%}",
                )
                told[3] = f"{one['perplexity']:.2f} ({one['perplexity_reference']:.2f})"
        if pairs:
            told[4] = f"{pairs[-1]['bytes'] / pairs[-1]['bytes_plain']:.3f}"
            told[5], told[6] = (_ratio([one[name] for one in pairs]) for name in ("prefill_ratio", "decode_ratio"))
        rows = f"{context}, {batch} rows" if batch > 1 else context
        lines.append(f"| {scheme} | {kernels} | {rows} | {' | '.join(told)} | {len(pairs) or ''} |")
    return "\n".join(lines)


def _key(result: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """What a line of the table is about."""
    return result["kernels"], result["scheme"], result["context"], result.get("batch", 1)


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=None, help="text (default: this repository's documentation)")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--quality", default="2048,6144,512")
    parser.add_argument("--speed", default="4096,1024,7168")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch", default="1", help="rows that decode together")
    parser.add_argument("--random", default=None, metavar="SHAPE", help="a model of random weights: 1B-16, 8B-4, ...")
    parser.add_argument("--kernels", choices=("stock", "native"), default="native")
    add_arguments(parser, "kv_codecs")
    args = parser.parse_args()
    run(list(cells(cache(lambda: Bench(args)), args)), args)
    if not args.list:
        print(table(results(args.out)))


if __name__ == "__main__":
    main()
