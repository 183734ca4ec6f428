"""What the verbs share that look for models: the store, the scan, and which models run and fit here."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli._verbs import CommandError
from gnomon.config import Config

if TYPE_CHECKING:
    from rich.console import Console

    from gnomon.hub.registry import Model
    from gnomon.hub.resolve import Found
    from gnomon.hub.store import Store


def store_of(config: Config) -> Store:
    from gnomon.hub.store import Store

    return Store(config.paths.cache)


def find(config: Config) -> Found:
    """The model that `config` asks for, as `gnomon.hub.resolve` says; the starter is fetched and converted when it comes to that.

    Raises CommandError.
    """
    from gnomon.hub.errors import HubError
    from gnomon.hub.registry import Registry, scan
    from gnomon.hub.resolve import STARTER, Found, resolve
    from gnomon.models.machine import memory

    store, wanted = store_of(config), config.model.wanted
    direct = wanted is not None and Path(wanted).expanduser().exists()
    ram = memory()
    try:
        registry = Registry(()) if direct else scan(store)
        found = resolve(wanted, registry, fits=lambda model: _fits(model, ram, config), runs=runs, ram=ram)
        if found is not STARTER:
            return found
        return Found(_starter(store), STARTER.id)
    except HubError as error:
        raise CommandError(str(error)) from error


def _starter(store: Store) -> Path:
    from gnomon.hub import starter
    from gnomon.hub.errors import HubError
    from gnomon.models.gguf import UnsupportedGGUF
    from gnomon.models.starter import Converter

    console = stderr()
    with conversion_progress(console, starter.NAME) as progress:
        try:
            return starter.ensure(
                store, Converter(progress), lambda text: console.print(f"gnomon: {text}", markup=False)
            )
        except UnsupportedGGUF as error:
            raise HubError(f"{starter.NAME} can't be converted: {error}") from error
        except OSError as error:
            raise HubError(
                f"{starter.NAME} can't be put into the cache {store.cache}: {error}. Choose another with --cache or GNOMON_CACHE"
            ) from error


def _fits(model: Model, ram: int, config: Config) -> bool:
    from gnomon.models import fit

    try:
        needs = fit.measure_needs(model.path)
    except (OSError, ValueError):
        return False
    return needs.fits(
        min(fit.CONTEXT, needs.max_positions or fit.CONTEXT), fit.usable(ram, config.engine.memory_budget)
    )


def runs(model: Model) -> bool:
    """Whether mlx-lm has this model type and nothing is known against it here (loading decides the rest)."""
    return _type_runs(model.model_type)


@cache
def _type_runs(model_type: str) -> bool:
    from gnomon.cli._model import check_backend

    check_backend()
    from gnomon.models.supported import runs

    return runs(model_type)


def stdout() -> Console:
    """A console as wide as the terminal; on a pipe lines are never folded or cut, for other programs read them."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def conversion_progress(console: Console, name: str) -> Generator[Any]:
    """A `progress(done, total)` callable that draws a bar on a terminal and nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bars:  # fmt: skip
        task = bars.add_task(f"converting {name}", total=None, visible=False)

        def progress(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, visible=True)

        yield progress


def size(nbytes: float) -> str:
    """Bytes for people, decimal."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
