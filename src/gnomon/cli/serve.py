"""`gnomon serve`: the HTTP server."""

from __future__ import annotations

import argparse

from gnomon.cli._verbs import CommandError
from gnomon.config import SERVE, Config

NAME = "serve"
HELP = "serve a model over HTTP, as OpenAI's API; what gnomon does when no verb is named"
GROUPS = SERVE


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gnomon.cli._library import find
    from gnomon.cli._model import start
    from gnomon.serve.app import create_app
    from gnomon.serve.server import StartupError, address_of, bind, serve
    from gnomon.serve.services import VERSION

    config: Config = args.config
    console = Console(highlight=False)
    try:
        bound = bind(config.http)
    except StartupError as e:
        raise CommandError(str(e)) from e
    with bound:
        found = find(config)
        if console.is_terminal and not console.is_dumb_terminal:
            with console.status(f"loading {found.id}"):
                loaded = start(config, found)
        else:
            loaded = start(config, found)

        def ready() -> None:
            console.print(f"Gnomon {VERSION} serves {found.id} at {address_of(bound)}", markup=False, soft_wrap=True)

        app = create_app(loaded.engine, loaded.tokenizer, loaded.template, config.http, loaded.config.sampling)
        return serve(app, loaded.engine, bound, config.http, ready)
