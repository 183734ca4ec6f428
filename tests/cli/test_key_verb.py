"""`gnomon key new`."""

from __future__ import annotations

import hashlib

from cli_process import gnomon


def test_the_line_goes_to_the_file_and_the_key_to_the_terminal() -> None:
    done = gnomon("key", "new", "laptop")
    assert done.returncode == 0
    key = done.stderr.strip().removeprefix("key laptop, shown this once: ")
    assert done.stdout == f"laptop:sha256${hashlib.sha256(key.encode()).hexdigest()}\n"
    wrong = gnomon("key", "new", "a b")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'a b'" in wrong.stderr
