"""Native CPU kernels against unmodified mlx-lm and llama.cpp: prefill, decoding at several depths and batches, on one thread and on two.

The starter (or any MODEL) and a random model of a 1B shape, each side in a process of its own that is kept to as many cores as it has
threads, in alternating blocks. Every model, number of threads and list of cells is a run of its own in --out: one that is complete there is
not repeated, so an interrupted table goes on where it stood, and parts of it can run beside each other on cores of their own:

    uv run python benchmarks/native_kernels.py MODEL [--blocks 5] [--threads 1 2] [--out DIR] [--quick] [--only starter|1b]
    taskset -c 4,5 uv run python benchmarks/native_kernels.py MODEL --only starter --threads 2 --cells decode:32@0 --out DIR
    uv run python benchmarks/native_kernels.py MODEL --table --out DIR

Every side of --sides is compared with the first one. Cells that take mlx-lm more than about a minute are measured without it. llama.cpp
(--gguf, the starter alone) runs from the wheel of `xllamacpp` (--xllamacpp, or installed), which is built for AVX2; with --gguf-q4-0 a
second one reads the weights requantised to Q4_0, for which llama.cpp has its fastest kernels (see requantise_gguf.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import zipfile
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

STOCK, NATIVE, INT8, LLAMA, LLAMA_Q4_0 = "mlx-lm", "native", "int8", "llama.cpp", "llama.cpp Q4_0"
SIDES = (STOCK, NATIVE, INT8, LLAMA, LLAMA_Q4_0)
LLAMA_CONTEXT = 4352
"""Tokens of each of llama.cpp's slots: the deepest cell and its output."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Part:
    """A model's cells: those for all sides, and those that mlx-lm doesn't end in time."""

    model: str
    both: str
    alone: str

    def groups(self, sides: Sequence[str], cells: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Cells that are measured together, those of `cells` if it names any, with the sides that measure them."""
        fast = tuple(side for side in sides if side != STOCK)
        grouped = (
            ((self.both, tuple(sides)), (self.alone, fast))
            if STOCK in sides
            else ((f"{self.both},{self.alone}", fast),)
        )
        for some, names in grouped:
            kept = ",".join(cell for cell in some.split(",") if not cells or cell in cells)
            if kept and names:
                yield kept, names


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


def llama_path(a: argparse.Namespace) -> dict[str, str]:
    """The environment in which Python finds xllamacpp: its wheel is unpacked once into --out."""
    if a.xllamacpp is None:
        return {}
    place = a.out / f"unpacked-{a.xllamacpp.stem}"
    if not place.is_dir():
        partial = place.with_suffix(f".partial-{os.getpid()}")
        with zipfile.ZipFile(a.xllamacpp) as wheel:
            wheel.extractall(partial)
        try:
            partial.rename(place)
        except OSError:  # another process was first
            shutil.rmtree(partial)
    return {"PYTHONPATH": str(place.resolve())}


def contender(name: str, model: Path, sha: str, threads: int, a: argparse.Namespace) -> WorkerContender:
    """One side, kept to the first `threads` cores that this process may run on."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    pinned = ("taskset", "-c", cores)
    if name in (LLAMA, LLAMA_Q4_0):
        gguf = a.gguf if name == LLAMA else a.gguf_q4_0
        config = json.loads((model / "config.json").read_text())
        eos = config.get("eos_token_id")
        order = {
            "vocabulary": config["vocab_size"],
            "eos": eos if isinstance(eos, list) else [] if eos is None else [eos],
            "model_sha256": sha,
            "rows": max(Cell.parse(cell).rows for part in PARTS for cell in f"{part.both},{part.alone}".split(",")),
        }
        script = Path(__file__).with_name("llama_cpp_server.py")
        command = (sys.executable, str(script), "worker", str(gguf), json.dumps(order))
        command = (*command, "--threads", str(threads), "--context", str(LLAMA_CONTEXT))
        arm = Arm(
            name=name,
            kind="reference",
            settings={"gguf": gguf.name, "threads": threads, "cores": cores},
            command=(*pinned, *command),
        )
        return WorkerContender(arm, environment=llama_path(a))
    settings: dict[str, str | int] = {} if name == STOCK else {"kernels": name, "threads": threads}
    if settings and a.kernel_cache is not None:
        settings["kernel_cache"] = str(a.kernel_cache)
    side = "mlx-lm" if name == STOCK else "gnomon"
    command = (*pinned, *worker_command(side, model, {**settings, "model_sha256": sha}))
    kind = "reference" if name == STOCK else "settings"
    return WorkerContender(Arm(name=name, kind=kind, settings={**settings, "cores": cores}, command=command))


def title_of(part: Part, threads: int, cells: str, sides: Sequence[str], blocks: int) -> str:
    return f"kernels, {part.model}, {threads} threads, {cells}, {' / '.join(sides)}, {blocks} blocks"


def measure(model: Path, part: Part, threads: int, a: argparse.Namespace) -> Iterator[Run]:
    """The runs of a model on a number of threads; those that are complete in the store are taken from there."""
    store, sha = Store(a.out), model_content(model)[0]
    done = {run.name: run for _, run in store.runs()[0] if run.complete}
    sides = [side for side in a.sides if part.model != "1b" or side not in (LLAMA, LLAMA_Q4_0)]
    for cells, names in part.groups(sides, a.cells):
        title = title_of(part, threads, cells, names, a.blocks)
        if title in done:
            yield done[title]
            continue
        contenders: list[Contender] = [contender(name, model, sha, threads, a) for name in names]
        parsed = [Cell.parse(cell) for cell in cells.split(",")]
        run, _ = paired_run(
            store, "native", title, contenders, parsed, Plan(a.blocks, a.seed), model=model, argv=sys.argv, diagnostic=a.quick
        )  # fmt: skip
        yield run


def lines(run: Run) -> Iterator[list[str]]:
    """Rows of the table: primary comparisons, or medians where there was one side."""
    _, model, threads, *_ = run.name.split(", ")
    for comparison in run.comparisons:
        if comparison.primary:
            cell, names, _, ours, theirs, ratio, outcome, _ = comparison_row(run, comparison)
            yield [model, threads.split()[0], cell, names, ours, theirs, ratio, outcome]
    if len(run.arms) == 1:
        for text in dict.fromkeys(sample.cell for sample in run.samples):
            metric = Cell.parse(text).primary
            values = sorted(
                s.metrics[metric] for s in run.samples if s.cell == text and s.status == "ok" and s.block >= 0
            )
            shown = number(values[len(values) // 2], METRICS[metric].unit) if values else "failed"
            yield [model, threads.split()[0], text, run.arms[0].name, shown, "—", "—", f"{len(values)} samples"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; 1 if a comparison could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory, the starter's for instance")
    parser.add_argument("--blocks", type=int, default=5, help="alternating blocks of each run (at least 5 decide)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[STOCK, NATIVE], help="the first is the baseline")
    parser.add_argument("--cells", nargs="+", default=[], help="of the table's cells these alone")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's file of the same weights")
    parser.add_argument("--gguf-q4-0", type=Path, help="the same as Q4_0")
    parser.add_argument("--xllamacpp", type=Path, help="its wheel, where the package isn't installed")
    parser.add_argument("--kernel-cache", type=Path, help="builds of the kernels, carried here for instance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[part.model for part in PARTS], help="this model alone")
    parser.add_argument("--quick", action="store_true", help="one block of a few short cells; diagnostic")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what --out holds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    a = parser.parse_args(argv)
    for side, path, flag in ((LLAMA, a.gguf, "--gguf"), (LLAMA_Q4_0, a.gguf_q4_0, "--gguf-q4-0")):
        if side in a.sides and (path is None or not path.is_file()):
            parser.error(f"{side} needs {flag} FILE, got {path}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if a.quick:
        a.blocks = 1
    found: list[Run] = []
    if a.table:
        found = [run for _, run in Store(a.out).runs()[0] if run.complete and run.name.startswith("kernels, ")]
    for part in () if a.table else (QUICK,) if a.quick else PARTS:
        if a.only not in (None, part.model):
            continue
        model = a.model if part.model == "starter" else random_1b(a.out / "random-1b", a.model)
        for threads in a.threads:
            found += measure(model, part, threads, a)
    rows = sorted(row for run in found for row in lines(run))
    print(table(("model", "threads", "cell", "sides", "first", "second", "ratio", "outcome"), rows))
    return int(any(c.primary and c.ratio is None for run in found for c in run.comparisons))


if __name__ == "__main__":
    sys.exit(main())
