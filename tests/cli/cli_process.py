"""Runs the command as a process, without the variables of the surroundings."""

from __future__ import annotations

import os
import subprocess
import sys


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("GNOMON_")}


def gnomon(*argv: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gnomon.cli.main", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        env={**clean_environment(), "COLUMNS": "200", **environ},
        timeout=120,
        check=False,
    )
