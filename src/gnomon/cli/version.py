"""`gnomon version`: the versions that decide a result."""

from __future__ import annotations

import argparse
import platform

NAME = "version"
HELP = "print the versions of Gnomon and of what it computes with"


def run(_: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    print(f"gnomon {version('gnomon')}")
    for name in ("mlx", "mlx-cpu", "mlx-cuda-13", "mlx-lm", "transformers", "tokenizers"):
        try:
            print(f"  {name} {version(name)}")
        except PackageNotFoundError:
            continue
    print(f"  python {platform.python_version()} on {platform.system()} {platform.machine()}")
    return 0
