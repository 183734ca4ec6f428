"""A server process over the fake engine, for tests of signals. Prints its port; the mode says how it behaves."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

from fake_engine import FakeEngine, Job, make_app

from gnomon.config import HTTPConfig
from gnomon.engine.api import Health
from gnomon.serve.keys import KeyRing
from gnomon.serve.listen import bind
from gnomon.serve.server import serve


def main(mode: str, timeout_ms: int, key_file: str | None = None) -> int:
    def script(job: Job) -> None:
        job.delta("A")
        if mode == "fatal" and job.text.endswith("die\n<assistant>"):
            engine.state = Health("failed", 0.0, "the device is gone")
            for other in list(engine.open.values()):
                other.fail("the device is gone", "engine_failed", fatal=True)
            return
        if mode == "short":
            assert engine.draining.wait(120)
            time.sleep(0.1)
            job.delta("B")
            job.finish()
            job.end()
        elif mode == "deaf":
            threading.Event().wait()

    if mode == "blind":
        # A file system that tells no change.
        KeyRing._stamp = lambda self: (0,)  # type: ignore[method-assign]
    engine = FakeEngine(script)
    config = HTTPConfig(
        port=0, shutdown_timeout_ms=timeout_ms, api_key_file=None if key_file is None else Path(key_file)
    )
    bound = bind(config)

    def ready() -> None:
        print(bound.getsockname()[1], flush=True)

    return serve(make_app(engine, http=config), engine, bound, config, ready)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` has ignored
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
