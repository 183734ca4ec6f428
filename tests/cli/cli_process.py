"""Runs the command without the variables of the surroundings: in this process, or a server in one of its own."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, NamedTuple
from unittest import mock

from gnomon.cli.main import main


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("GNOMON_")}


class Served(NamedTuple):
    process: subprocess.Popen[str]
    url: str


@contextmanager
def serving(*argv: str, log: IO[str] | int = subprocess.PIPE, **environ: str) -> Iterator[Served]:
    """A server in a process group of its own, on a free port, once it has said where; killed at the end. What it writes to stderr goes to
    `log`; by default it can be read from the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gnomon.cli.main", *argv, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**clean_environment(), **environ},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"serves .+ at (http://\S+)", line)
        assert found, (line, process.stderr.read() if process.stderr else "its log has the reason")
        yield Served(process, found[1])
    finally:
        process.kill()
        process.communicate()


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
