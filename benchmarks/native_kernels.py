"""Native CPU kernels against unmodified mlx-lm: prefill, decoding at several depths and batches, on one thread and on two.

The starter (or any MODEL) and a random model of a 1B shape, each side in a process of its own that is kept to as many cores as it has
threads, in alternating blocks. Every model and number of threads is a run of its own in --out: one that is complete there is not repeated,
so an interrupted table goes on where it stood. Cells that take mlx-lm more than about a minute are measured without it.

    uv run python benchmarks/native_kernels.py MODEL [--blocks 5] [--threads 1 2] [--out DIR] [--quick] [--only starter|1b]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from gnomon.bench.contenders import WorkerContender, worker_command
from gnomon.bench.provenance import model_content
from gnomon.bench.report import comparison_row, number, table
from gnomon.bench.runner import Plan
from gnomon.bench.schema import METRICS, Arm, Run
from gnomon.bench.session import paired_run
from gnomon.bench.store import Store
from gnomon.bench.workload import Cell, Contender

STOCK, NATIVE = "mlx-lm", "native"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Part:
    """A model's cells: those for both sides, and those that only the native side ends in time."""

    model: str
    both: str
    alone: str


PARTS = (
    Part("starter", "prompt:32,prompt:256,decode:32@0,decode:32@1024,decode:16@4096,batch:4x16,batch:8x16", "prompt:2048"),
    Part("1b", "prompt:32,decode:8@0,decode:8@1024", "prompt:256,decode:16@4096,batch:4x16,batch:8x16"),
)  # fmt: skip
QUICK = Part("starter", "prompt:32,decode:6@0,batch:4x6", "prompt:64")


def random_1b(directory: Path, like: Path) -> Path:
    """A random 4-bit model of Llama 3.2 1B's shape with the tokenizer and vocabulary of the model `like`, made once."""
    if (directory / "config.json").is_file():
        return directory
    own = json.loads((like / "config.json").read_text())
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "vocab_size": own["vocab_size"],
        "eos_token_id": own.get("eos_token_id"),
    }
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    for name in TOKENIZER:
        if (like / name).is_file():
            shutil.copy(like / name, directory / name)
    config["quantization"] = {"group_size": 64, "bits": 4}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def contender(name: str, model: Path, sha: str, threads: int) -> WorkerContender:
    """One side, kept to the first `threads` cores that this process may run on."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    settings = {} if name == STOCK else {"kernels": "native", "threads": threads}
    side = "mlx-lm" if name == STOCK else "gnomon"
    command = ("taskset", "-c", cores, *worker_command(side, model, {**settings, "model_sha256": sha}))
    kind = "reference" if name == STOCK else "settings"
    return WorkerContender(Arm(name=name, kind=kind, settings={**settings, "cores": cores}, command=command))


def measure(model: Path, part: Part, threads: int, a: argparse.Namespace) -> Iterator[Run]:
    """The runs of a model on a number of threads; those that are complete in the store are taken from there."""
    store, sha = Store(a.out), model_content(model)[0]
    done = {run.name: run for _, run in store.runs()[0] if run.complete}
    for cells, names in ((part.both, (STOCK, NATIVE)), (part.alone, (NATIVE,))):
        title = f"kernels, {part.model}, {threads} threads, {cells}, {a.blocks} blocks"
        if title in done:
            yield done[title]
            continue
        sides: list[Contender] = [contender(name, model, sha, threads) for name in names]
        parsed = [Cell.parse(cell) for cell in cells.split(",")]
        run, _ = paired_run(
            store, "native", title, sides, parsed, Plan(a.blocks, a.seed), model=model, argv=sys.argv, diagnostic=a.quick
        )  # fmt: skip
        yield run


def lines(run: Run, part: Part, threads: int) -> Iterator[list[str]]:
    """Rows of the table: primary comparisons, or medians where there was one side."""
    for comparison in run.comparisons:
        if comparison.primary:
            cell, _, _, ours, theirs, ratio, outcome, _ = comparison_row(run, comparison)
            yield [part.model, str(threads), cell, ours, theirs, ratio, outcome]
    if len(run.arms) == 1:
        for text in part.alone.split(","):
            metric = Cell.parse(text).primary
            values = sorted(
                s.metrics[metric] for s in run.samples if s.cell == text and s.status == "ok" and s.block >= 0
            )
            shown = number(values[len(values) // 2], METRICS[metric].unit) if values else "failed"
            yield [part.model, str(threads), text, shown, "—", "—", f"{len(values)} samples"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; 1 if a comparison could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory, the starter's for instance")
    parser.add_argument("--blocks", type=int, default=5, help="alternating blocks of each run (at least 5 decide)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[part.model for part in PARTS], help="this model alone")
    parser.add_argument("--quick", action="store_true", help="one block of a few short cells; diagnostic")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    a = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if a.quick:
        a.blocks = 1
    rows: list[list[str]] = []
    failed = False
    for part in (QUICK,) if a.quick else PARTS:
        if a.only not in (None, part.model):
            continue
        model = a.model if part.model == "starter" else random_1b(a.out / "random-1b", a.model)
        for threads in a.threads:
            for run in measure(model, part, threads, a):
                rows += lines(run, part, threads)
                failed |= any(c.primary and c.ratio is None for c in run.comparisons)
    print(table(("model", "threads", "cell", NATIVE, STOCK, "ratio", "outcome"), rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
