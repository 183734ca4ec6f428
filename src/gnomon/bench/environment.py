"""Environment of child processes: what is passed on, and which thread variables are taken out so that they can't tilt a measurement."""

from __future__ import annotations

import os
from collections.abc import Mapping

NEUTRALISED = ("OPENBLAS_", "GOTO_NUM_THREADS", "GOTOBLAS_")
"""Prefixes of variables that change how OpenBLAS, and with it MLX on CPU, computes: removed from every child that measures."""
REPORTED = (*NEUTRALISED, "OMP_", "MKL_", "VECLIB_", "BLIS_", "MLX_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of variables that bear on speed: written into the preflight record."""


def thread_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables found that bear on the speed of arithmetic."""
    found = os.environ if environment is None else environment
    return {name: value for name, value in sorted(found.items()) if name.startswith(REPORTED)}


def child_environment(
    changes: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment for a measured child: this process's, without `NEUTRALISED` variables, with `changes` (which may set them again)."""
    found = os.environ if environment is None else environment
    kept = {name: value for name, value in found.items() if not name.startswith(NEUTRALISED)}
    return {**kept, "PYTHONUNBUFFERED": "1", **(changes or {})}


def neutralised(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Names of the variables that `child_environment` takes out."""
    found = os.environ if environment is None else environment
    return tuple(sorted(name for name in found if name.startswith(NEUTRALISED)))
