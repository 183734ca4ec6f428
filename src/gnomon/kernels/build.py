"""Compile the native kernels on the machine that runs them, once, and load them only after checking what is loaded.

There are two extensions: `CPU` (`gnomon/kernels/cpu`), whose builds are for one instruction set, the best that the CPU has, unless more are
asked for, and `CUDA` (`gnomon/kernels/cuda/graph`), which launches kernels that are compiled elsewhere.
MLX exchanges arrays only with an extension built against the same mlx and nanobind, so a build is kept under a key made of
everything that must match: mlx, nanobind, Python, compiler, flags, CPU and sources. Nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
MODULE = "gnomon_kernels"
COMPILERS = ("c++", "g++", "clang++")
NANOBIND = ("3.0.1", "3.1.0")
"""Versions of nanobind that exchange arrays with mlx 0.32.4."""
LOCK_SECONDS = 900.0
ROOMS, OWNER = "building-", "owner.lock"
"""Directories in which builds are made, and the file in each that its process holds a lock on."""
ABANDONED_SECONDS = 3600.0
"""Age from which a room without that file is nobody's."""

_COMMON = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a fused operation is written as one, or not at all
    "-fno-math-errno",
    "-DNDEBUG",
    "-DNB_DOMAIN=mlx",
)
_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
)
_ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": (),
    "portable": ("-O2",),
}


@dataclass(frozen=True, slots=True)
class Extension:
    """A module of C++ to build. `trial` is run in another process before a build counts, with the module's name and file as arguments."""

    module: str
    what: str
    sources: Path
    trial: str
    takes_isas: bool


class BuildError(Exception):
    """The kernels can't be built or mustn't be loaded here; the message says why in one line, `log` is the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What a build is made with and for."""

    compiler: str
    compiler_version: str
    mlx: str
    nanobind: str
    python: str
    machine: str
    isas: tuple[str, ...]
    sources: str
    flags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the build's directory: a readable start and a hash over every field."""
        fields = "\0".join(str(getattr(self, f)) for f in self.__slots__)
        return f"mlx{self.mlx}-{self.python}-{hashlib.sha256(fields.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build. `seconds` is how long compiling took, 0 for one found in the cache."""

    path: Path
    toolchain: Toolchain
    seconds: float
    module: str = MODULE


def cpu_isas() -> tuple[str, ...]:
    """Instruction sets of this CPU for which there are kernels, best first; `portable` alone where there is none."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ("neon",)
    flags = _cpu_flags()
    found: list[str] = []
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"} <= flags:
        if "avx512_vnni" in flags:
            found.append("avx512vnni")
        found.append("avx512")
    if {"avx2", "fma", "f16c"} <= flags:
        found.append("avx2")
    return tuple(found) or ("portable",)


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def source_hash(folder: Path = SOURCES) -> str:
    """Hash over the names and contents of all sources in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def toolchain(
    compiler: str | None = None,
    isas: Sequence[str] | None = None,
    flags: Sequence[str] = (),
    extension: Extension | None = None,
) -> Toolchain:
    """Find what is needed to build an extension (the CPU's). Raises BuildError naming what is missing."""
    extension = extension or CPU
    if sys.platform != "linux":
        raise BuildError(f"{extension.what} are for Linux, this is {sys.platform}")
    try:
        nanobind = version("nanobind")
    except PackageNotFoundError:
        raise BuildError("the package nanobind is not installed") from None
    if nanobind not in NANOBIND:
        raise BuildError(f"nanobind {nanobind} can't exchange arrays with this mlx; it takes {' or '.join(NANOBIND)}")
    path = shutil.which(compiler) if compiler else next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        raise BuildError(f"no C++ compiler found (looked for {compiler or ', '.join(COMPILERS)})")
    try:
        banner = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"the C++ compiler {path} does not run: {e}") from e
    if not (_python_include() / "Python.h").is_file():
        raise BuildError(f"Python's headers are not installed (no Python.h in {_python_include()})")
    return Toolchain(
        compiler=path,
        compiler_version=banner.splitlines()[0] if banner else "",
        mlx=version("mlx"),
        nanobind=nanobind,
        python=sysconfig.get_config_var("SOABI") or platform.python_version(),
        machine=f"{platform.machine()} {hashlib.sha256(' '.join(sorted(_cpu_flags())).encode()).hexdigest()[:12]}",
        isas=tuple(isas) if isas is not None else _isas(extension)[:1],
        sources=source_hash(extension.sources),
        flags=tuple(flags),
    )


def _isas(extension: Extension) -> tuple[str, ...]:
    return cpu_isas() if extension.takes_isas else (extension.module,)


def ensure(
    cache: Path,
    *,
    extension: Extension | None = None,
    compiler: str | None = None,
    isas: Sequence[str] | None = None,
    flags: Sequence[str] = (),
    rebuild: bool = False,
    progress: Callable[[str], None] = log.info,
) -> Build:
    """Return the build of an extension (the CPU's) for this machine, compiling it first if the cache has none.

    One process compiles, others wait for it. `isas` None is the best one of this CPU. `flags` are added to every compilation
    (sanitizers). Where nothing can be compiled, a build that was carried here is taken. Raises BuildError.
    """
    extension = extension or CPU
    try:
        tools = toolchain(compiler, isas, flags, extension)
    except BuildError as e:
        found = carried(cache, extension)
        if found is None:
            raise
        progress(f"{e}: taking the kernels in {found.path.parent}, built for {', '.join(found.toolchain.isas)}")
        return found
    home = cache / tools.key
    finished = Build(home / f"{extension.module}.so", tools, 0.0, extension.module)
    if not rebuild and _complete(finished):
        return finished
    try:
        private_directory(cache)
        with FileLock(cache / f"{tools.key}.lock", timeout=LOCK_SECONDS):
            if not rebuild and _complete(finished):
                return finished
            return _build(extension, finished, cache, progress)
    except Timeout:
        raise BuildError(f"another process has been building the kernels for more than {LOCK_SECONDS:.0f} s") from None
    except OSError as e:
        raise BuildError(f"the kernel cache {cache} can't be written: {e}") from e


def carried(cache: Path, extension: Extension | None = None) -> Build | None:
    """The best build in `cache` that another machine made of these sources for this mlx, this Python and an instruction set of this CPU.

    Only the instruction sets' files are compiled for a CPU, and which of them runs is asked at run time, so a copied cache serves
    machines without a compiler.
    """
    extension = extension or CPU
    here = (version("mlx"), sysconfig.get_config_var("SOABI"), source_hash(extension.sources))
    order = _isas(extension)
    order = (*order, *(("portable",) if extension.takes_isas and "portable" not in order else ()))
    found: list[tuple[int, Build]] = []
    for manifest in sorted(cache.glob("*/build.json")):
        try:
            said = json.loads(manifest.read_text())
            fields: dict[str, Any] = {name: said[name] for name in Toolchain.__slots__}
            fields.update(isas=tuple(said["isas"]), flags=tuple(said["flags"]))
            tools = Toolchain(**fields)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        known = [order.index(isa) for isa in tools.isas if isa in order]
        same = (tools.mlx, tools.python, tools.sources) == here and tools.machine.split()[:1] == [platform.machine()]
        if same and known and not tools.flags:
            found.append((min(known), Build(manifest.parent / f"{extension.module}.so", tools, 0.0, extension.module)))
    return min(found, key=lambda one: one[0])[1] if found else None


def load(build: Build) -> ModuleType:
    """Import a build after checking who owns it and that it is what was built. Raises BuildError."""
    home = build.path.parent
    for path in (home, build.path, home / "build.json"):
        check_owner(path)
    try:
        manifest = json.loads((home / "build.json").read_text())
        digest = hashlib.sha256(build.path.read_bytes()).hexdigest()
    except (OSError, ValueError) as e:
        raise BuildError(f"the kernel build in {home} can't be read: {e}") from e
    if manifest.get("sha256") != digest or manifest.get("key") != build.toolchain.key:
        raise BuildError(f"the kernel build in {home} is not the one that was made there; remove it")
    import mlx.core as mx  # registers the array type that the extension exchanges

    running = str(mx.__version__)  # pyright: ignore[reportAttributeAccessIssue]
    if build.toolchain.mlx != running:
        raise BuildError(f"the kernels are built for mlx {build.toolchain.mlx}, but {running} is running")
    try:
        loader = importlib.machinery.ExtensionFileLoader(build.module, str(build.path))
        spec = importlib.util.spec_from_file_location(build.module, build.path, loader=loader)
        if spec is None:
            raise BuildError(f"{build.path} can't be imported")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as e:
        raise BuildError(f"the native kernels don't import: {e}") from e
    return module


def _python_include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise BuildError(f"the package {name} is not installed")
    # A namespace package has a place for every folder of its name on the path, a stranger's beside the script among them.
    return next((place for place in map(Path, places) if (place / "include").is_dir()), Path(places[0]))


def _complete(build: Build) -> bool:
    return build.path.is_file() and (build.path.parent / "build.json").is_file()


def check_owner(path: Path) -> None:
    """What is loaded runs as us: it must be ours, and nobody else may have been able to write it."""
    try:
        info = path.lstat()
    except OSError as e:
        raise BuildError(f"{path} can't be read: {e}") from e
    if stat.S_ISLNK(info.st_mode):
        raise BuildError(f"{path} is a symbolic link; not loading it")
    if info.st_uid != os.geteuid():
        raise BuildError(f"{path} belongs to user {info.st_uid}, not to us ({os.geteuid()}); not loading it")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):o}); not loading it")


def private_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path)


def compile_commands(tools: Toolchain, objects: Path, extension: Extension | None = None) -> dict[str, list[str]]:
    """The compiler's command line for every object file, by the object's name."""
    extension = extension or CPU
    nanobind, mlx = _package("nanobind"), _package("mlx")
    includes = ["-isystem", str(mlx / "include"), "-isystem", str(nanobind / "include")]
    includes += ["-isystem", str(nanobind / "ext" / "robin_map" / "include"), "-isystem", str(_python_include())]
    common = [tools.compiler, *_COMMON, f'-DGNOMON_MLX_VERSION="{tools.mlx}"']
    commands: dict[str, list[str]] = {}
    if extension.takes_isas:
        common += [f"-DGNOMON_{isa.upper()}" for isa in tools.isas]
        # What these two run for long is in the instruction sets' files: more optimisation costs a fifth of the build and gains nothing.
        commands["all"] = [*common, "-O1", *includes, "-c", str(SOURCES / "all.cpp")]
        commands["bindings"] = [*common, *includes, "-c", str(SOURCES / "bindings.cpp")]
        for isa in tools.isas:
            commands[f"isa_{isa}"] = [*common, "-O3", *_ISA_FLAGS[isa], "-c", str(SOURCES / f"isa_{isa}.cpp")]
    else:
        # MLX's own headers name a little of CUDA's, which need not be installed.
        includes = ["-isystem", str(extension.sources / "shim"), *includes]
        for path in sorted(extension.sources.glob("*.cpp")):
            commands[path.stem] = [*common, *includes, "-c", str(path)]
    combined = nanobind / "src" / "nb_combined.cpp"
    commands["nanobind"] = [*common, "-O1", "-fno-strict-aliasing", *includes, "-c", str(combined)]
    return {name: [*line, *tools.flags, "-o", str(objects / f"{name}.o")] for name, line in commands.items()}


def _run(line: list[str]) -> None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError as e:
        raise BuildError(f"the C++ compiler does not run: {e}") from e
    if done.returncode:
        errors = (
            [text for text in done.stderr.splitlines() if "error" in text]
            or done.stderr.splitlines()
            or [f"status {done.returncode}"]
        )
        raise BuildError(f"compiling native kernels failed: {errors[0].strip()}", log=done.stderr)


def clear_abandoned(cache: Path) -> None:
    """Remove what builds left whose process was killed: the system took their locks back, on whichever machine they ran."""
    for room in cache.glob(f"{ROOMS}*"):
        try:
            if (room / OWNER).exists():
                with FileLock(room / OWNER, timeout=0):
                    shutil.rmtree(room)
            elif time.time() - room.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(room)
        except (Timeout, OSError):
            continue  # its owner works on, or another process was first


def _build(extension: Extension, build: Build, cache: Path, progress: Callable[[str], None]) -> Build:
    tools, home = build.toolchain, build.path.parent
    what = f"{', '.join(tools.isas)} with {tools.compiler_version}" if extension.takes_isas else tools.compiler_version
    progress(f"Building the {extension.what} for {what} (once on this machine, about 10 s)")
    start = time.monotonic()
    clear_abandoned(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=ROOMS) as room, FileLock(Path(room) / OWNER):
        objects, result = Path(room), Path(room) / "result"
        result.mkdir(mode=0o700)
        commands = compile_commands(tools, objects, extension)
        # Longest first, as they are the ones that include mlx.
        order = sorted(commands, key=lambda name: (name.startswith("isa_portable"), name.startswith("isa_"), name))
        workers = min(len(order), os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda name: _run(commands[name]), order):
                pass
        library = result / build.path.name
        mlx_lib = _package("mlx") / "lib"
        link = [tools.compiler, "-shared", "-o", str(library), *(str(objects / f"{name}.o") for name in order)]
        _run([*link, *tools.flags, f"-L{mlx_lib}", "-lmlx", f"-Wl,-rpath,{mlx_lib}", "-pthread"])
        seconds = time.monotonic() - start
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        manifest = {
            "key": tools.key,
            "sha256": digest,
            "seconds": round(seconds, 1),
            **{f: getattr(tools, f) for f in tools.__slots__},
        }
        (result / "build.json").write_text(json.dumps(manifest, indent=1))
        library.chmod(0o700)
        (result / "build.json").chmod(0o600)
        if not tools.flags:
            _try_out(extension, result, tools)
        if home.exists():
            shutil.rmtree(home)
        result.rename(home)
    progress(f"Built the {extension.what} in {seconds:.1f} s")
    return replace(build, seconds=seconds)


_TRIAL = """
import importlib.machinery, importlib.util, sys
import mlx.core as mx
loader = importlib.machinery.ExtensionFileLoader(sys.argv[1], sys.argv[2])
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(sys.argv[1], sys.argv[2], loader=loader))
loader.exec_module(module)
mx.set_default_device(mx.cpu)
w, s, b = mx.quantize(mx.arange(64 * 8, dtype=mx.float32).reshape(8, 64), 64, 4)
x = mx.ones((1, 64))
close = mx.allclose(module.quantized_matmul(x, w, s, b, 64, 4), mx.quantized_matmul(x, w, s, b, group_size=64, bits=4), rtol=1e-5)
sys.exit(0 if close.item() else "wrong product")
"""


_CUDA_TRIAL = """
import sys
from gnomon.kernels.cuda import graphs
sys.exit(graphs.try_out(sys.argv[1], sys.argv[2]))
"""

CPU = Extension(MODULE, "native CPU kernels", SOURCES, _TRIAL, takes_isas=True)
CUDA = Extension(
    "gnomon_cuda",
    "CUDA graphs of decode steps",
    Path(__file__).parent / "cuda" / "graph",
    _CUDA_TRIAL,
    takes_isas=False,
)


def _try_out(extension: Extension, result: Path, tools: Toolchain) -> None:
    """A build that crashes or doesn't know mlx's arrays must do so in another process than ours."""
    line = [sys.executable, "-c", extension.trial, extension.module, str(result / f"{extension.module}.so")]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"the new {extension.what} could not be tried out: {e}") from e
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise BuildError(f"the new {extension.what} fail their first run (mlx {tools.mlx}): {last}", log=done.stderr)
