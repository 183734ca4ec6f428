"""The program of the engine's own process under `--isolate`: not a verb, and started by the server alone."""

from __future__ import annotations

import sys
from typing import Any

from gnomon import logs
from gnomon.cli._verbs import CommandError
from gnomon.config import Config
from gnomon.engine.api import Engine
from gnomon.hub.resolve import Found
from gnomon.isolate import run


def make(what: Any) -> Engine:
    """The engine of a configuration, and of the model that was found for it before, if one was. Raises RuntimeError."""
    from gnomon.cli._library import find
    from gnomon.cli._model import start_engine, starting_up

    config: Config
    found: Found | None
    config, found = what
    logs.setup(config.log)
    try:
        # As in a server of one process: what was loaded stays, and looking through it would hold up tokens.
        with starting_up():
            return start_engine(config, found or find(config))
    except CommandError as error:
        raise RuntimeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[-1]), make))
