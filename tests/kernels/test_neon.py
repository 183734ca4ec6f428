"""The NEON kernels, cross-compiled and run under emulation; needs `g++-aarch64-linux-gnu` and `qemu-user`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gnomon.kernels import build

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None or EMULATOR is None, reason="no cross compiler or no emulator for arm64")
def test_neon_kernels_under_emulation(tmp_path: Path) -> None:
    program = tmp_path / "neon"
    sources = [str(Path(__file__).with_name("neon_driver.cpp")), str(build.SOURCES / "isa_neon.cpp")]
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-static", "-DGNOMON_NEON", "-I", str(build.SOURCES)]
    subprocess.run([str(COMPILER), *flags, *sources, "-o", str(program)], check=True, timeout=600)
    done = subprocess.run([str(EMULATOR), str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "neon: 0 differences\n"
    assert done.returncode == 0
