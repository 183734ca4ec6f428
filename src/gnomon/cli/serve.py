"""`gnomon serve`: the HTTP server."""

from __future__ import annotations

import argparse
import logging

from gnomon.cli._verbs import CommandError
from gnomon.config import SERVE, Config

NAME = "serve"
HELP = "serve a model over HTTP, as OpenAI's API; what gnomon does when no verb is named"
GROUPS = SERVE

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gnomon.chat.spans import can_settle
    from gnomon.cli import _browser
    from gnomon.cli._library import find
    from gnomon.cli._model import Loaded, start, working
    from gnomon.cli._prompt_log import PromptLog
    from gnomon.cli._ranks import follow, join
    from gnomon.engine.api import Engine
    from gnomon.serve.app import create_app
    from gnomon.serve.server import StartupError, address_of, bind, serve
    from gnomon.serve.services import VERSION

    config: Config = args.config
    console = Console(highlight=False)
    ranks = join(config)
    if ranks is not None and not ranks.leads:
        return follow(config, ranks)
    try:
        bound = bind(config.http)
    except StartupError as e:
        raise CommandError(str(e)) from e
    with bound:
        loaded: Loaded[Engine]
        if config.isolation.isolate:
            from gnomon.cli._isolated import start_isolated

            with working("loading a model in its own process"):
                loaded = start_isolated(config)
        else:
            found = find(config)
            with working(f"loading {found.id}"):
                loaded = start(config, found, serving=True, ranks=ranks)

        if config.speculation.strict and not can_settle(loaded.template):
            log.warning(
                "--fill %s asserts nothing with %s: it doesn't write tool calls between tags",
                config.speculation.fill,
                loaded.engine.model.id,
            )

        def ready() -> None:
            address = address_of(bound)
            console.print(
                f"Gnomon {VERSION} serves {loaded.engine.model.id} at {address}", markup=False, soft_wrap=True
            )
            if console.is_interactive and not config.http.no_open and not config.http.unix:
                _browser.show(address)

        engine = PromptLog(loaded.engine, loaded.tokenizer) if config.log.log_prompts else loaded.engine
        app = create_app(
            engine,
            loaded.tokenizer,
            loaded.template,
            config.http,
            loaded.config.sampling,
            tracer=loaded.tracer,
        )
        try:
            return serve(app, engine, bound, config.http, ready)
        finally:
            if config.isolation.isolate:
                # The server waits only a little: this gives the child its time to write, and kills it if it doesn't end.
                engine.stop()
