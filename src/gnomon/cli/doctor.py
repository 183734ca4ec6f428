"""`gnomon doctor`: what works on this machine, what doesn't, why, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gnomon.cli._library import runs, size, store_of
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, HTTPConfig, KernelConfig, ModelConfig, Paths

NAME = "doctor"
HELP = "say what works on this machine, what doesn't, and what to do"
GROUPS = (ModelConfig, Paths, HTTPConfig, KernelConfig)
State = Literal["ok", "note", "broken"]
LEAST_DISK = 1 << 30
"""Bytes below which a cache's file system is called full: a small model and its conversion."""
LEAST_MEMORY = 1 << 30
"""Bytes of available memory below which the starter may fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `note`: works, but worth knowing; `broken`: what was asked for can't work. `remedy` says what to do."""

    subject: str
    state: State
    found: str
    remedy: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print all findings; 1 if something is broken."""
    findings = [finding for look in CHECKS for finding in look(args.config)]
    broken = any(finding.state == "broken" for finding in findings)
    if args.json:
        print(json.dumps({"works": not broken, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return int(broken)
    for finding in findings:
        print(f"{finding.state:7} {finding.subject}: {finding.found}")
        if finding.remedy is not None:
            print(f"        to do: {finding.remedy}")
    return int(broken)


def _versions(_: Config) -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    found: list[str] = []
    for package in ("gnomon", "mlx", "mlx-cpu", "mlx-cuda-13", "mlx-lm", "transformers", "nanobind"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    yield Finding("versions", "ok", ", ".join(found))


def _bytecode(_: Config) -> Iterator[Finding]:
    from importlib.util import cache_from_source, find_spec

    spec = find_spec("fastapi")
    if spec is None or spec.origin is None:
        return
    cached = Path(cache_from_source(spec.origin))
    if cached.exists():
        yield Finding("bytecode", "ok", "modules are compiled")
    elif sys.dont_write_bytecode or not os.access(_nearest(cached), os.W_OK):
        remedy = "install with `uv pip install --compile-bytecode`, or unset PYTHONDONTWRITEBYTECODE"
        yield Finding(
            "bytecode", "note", f"every start compiles all modules again, a second or more: no {cached.parent}", remedy
        )
    else:
        yield Finding("bytecode", "ok", "the first start compiles the modules")


def _nearest(path: Path) -> Path:
    return next(one for one in path.parents if one.exists())


def _backend(_: Config) -> Iterator[Finding]:
    from gnomon.cli._model import check_backend

    try:
        check_backend()
        from gnomon.models.backend import backend

        device = backend()
        import mlx.core as mx

        total = mx.sum(mx.arange(8)).item()
    except CommandError as error:
        # It says what is wrong and, after a colon, what to install.
        what, *remedy = str(error).split(": ", 1)
        yield Finding("backend", "broken", what, remedy[0] if remedy else None)
        return
    except RuntimeError as error:
        yield Finding("backend", "broken", f"the device computes nothing: {error}", "check the device and its driver")
        return
    yield Finding("backend", "ok" if total == 28 else "broken", f"MLX computes on {device}")


def _kernels(config: Config) -> Iterator[Finding]:
    try:
        from gnomon.kernels import build, native, operations
        from gnomon.kernels.cuda import operations as cuda_operations
        from gnomon.models.backend import backend
    except ImportError:
        return  # said above
    names = ", ".join(operation.name for operation in operations.ALL)
    wanted = native.meant(config.kernel.kernels)
    if wanted == "native" and native.is_cuda() and not config.kernel.stock:
        names = ", ".join(operation.name for operation in cuda_operations.ALL)
        yield Finding("kernels", "ok", f"native for CUDA, compiled when first used: {names}, decode steps")
        yield _launches(config)
        return
    if config.kernel.stock or wanted == "stock" or backend() != "cpu":
        if config.kernel.stock:
            why = "asked for"
        elif native.is_cuda():
            why = "what auto means on this GPU" if wanted == "stock" else f"{wanted} ones are for CPUs, this is cuda"
        else:
            why = f"native ones are for Linux CPUs and NVIDIA GPUs, this is {backend()}"
        yield Finding("kernels", "ok", f"stock operations ({why})")
        return
    try:
        tools = build.toolchain()
        here = build.Build(config.kernel.kernel_cache / tools.key / f"{build.MODULE}.so", tools, 0.0)
        yield Finding("compiler", "ok", f"{tools.compiler} ({tools.compiler_version})")
    except build.BuildError as error:
        here = build.carried(config.kernel.kernel_cache)
        if here is None:
            remedy = "install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev); --kernels stock is silent"
            yield Finding("kernels", "note", f"stock operations, many times slower: {error}", remedy)
            return
        tools = here.toolchain
        yield Finding("compiler", "ok", f"none needed: {here.path.parent} was built elsewhere ({error})")
    if not here.path.is_file():
        yield Finding(
            "kernels",
            "note",
            f"native for {tools.isas[0]}, not built yet",
            "nothing: the first start builds; or gnomon kernels build",
        )
        return
    try:
        extension = build.load(here)
    except build.BuildError as error:
        yield Finding("kernels", "broken", str(error), "gnomon kernels build --rebuild")
        return
    yield Finding(
        "kernels",
        "ok",
        f"{'int8' if wanted == 'int8' else 'native'} for {extension.isa()}, "
        f"{config.kernel.threads or native.default_threads()} threads: {names}",
    )


def _launches(config: Config) -> Finding:
    """How decode steps on CUDA are launched."""
    from gnomon.kernels import build

    if not config.kernel.cuda_graph:
        return Finding("launches", "ok", "decode steps are launched kernel by kernel (asked for)")
    try:
        tools = build.toolchain(extension=build.CUDA)
        here: build.Build | None = build.Build(
            config.kernel.kernel_cache / tools.key / f"{build.CUDA.module}.so", tools, 0.0, build.CUDA.module
        )
    except build.BuildError as error:
        here = build.carried(config.kernel.kernel_cache, build.CUDA)
        if here is None:
            return Finding(
                "launches",
                "note",
                f"decode steps are launched kernel by kernel, which costs the host a few times as much: {error}",
                "install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev); --no-cuda-graph is silent",
            )
    if not here.path.is_file():
        return Finding("launches", "note", "decode steps at once, not built yet", "nothing: the first start builds it")
    try:
        build.load(here)
    except build.BuildError as error:
        return Finding("launches", "broken", str(error), f"remove {here.path.parent}")
    return Finding("launches", "ok", "decode steps are launched at once")


def _directories(config: Config) -> Iterator[Finding]:
    from gnomon.hub.registry import hub_cache

    places = (
        ("cache", config.paths.cache, "--cache"),
        ("kernel cache", config.kernel.kernel_cache, "--kernel-cache"),
        ("hub cache", hub_cache(), "HF_HUB_CACHE"),
    )
    for subject, path, setting in places:
        there = next(p for p in (path, *path.parents) if p.exists())
        why = _unwritable(there)
        if why is not None:
            yield Finding(
                subject,
                "broken",
                f"{path} can't be written: {why}",
                f"make it writable, or choose another with {setting}",
            )
            continue
        free = _free(there)
        if free < LEAST_DISK:
            yield Finding(
                subject,
                "broken",
                f"{path} has {size(free)} free, {size(LEAST_DISK)} are needed",
                f"gnomon gc, or another place with {setting}",
            )
        else:
            yield Finding(subject, "ok", f"{path}, {size(free)} free")


def _unwritable(directory: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _free(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _memory(_: Config) -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{size(memory.available)} of {size(memory.total)} available"
    if memory.available < LEAST_MEMORY:
        yield Finding("memory", "note", found, "close other programs before loading a model")
    else:
        yield Finding("memory", "ok", found)


def _port(config: Config) -> Iterator[Finding]:
    from gnomon.serve.listen import answering

    host, port = config.http.host, config.http.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        there = answering(host, port) or error.strerror or str(error)
        yield Finding(
            "port",
            "note",
            f"{host}:{port} can't be bound: {there}",
            "choose another with --port, or --port 0 for a free one",
        )
        return
    yield Finding("port", "ok", f"{host}:{port} is free")


def _model(config: Config) -> Iterator[Finding]:
    from gnomon.hub.errors import HubError
    from gnomon.hub.registry import scan
    from gnomon.hub.resolve import STARTER, resolve

    wanted = config.model.wanted
    try:
        registry = scan(store_of(config))
        if wanted is not None:
            found = resolve(wanted, registry, fits=lambda _: True, runs=runs, ram=0)
            yield Finding("model", "ok", f"{found.id} in {found.path}")
            return
        here = [model for model in registry.servable() if runs(model)]
    except (CommandError, HubError) as error:
        yield Finding("model", "broken", str(error), "gnomon ls names the models that are here")
        return
    if here:
        yield Finding(
            "model",
            "ok",
            f"{len(here)} here: {', '.join(model.id for model in here[:5])}{', ...' if len(here) > 5 else ''}",
        )
    else:
        yield Finding(
            "model", "note", "none here", f"nothing: a start without one fetches {STARTER.id}; or gnomon get OWNER/NAME"
        )


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _versions,
    _bytecode,
    _backend,
    _kernels,
    _directories,
    _memory,
    _port,
    _model,
)
