"""`gnomon kernels`: build, list, check and time the native CPU kernels of this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gnomon.cli._verbs import CommandError
from gnomon.config import Config, KernelConfig

if TYPE_CHECKING:
    from types import ModuleType

    from gnomon.kernels.build import Build

NAME = "kernels"
HELP = "build, list, verify and time the native CPU kernels"
GROUPS = (KernelConfig,)
ACTIONS = ("list", "build", "verify", "bench")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="what to do; list when left out")
    parser.add_argument(
        "--all", action="store_true", help="for all instruction sets of this CPU, not just the best one"
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if there is a build for this machine")


def run(args: argparse.Namespace) -> int:
    config: Config = args.config
    if args.action == "list":
        return _list(config)
    extension, build = _load(config, args.rebuild and args.action == "build", args.all)
    if args.action == "build":
        how = f"built in {build.seconds:.1f} s" if build.seconds else "found in the cache"
        print(f"{build.path} ({how}); instruction sets: {', '.join(extension.isas())}")
        return 0
    return _verify(extension) if args.action == "verify" else _bench(extension)


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
    return 0


def _verify(extension: ModuleType) -> int:
    from gnomon.kernels.verify import Check, verify

    checks = list(verify(extension))
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

    print(
        f"{extension.isa()}, {extension.threads()} threads\n{'operation':18} {'case':26} {'native':>10} {'stock':>10} {'ratio':>7}"
    )
    for timing in bench(extension):
        native, stock = (f"{seconds * 1e6:.1f} us" for seconds in (timing.native, timing.stock))
        print(f"{timing.operation:18} {timing.case:26} {native:>10} {stock:>10} {timing.ratio:6.1f}x", flush=True)
    return 0
