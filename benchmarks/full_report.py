"""The full report of the starter: this product beside llama.cpp's server and beside mlx_lm.server, leg by leg, then one HTML file.

llama.cpp comes from the package `xllamacpp`, built for AVX2, which uv fetches into an environment of its own, or is a `llama-server` built
on this machine (--llama-server PATH, the fairer one). It reads the GGUF file that the starter was converted from: all servers have the same
weights. mlx_lm.server reads about ten tokens a second on two cores: it gets shorter legs, and fewer of them. The leg `restart` is
measured with this product's tier on disk.

Every leg is a run of its own in --out; with the same revision, those that are complete there are not measured again, so that an interrupted
report goes on where it stood.

    uv run python benchmarks/full_report.py --try     (one block of a few tokens each: does everything run?)
    uv run python benchmarks/full_report.py           (about a quarter of an hour on two cores)
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.bench.schema import Run
from gnomon.bench.store import Store
from gnomon.bench.suite import LEGS, summary
from gnomon.cli.main import main as gnomon
from gnomon.config import resolve
from gnomon.hub import starter
from gnomon.hub.package import fetch
from gnomon.hub.store import Store as Models
from gnomon.models.starter import Converter

SERVER = Path(__file__).with_name("llama_cpp_server.py")
ON_DISK = "gnomon --ssd-cache=gnomon serve {model} --port {port} --ssd-cache {state}"
SLOTS = 8
"""As many rows as this product decodes at once."""
CONTEXT = 32_768
"""Tokens of all slots together: 4,096 each, which the longest leg needs."""
SLOW = (
    "readiness,parity=parity:16,decode=stream:1x24,first-token=ttft:24,concurrency=loop:2x1x8,poisson=poisson:4x8@1:5:1,"
    "cancellation=cancel:256,memory=memory:4@24"
)
"""Legs that mlx_lm.server ends in time."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One call of `gnomon bench serve`: this product's arm, the other one, and the legs."""

    ours: str
    theirs: str
    legs: str
    warmups: int


def gguf(directory: Path) -> Path:
    """The starter's GGUF file, fetched as the starter itself is."""
    directory.mkdir(parents=True, exist_ok=True)
    return fetch(starter.FILE, directory, say)


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr)


def python_with_llama_cpp(directory: Path) -> Path:
    """The interpreter of an environment in `directory` that holds llama.cpp's package, made once."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(directory)], check=True)
        subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), "xllamacpp"], check=True)
    return python.absolute()


def llama_cpp(file: Path, binary: Path | None, threads: int, environment: Path) -> str:
    """Command line of llama.cpp's server, with its port left open. All slots share the context. `environment` is where the package goes,
    if there is no `binary`."""
    context = str(CONTEXT)
    if binary is not None:
        words = [
            str(binary),
            "-m",
            str(file),
            "-t",
            str(threads),
            "-tb",
            str(threads),
            "-np",
            str(SLOTS),
            "-c",
            context,
        ]
    else:
        words = [str(python_with_llama_cpp(environment)), str(SERVER), "serve", str(file)]
        words += ["--threads", str(threads), "--slots", str(SLOTS), "--context", context]
    return f"{shlex.join(words)} --port {{port}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write report.md and report.html; returns what `gnomon bench serve` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="one block of the smallest legs: does everything run?"
    )
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--only", choices=("llama.cpp", "mlx_lm.server"), help="beside this server alone")
    parser.add_argument(
        "--llama-server", type=Path, metavar="PATH", help="a llama-server to measure instead of the package's"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="llama.cpp's threads")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/full"), help="directory of the results")
    a = parser.parse_args(argv)
    a.out = a.out.absolute()
    model = starter.ensure(Models(resolve().paths.cache), Converter(), say)
    # Where they can't be built, the server says so and how it computes; a first start that builds them would be no start.
    gnomon(["kernels", "build"])
    file = gguf(a.out.parent / "gguf")
    other = f"llama.cpp={llama_cpp(file, a.llama_server, a.threads, a.out.parent / 'llama-cpp')}"
    quick = ",".join(leg for leg in LEGS if leg != "restart")
    passes = (
        Pass("gnomon", other, quick, 1),
        Pass(ON_DISK, other, "restart", 0),
        Pass("gnomon", "mlx_lm.server", quick if a.trial else SLOW, 0),
    )
    status = 0
    for one in passes:
        if status not in (0, 1) or (a.only and a.only not in one.theirs):
            continue
        words = [
            str(model),
            "--arm",
            one.ours,
            "--arm",
            one.theirs,
            "--legs",
            one.legs,
            "--resume",
            "--out",
            str(a.out),
        ]
        words += ["--weights", f"llama.cpp={file}"] if one.theirs == other else []
        words += ["--size", "small", "--blocks", "1", "--warmups", "0", "--diagnostic"] if a.trial else []
        words += ["--blocks", str(a.blocks), "--warmups", str(one.warmups)] if not a.trial else []
        status = max(status, gnomon(["bench", "serve", *words]))
    store = Store(a.out)
    latest = {run.name: run for _, run in store.runs()[0] if run.complete and run.kind == "serve"}
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in latest.values():
        groups.setdefault(tuple(arm.name for arm in run.arms), []).append(run)
    (a.out / "report.md").write_text("\n\n".join(map(summary, groups.values())) + "\n")
    gnomon(["bench", "report", "--out", str(a.out)])
    return status


if __name__ == "__main__":
    sys.exit(main())
