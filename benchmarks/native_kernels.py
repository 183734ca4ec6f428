"""Native CPU kernels against unmodified mlx-lm and llama.cpp: prefill, decoding at several depths and batches, on one thread and on two.

The starter (or any MODEL) and a random model of a 1B shape, each side in a process of its own that is kept to as many cores as it has
threads, in alternating blocks. Every model, number of threads and list of cells is a run of its own in --out: one that is complete there is
not repeated, so an interrupted table goes on where it stood, and it can be measured in parts of a few minutes:

    uv run python benchmarks/native_kernels.py MODEL [--blocks 5] [--threads 1 2] [--out DIR] [--quick] [--only starter|1b]
    uv run python benchmarks/native_kernels.py MODEL --only starter --threads 2 --cells decode:32@0 --out DIR \
        --sides native llama.cpp --gguf FILE --llama PATH
    uv run python benchmarks/native_kernels.py MODEL --bandwidth --out DIR
    uv run python benchmarks/native_kernels.py MODEL --table --out DIR

Cells that take mlx-lm more than about a minute are measured without it. llama.cpp reads --gguf, and for the random model a file of the
same weights that is made from --gguf's vocabulary; --llama is its `llama-server`, else the wheel of `xllamacpp` runs (--xllamacpp, or
installed), which is built for AVX2. With --gguf-q4-0 a second one reads the starter requantised to Q4_0, for which llama.cpp has its
fastest kernels (see requantise_gguf.py). The table says what share of the memory's bandwidth (--bandwidth measures it) the least bytes of a
cell come to.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from gnomon.bench.compare import compare
from gnomon.bench.contenders import WorkerContender, worker_command
from gnomon.bench.cost import CostModel
from gnomon.bench.inventory import inventory
from gnomon.bench.provenance import machine, model_content
from gnomon.bench.report import ratio, table
from gnomon.bench.runner import Plan
from gnomon.bench.schema import Arm, Run
from gnomon.bench.session import paired_run
from gnomon.bench.store import Store
from gnomon.bench.workload import Cell, Contender
from mlx_to_gguf import convert

STOCK, NATIVE, INT8, LLAMA, LLAMA_Q4_0 = "mlx-lm", "native", "int8", "llama.cpp", "llama.cpp Q4_0"
SIDES = (STOCK, NATIVE, INT8, LLAMA, LLAMA_Q4_0)
LLAMA_CONTEXT = 4352
"""Tokens of each of llama.cpp's slots: the deepest cell and its output."""
BANDWIDTH = "bandwidth"
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
    Part("starter", "prompt:32,prompt:256,decode:32@0,decode:16@1024,decode:8@4096,batch:1x16,batch:4x16,batch:8x16", "prompt:2048"),
    Part("1b", "decode:2@0", "prompt:32,decode:16@0,decode:16@1024,decode:16@4096,batch:1x16,batch:4x16,batch:8x16"),
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


def cores_of(threads: int) -> str:
    """The first `threads` cores that this process may run on, as taskset names them."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))


def contender(
    name: str, model: Path, sha: str, threads: int, gguf: Path | None, a: argparse.Namespace
) -> WorkerContender:
    """One side, kept to the first `threads` cores that this process may run on."""
    cores = cores_of(threads)
    pinned = ("taskset", "-c", cores)
    if gguf is not None:
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
        if a.llama is not None:
            command = (*command, "--binary", str(a.llama))
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
    files = {LLAMA: a.gguf, LLAMA_Q4_0: a.gguf_q4_0}
    if part.model == "1b":
        files = {LLAMA: random_gguf(model, a.gguf)} if LLAMA in a.sides else {}
    sides = [side for side in a.sides if side in files or side not in (LLAMA, LLAMA_Q4_0)]
    for cells, names in part.groups(sides, a.cells):
        title = title_of(part, threads, cells, names, a.blocks)
        if title in done:
            yield done[title]
            continue
        contenders: list[Contender] = [contender(name, model, sha, threads, files.get(name), a) for name in names]
        parsed = [Cell.parse(cell) for cell in cells.split(",")]
        run, _ = paired_run(
            store, "native", title, contenders, parsed, Plan(a.blocks, a.seed), model=model, argv=sys.argv, diagnostic=a.quick
        )  # fmt: skip
        yield run


def random_gguf(model: Path, like: Path) -> Path:
    """The random model for llama.cpp, made once beside its directory."""
    out = model.with_name(f"{model.name}.Q4_1.gguf")
    if not out.is_file():
        partial = out.with_suffix(f".partial-{os.getpid()}")
        convert(model, like, partial)
        partial.rename(out)
    return out


READ = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
parts = np.ones((int(sys.argv[1]), (256 << 20) // 8 // int(sys.argv[1])))
with ThreadPoolExecutor(len(parts)) as pool:
    def once():
        begun = time.perf_counter()
        list(pool.map(np.max, parts))
        return time.perf_counter() - begun
    print(parts.nbytes / min(once() for _ in range(12)))
"""


def measure_bandwidth(out: Path, threads: Sequence[int]) -> None:
    """Write the bytes per second that so many cores read from memory to `out`, by number of cores."""
    found: dict[str, float] = {}
    for n in threads:
        command = ["taskset", "-c", cores_of(n), sys.executable, "-c", READ, str(n)]
        found[str(n)] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{n} threads read {found[str(n)] / 1e9:.1f} GB/s")
    out.mkdir(parents=True, exist_ok=True)
    (out / BANDWIDTH).write_text(json.dumps({"machine": machine(), "bytes_per_second": found}))


def bandwidth_of(out: Path) -> dict[str, float]:
    """What `measure_bandwidth` found on this machine, or nothing."""
    try:
        stored = json.loads((out / BANDWIDTH).read_text())
    except FileNotFoundError:
        return {}
    return stored["bytes_per_second"] if stored["machine"] == machine() else {}


def least_bytes(costs: CostModel, cell: Cell) -> float:
    """Bytes of weights and state that must be read for a token of the cell's rate."""
    if cell.task == "batch":
        cost = costs.decode(cell.prompt_tokens + cell.output_tokens // 2, cell.rows)
    elif cell.task == "prompt":
        cost = costs.prefill(cell.prompt_tokens)
    else:
        cost = costs.decode(cell.depth + cell.output_tokens // 2)
    return cost.bytes / cost.tokens


def lines(run: Run, costs: CostModel, bandwidth: Mapping[str, float]) -> Iterator[list[str]]:
    """A row of the table for every cell and side: median, number of samples, share of the bandwidth, and ratios with their intervals."""
    _, model, threads, *_ = run.name.split(", ")
    threads = threads.split()[0]
    for text in dict.fromkeys(sample.cell for sample in run.samples):
        cell = Cell.parse(text)
        for arm in run.arms:
            values = [
                s.metrics[cell.primary]
                for s in run.samples
                if s.cell == text
                and s.arm == arm.name
                and s.status == "ok"
                and s.block >= 0
                and cell.primary in s.metrics
            ]
            if not values:
                yield [model, threads, text, arm.name, "failed", "0", "", "", ""]
                continue
            rate = median(values)
            share = f"{rate * least_bytes(costs, cell) / bandwidth[threads]:.0%}" if threads in bandwidth else ""
            ratios = [
                ratio(compare(run.samples, text, other, arm.name, cell.primary))
                if other != arm.name and any(other == a.name for a in run.arms)
                else ""
                for other in (LLAMA, STOCK)
            ]
            yield [model, threads, text, arm.name, f"{rate:,.1f}", str(len(values)), share, *ratios]


HEAD = ("model", "threads", "cell", "side", "token/s", "samples", "bandwidth", "to llama.cpp", "to mlx-lm")


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
    parser.add_argument("--llama", type=Path, help="llama.cpp's llama-server, built on this machine")
    parser.add_argument("--xllamacpp", type=Path, help="its wheel, where the package isn't installed")
    parser.add_argument("--kernel-cache", type=Path, help="builds of the kernels, carried here for instance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[part.model for part in PARTS], help="this model alone")
    parser.add_argument("--quick", action="store_true", help="one block of a few short cells; diagnostic")
    parser.add_argument("--bandwidth", action="store_true", help="measure the memory's bandwidth alone, for the table")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what --out holds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    a = parser.parse_args(argv)
    for side, path, flag in ((LLAMA, a.gguf, "--gguf"), (LLAMA_Q4_0, a.gguf_q4_0, "--gguf-q4-0")):
        if side in a.sides and (path is None or not path.is_file()):
            parser.error(f"{side} needs {flag} FILE, got {path}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if a.bandwidth:
        measure_bandwidth(a.out, a.threads)
        return 0
    if a.quick:
        a.blocks = 1
    bandwidth = bandwidth_of(a.out)
    rows: list[list[str]] = []
    for part in (QUICK,) if a.quick else PARTS:
        if a.only not in (None, part.model):
            continue
        model = a.model if part.model == "starter" else random_1b(a.out / "random-1b", a.model)
        costs = CostModel(inventory(model))
        if a.table:
            start = f"kernels, {part.model}, "
            runs = [run for _, run in Store(a.out).runs()[0] if run.complete and run.name.startswith(start)]
        else:
            runs = [run for threads in a.threads for run in measure(model, part, threads, a)]
        rows += sorted(row for run in runs for row in lines(run, costs, bandwidth))
    print(table(HEAD, rows))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
