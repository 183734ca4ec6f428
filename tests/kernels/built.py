"""The kernels under test, loaded once per process."""

import os
from functools import cache
from types import ModuleType

import pytest

from gnomon.config import resolve
from gnomon.kernels import build

SANITIZERS = {"": (), "address": ("-fsanitize=address", "-g", "-O1"), "thread": ("-fsanitize=thread", "-g", "-O1")}
"""Flags by the value of GNOMON_TEST_SANITIZER, which scripts/sanitize_kernels.sh sets."""


def all_isas() -> list[str]:
    """Instruction sets to test: those of this CPU and the portable one.

    AVX-512 without VNNI differs from that with it in one file only and has a slow test. How threads share work is the same on all: under
    ThreadSanitizer one is enough.
    """
    if os.environ.get("GNOMON_TEST_SANITIZER") == "thread":
        return build.cpu_isas()[:1]
    isas = [isa for isa in build.cpu_isas() if isa != "avx512" or "avx512vnni" not in build.cpu_isas()]
    return [*isas, *(["portable"] if "portable" not in isas else [])]


@cache
def load_kernels() -> ModuleType:
    """The native kernels with every instruction set that this CPU can run, built once into the user's cache."""
    flags = SANITIZERS[os.environ.get("GNOMON_TEST_SANITIZER", "")]
    try:
        return build.load(build.ensure(resolve().kernel.kernel_cache, isas=all_isas(), flags=flags))
    except build.BuildError as e:
        if "compiling" in str(e) or "fail" in str(e):
            raise
        pytest.skip(f"no toolchain: {e}")
