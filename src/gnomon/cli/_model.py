"""Loading the model that the flags ask for, with its tokenizer, its template and its own defaults."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from gnomon.cli._library import find, stderr
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, ModelConfig, with_model_defaults
from gnomon.freed import give_back

if TYPE_CHECKING:
    from gnomon.chat.template import ChatTemplate
    from gnomon.chat.tokenizer import Tokenizer
    from gnomon.cli._talk import InProcess
    from gnomon.engine.engine import Engine
    from gnomon.engine.ranks import Ranks
    from gnomon.engine.resume import Store
    from gnomon.hub.resolve import Found
    from gnomon.trace import Tracer

log = logging.getLogger(__name__)

E = TypeVar("E", covariant=True)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[E]):
    """A model in memory with its engine running; `config` includes the model's own defaults."""

    engine: E
    tokenizer: Tokenizer
    template: ChatTemplate
    config: Config
    tracer: Tracer


def generation_config(path: Path) -> Mapping[str, Any]:
    """What the model's generation_config.json says; empty without one. Raises CommandError when it can't be read."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        said = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise CommandError(f"{file} can't be read: {e}") from e
    if not isinstance(said, dict):
        raise CommandError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", said)


def check_backend() -> None:
    """Raises CommandError naming the extra when MLX has nothing to run on."""
    try:
        import mlx.core  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as e:
        raise CommandError(
            f"MLX has no backend here ({e}): install one with pip install 'gnomon[cpu]' or, for NVIDIA GPUs, 'gnomon[cuda]'"
        ) from e


def start(config: Config, found: Found, *, serving: bool = False, ranks: Ranks | None = None) -> Loaded[Engine]:
    """Load a model and start its engine, which saves running answers only when `serving`. `ranks` are the processes that share it.

    Raises CommandError with the reason when it can't be loaded.
    """
    check_backend()
    from gnomon.chat.template import ChatTemplate
    from gnomon.chat.tokenizer import Tokenizer

    tracer = tracer_of(config)
    config = _with_defaults(config, found)
    try:
        tokenizer = Tokenizer.load(found.path)
        template = ChatTemplate(tokenizer)
    except (ValueError, OSError, RuntimeError, ImportError) as e:
        raise CommandError(f"{found.id} can't be loaded: {e}") from e
    return Loaded(_engine(config, found, tokenizer, tracer, serving, ranks), tokenizer, template, config, tracer)


def start_engine(config: Config, found: Found) -> Engine:
    """The engine alone, for a server in another process, as `start` starts it. Raises CommandError."""
    check_backend()
    return _engine(_with_defaults(config, found), found, None, tracer_of(config), True, None)


def _with_defaults(config: Config, found: Found) -> Config:
    config, notes = with_model_defaults(config, generation_config(found.path), found.id), config.notes
    for note in config.notes[len(notes) :]:
        log.warning(note)
    return config


def _engine(
    config: Config, found: Found, tokenizer: Tokenizer | None, tracer: Tracer, serving: bool, ranks: Ranks | None
) -> Engine:
    from gnomon.engine.engine import load
    from gnomon.engine.settings import Host, Settings

    try:
        draft = draft_of(config)
        settings = Settings(
            engine=config.engine,
            kernels=config.kernel,
            kv=config.kv.scheme,
            cache=config.cache,
            speculation=replace(config.speculation, draft_model=None if draft is None else str(draft)),
            model_id=found.id,
            measurements=config.paths.cache,
        )
        host = Host(tracer=tracer, saves=_saves(config, found.id) if serving else None, ranks=ranks)
        return load(found.path, settings, host, tokenizer)
    except (ValueError, OSError, RuntimeError, ImportError) as e:
        raise CommandError(f"{found.id} can't be loaded: {e}") from e


def _saves(config: Config, model: str) -> Store | None:
    from gnomon.engine.resume import Store

    every = config.checkpoint.generation_checkpoint
    if every is None:
        return None
    paths = config.paths
    directory = paths.generations if config.pool.model_pool is None else paths.generations_of(model)
    try:
        return Store(directory, every)
    except OSError as e:
        raise CommandError(f"{config.origin('checkpoint', 'generation_checkpoint')}: {directory}: {e}") from e


def draft_of(config: Config) -> Path | None:
    """The directory of the draft model that the flags ask for. Raises CommandError when there is none such."""
    wanted = config.speculation.draft_model
    return None if wanted is None else find(replace(config, model=ModelConfig(model=wanted))).path


def warn_of_fill(config: Config, template: ChatTemplate, model: str) -> None:
    """Says so when tool calls of a model can't be filled in although the flags ask for it."""
    from gnomon.chat.spans import can_settle

    fill = config.speculation.fill
    if config.speculation.strict and not can_settle(template):
        log.warning("--fill %s asserts nothing with %s: it doesn't write tool calls between tags", fill, model)


def tracer_of(config: Config) -> Tracer:
    """The tracer that the flags ask for. Raises CommandError without the packages it needs."""
    from gnomon.bench.trace import make_tracer

    wanted = config.trace
    try:
        return make_tracer(p2r=wanted.p2r_trace, sync=wanted.p2r_sync, otlp_endpoint=wanted.otlp_endpoint)
    except ModuleNotFoundError as e:
        raise CommandError(str(e)) from e


def load(config: Config) -> InProcess:
    """The model for `generate` and `chat`, found (fetched, if it is the starter) and loaded in this process."""
    from gnomon.cli._talk import InProcess

    if config.origin("log", "log_level").kind == "default":
        # An answer on the terminal is no place for what a server tells of each request.
        logging.getLogger("gnomon").setLevel(logging.WARNING)
    found = find(config)
    with working(f"loading {found.id}"):
        loaded = start(config, found)
    return InProcess(loaded.engine, loaded.tokenizer, loaded.template, loaded.config.sampling)


@contextmanager
def starting_up() -> Generator[None]:
    """No search for cyclic garbage meanwhile, nor ever among what was made: modules and an engine, which stay until the process ends. Going
    through them takes a tenth of a second, in which no token would be sent.

    At the end the C library gives back what reading files took, if it is one that keeps it (glibc).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        give_back()


@contextmanager
def working(what: str) -> Generator[None]:
    """Says on a terminal that something takes a while."""
    # Drawing on a terminal takes a while to import, which a start in the background is spared.
    console = stderr() if sys.stderr.isatty() else None
    if console is not None and console.is_terminal and not console.is_dumb_terminal:
        with console.status(what):
            yield
    else:
        yield
