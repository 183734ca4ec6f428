"""Builds for different instruction sets in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import warnings
warnings.simplefilter("error")
from gnomon.config import resolve
from gnomon.kernels import build
from kernels.built import all_isas
cache = resolve().kernel.kernel_cache
one, other = build.load(build.ensure(cache)), build.load(build.ensure(cache, isas=all_isas()))
assert one is not other and one.__file__ != other.__file__
print(one.Projection is other.Projection, one.HeadForm is other.HeadForm)
"""


def test_the_second_build_has_the_types_too() -> None:
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{PROGRAM}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")
