"""Threads on their way out."""

from __future__ import annotations

import time
from pathlib import Path

THREAD_EXIT = 0.05
"""Seconds in which a thread that has nothing left to do is gone, where the system doesn't tell."""


def await_thread_exit(native_id: int | None) -> None:
    """Wait until a joined thread is gone from the system too.

    Only then has it dropped MLX's per-thread cache of compiled functions, for which it takes the interpreter's lock: were the
    interpreter being torn down meanwhile, the process would abort.
    """
    task = Path(f"/proc/self/task/{native_id}")
    if not Path("/proc/self/task").is_dir():
        time.sleep(THREAD_EXIT)
        return
    deadline = time.monotonic() + 100 * THREAD_EXIT
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
