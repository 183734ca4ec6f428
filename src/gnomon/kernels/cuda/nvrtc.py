"""Compile kernels with the NVRTC that MLX has loaded, once on a machine: results are kept in the kernel cache."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from gnomon.kernels.build import BuildError, check_owner, private_directory

LIBRARY = "libnvrtc.so.13"
HEADERS = "cuda_bf16.h"
OPTIONS = ("--std=c++20", "--device-as-default-execution-space")


def compile_all(texts: Mapping[str, str], architecture: str, cache: Path) -> dict[str, bytes]:
    """Machine code (cubin) of each text for `architecture` ("sm_90a"), by the texts' names. Raises BuildError."""
    try:
        private_directory(cache)
        with ThreadPoolExecutor(max(1, min(len(texts), os.cpu_count() or 1))) as pool:
            found = pool.map(lambda one: _cached(one, architecture, cache), texts.values())
            return dict(zip(texts, found, strict=True))
    except OSError as e:
        raise BuildError(f"the kernel cache {cache} can't be used: {e}") from e


def _cached(text: str, architecture: str, cache: Path) -> bytes:
    # A kernel's name, which is in the text, has a hash of the files that it includes.
    parts = (version(), architecture, *OPTIONS, text)
    path = cache / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.{architecture}.cubin"
    if path.exists():
        check_owner(path)
        return path.read_bytes()
    code = compile_one(text, architecture)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as made:
        made.write(code)
    Path(made.name).replace(path)
    return code


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """NVRTC, the one that MLX has loaded. Raises BuildError."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as e:
        raise BuildError(f"NVRTC can't be loaded: {e}") from e


def _check(result: int, function: str, log: str = "") -> None:
    if result:
        named = library().nvrtcGetErrorString
        named.restype = ctypes.c_char_p
        errors = [line for line in log.splitlines() if "error" in line]
        raise BuildError(f"{function} failed: {named(result).decode()}{f', {errors[0]}' if errors else ''}", log)


@lru_cache(maxsize=1)
def version() -> str:
    """NVRTC's version. Raises BuildError."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


@lru_cache(maxsize=1)
def include_directory() -> Path:
    """Where CUDA's own headers lie: the package that MLX brings along, or an installed toolkit. Raises BuildError."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(place) / "cu13" / "include" for place in (spec.submodule_search_locations or [] if spec else [])]
    for place in (*packages, Path("/usr/local/cuda/include")):
        if (place / HEADERS).is_file():
            return place
    raise BuildError(f"CUDA's headers are not installed (no {HEADERS} in {', '.join(map(str, packages))})")


def compile_one(text: str, architecture: str) -> bytes:
    """Machine code of one text. Raises BuildError with the compiler's output as its log."""
    found, program = library(), ctypes.c_void_p()
    _check(
        found.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"gnomon.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        options = [
            f"--gpu-architecture={architecture}",
            *OPTIONS,
            f"--include-path={include_directory()}",
        ]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = found.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        _check(found.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
        log = ctypes.create_string_buffer(size.value)
        _check(found.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        _check(result, "nvrtcCompileProgram", log.value.decode(errors="replace"))
        _check(found.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(found.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        found.nvrtcDestroyProgram(ctypes.byref(program))
