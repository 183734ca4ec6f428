"""Runs the command without the variables of the surroundings."""

from __future__ import annotations

import io
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from gnomon.cli.main import main


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("GNOMON_")}


def gnomon(*argv: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own would say, but in this one: Python and MLX need not be started each time. An error that the command
    doesn't tell itself is raised here."""
    out, err = io.StringIO(), io.StringIO()
    variables = {**clean_environment(), "COLUMNS": "200", **environ}
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            status = main(argv)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess(["gnomon", *argv], status, out.getvalue(), err.getvalue())
