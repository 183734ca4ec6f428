"""An application over a fake engine, in process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine, make_app
from starlette.testclient import TestClient


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine), base_url="http://localhost") as made:
        yield made
