"""`gnomon kernels`: build, list, check and time the native kernels of this machine: those for CUDA on a GPU, else those for CPUs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gnomon.cli._verbs import CommandError
from gnomon.config import Config, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    from gnomon.kernels.bench import Timing
    from gnomon.kernels.build import Build
    from gnomon.kernels.verify import Check

NAME = "kernels"
HELP = "build, list, verify and time the native kernels"
GROUPS = (KernelConfig,)
ACTIONS = ("list", "build", "verify", "bench")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="what to do; list when left out")
    parser.add_argument(
        "--all", action="store_true", help="for all instruction sets of this CPU, not just the best one"
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if there is a build for this machine")


def run(args: argparse.Namespace) -> int:
    from gnomon.kernels import native

    config: Config = args.config
    if native.is_cuda():
        return _run_cuda(args.action, config, args.rebuild)
    if args.action == "list":
        return _list(config)
    extension, build = _load(config, args.rebuild and args.action == "build", args.all)
    if args.action == "build":
        how = f"built in {build.seconds:.1f} s" if build.seconds else "found in the cache"
        print(f"{build.path} ({how}); instruction sets: {', '.join(extension.isas())}")
        return 0
    return _verify(extension) if args.action == "verify" else _bench(extension)


def _run_cuda(action: str, config: Config, rebuild: bool) -> int:
    from gnomon.kernels import build, native
    from gnomon.kernels.cuda import operations
    from gnomon.kernels.cuda.bench import bench
    from gnomon.kernels.cuda.decode import FAMILIES
    from gnomon.kernels.cuda.verify import verify

    if action == "verify":
        return _report(list(verify()))
    if action == "bench":
        return _time(native.CUDA, bench())
    if action == "build":
        try:
            made = build.ensure(config.kernel.kernel_cache, extension=build.CUDA, rebuild=rebuild, progress=print)
        except build.BuildError as e:
            raise CommandError(f"{e}\n{e.log}".rstrip()) from e
        print(f"{made.path}: launches decode steps; the kernels themselves are compiled when they are first used")
        return 0
    print(f"device: {_device()}\n`--kernels auto` here means {native.AUTO}\n")
    for operation in operations.ALL:
        print(f"{operation.name:18} {operation.contract}")
    print(f"{'decode':18} compiled steps of 1 to 32 rows, bf16, full attention, plain or coded: {', '.join(FAMILIES)}")
    return 0


def _device() -> str:
    """The default device, by its name."""
    import mlx.core as mx

    return str(mx.device_info().get("device_name", mx.default_device()))


def _load(config: Config, rebuild: bool, all_isas: bool) -> tuple[ModuleType, Build]:
    from gnomon.kernels import build, native

    try:
        isas = build.cpu_isas() if all_isas else None
        made = build.ensure(config.kernel.kernel_cache, isas=isas, rebuild=rebuild, progress=print)
        extension = build.load(made)
    except build.BuildError as e:
        raise CommandError(f"{e}\n{e.log}".rstrip()) from e
    extension.set_threads(config.kernel.threads or native.default_threads())
    return extension, made


def _list(config: Config) -> int:
    from gnomon.kernels import build, native, operations

    try:
        tools = build.toolchain()
        home = config.kernel.kernel_cache / tools.key
        state = (
            f"built: {home}"
            if (home / "build.json").is_file()
            else "not built yet: `gnomon kernels build`, or the first start"
        )
        print(f"compiler: {tools.compiler_version}\ninstruction set: {', '.join(tools.isas)}\n{state}")
    except build.BuildError as e:
        print(f"not available here: {e}")
    print(f"threads: {config.kernel.threads or native.default_threads()}\n`--kernels auto` here means {native.AUTO}\n")
    for operation in operations.ALL:
        print(f"{operation.name:18} {operation.contract}")
    print(f"{'int8':18} with `--kernels int8`: weights of 4 and 8 bits by activations rounded to 8 bits instead of 16")
    return 0


def _verify(extension: ModuleType) -> int:
    from gnomon.kernels.verify import verify

    return _report(list(verify(extension)))


def _report(checks: Sequence[Check]) -> int:
    worst: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = (check.operation, check.isa)
        if key not in worst or (check.passed, -check.error) < (worst[key].passed, -worst[key].error):
            worst[key] = check
    for (operation, isa), check in worst.items():
        count = sum((c.operation, c.isa) == (operation, isa) for c in checks)
        verdict = "ok" if check.passed else f"FAILED ({check.case}{'' if check.invariant else ', rows alone differ'})"
        print(f"{operation:18} {isa:9} {count:3} cases, largest error {check.error:.2f} of the bound: {verdict}")
    return 0 if all(check.passed for check in checks) else 1


def _bench(extension: ModuleType) -> int:
    from gnomon.kernels.bench import bench

    return _time(f"{extension.isa()}, {extension.threads()} threads", bench(extension))


def _time(what: str, timings: Iterable[Timing]) -> int:
    print(f"{what}\n{'operation':18} {'case':30} {'native':>10} {'stock':>10} {'ratio':>7}")
    for timing in timings:
        native, stock = (f"{seconds * 1e6:.1f} us" for seconds in (timing.native, timing.stock))
        print(f"{timing.operation:18} {timing.case:30} {native:>10} {stock:>10} {timing.ratio:6.1f}x", flush=True)
    return 0
