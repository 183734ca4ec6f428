"""`gnomon serve`: the HTTP server."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from socket import socket
from typing import TYPE_CHECKING

from gnomon.cli._verbs import CommandError
from gnomon.config import SERVE, Config

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gnomon.engine.api import Engine
    from gnomon.engine.ranks import Ranks

NAME = "serve"
HELP = "serve a model over HTTP, as OpenAI's API; what gnomon does when no verb is named"
GROUPS = SERVE


def run(args: argparse.Namespace) -> int:
    from gnomon.cli._ranks import follow, join
    from gnomon.serve.listen import StartupError, bind

    config: Config = args.config
    ranks = join(config)
    if ranks is not None and not ranks.leads:
        return follow(config, ranks)
    try:
        bound = bind(config.http)
    except StartupError as e:
        raise CommandError(str(e)) from e
    with bound:
        return _serve_one(config, bound, ranks) if config.pool.model_pool is None else _serve_pool(config, bound)


def _serve_one(config: Config, bound: socket, ranks: Ranks | None) -> int:
    from gnomon.cli._model import starting_up

    with starting_up():
        app, engine = _open(config, ranks)
    from gnomon.serve.server import serve

    try:
        return serve(app, engine, bound, config.http, lambda: _ready(config, bound, engine.model.id))
    finally:
        if config.isolation.isolate:
            # The server waits only a little: this gives the child its time to write, and kills it if it doesn't end.
            engine.stop()


def _open(config: Config, ranks: Ranks | None) -> tuple[FastAPI, Engine]:
    from gnomon.cli._library import find
    from gnomon.cli._model import Loaded, start, warn_of_fill, working

    loaded: Loaded[Engine]
    if config.isolation.isolate:
        from gnomon.cli._isolated import begin, start_isolated

        with working("loading a model in its own process"):
            child = begin(config)
            # While it loads.
            import_module("gnomon.serve.app")
            loaded = start_isolated(config, child)
    else:
        found = find(config)
        with working(f"loading {found.id}"):
            loaded = start(config, found, serving=True, ranks=ranks)
    from gnomon.cli._prompt_log import PromptLog
    from gnomon.serve.app import create_app

    warn_of_fill(config, loaded.template, loaded.engine.model.id)
    engine = PromptLog(loaded.engine, loaded.tokenizer) if config.log.log_prompts else loaded.engine
    app = create_app(
        engine,
        loaded.tokenizer,
        loaded.template,
        config.http,
        loaded.config.sampling,
        tracer=loaded.tracer,
        fetch=config.fetch,
    )
    return app, engine


def _serve_pool(config: Config, bound: socket) -> int:
    from gnomon.cli._model import starting_up, tracer_of, working
    from gnomon.cli._pooled import start_pool
    from gnomon.serve.app import create_app
    from gnomon.serve.server import serve

    tracer = tracer_of(config)
    with starting_up(), working("looking for models, and loading the first in its own process"):
        pool, voice = start_pool(config)
    served = pool.model.id
    more = len(pool.entries()) - 1
    app = create_app(
        voice.engine,
        voice.vocabulary,
        voice.template,
        config.http,
        voice.sampling,
        tracer=tracer,
        fetch=config.fetch,
        pool=pool,
    )
    try:
        about = f"{served} and {more} more, {pool.plan.places} at a time," if more else served
        return serve(app, pool, bound, config.http, lambda: _ready(config, bound, about))
    finally:
        pool.stop()


def _ready(config: Config, bound: socket, served: str) -> None:
    from gnomon.cli import _browser
    from gnomon.serve.listen import address_of
    from gnomon.serve.services import VERSION

    address = address_of(bound)
    print(f"Gnomon {VERSION} serves {served} at {address}", flush=True)
    if _on_terminal() and not config.http.no_open and not config.http.unix:
        _browser.show(address)


def _on_terminal() -> bool:
    """Whether a person reads what is printed. rich, which knows dumb terminals, is imported for terminals only."""
    if not sys.stdout.isatty():
        return False
    from rich.console import Console

    return Console().is_interactive
