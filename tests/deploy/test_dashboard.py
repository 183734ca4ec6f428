"""The Grafana dashboard asks only for what a real engine's /metrics has, by labels it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fake_engine import user
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from engine_fixtures import tiny_loaded, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import CacheConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.engine import Engine
from gnomon.engine.settings import Settings
from gnomon.serve.app import create_app

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json").read_text("utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
NAME = re.compile(r"\bgnomon_\w+")
# What Prometheus adds to every sample of a scrape.
SCRAPED = {"job", "instance"}


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample of a server with all its doors and tiers, after an answer and some refusals."""
    tokenizer = tiny_tokenizer()
    cache = CacheConfig(ssd_cache=tmp_path_factory.mktemp("ssd"), ssd_cache_min_free=0, ssd_cache_max=1 << 30)
    model = tmp_path_factory.mktemp("model")
    (model / "model.safetensors").write_bytes(b"tiny")
    with Engine(
        lambda: replace(tiny_loaded(), path=model), tokenizer, Settings(model_id="tiny", cache=cache)
    ) as engine:
        engine.wait(300)
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), HTTPConfig(api_keys=("k",)), SamplingDefaults())
        with TestClient(app, base_url="http://localhost", headers={"x-api-key": "k"}) as client:
            tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            asked = user("Hi", max_tokens=8, tools=[tool], tool_choice="required")
            assert client.post("/v1/chat/completions", json=asked).status_code == 200
            app.state.services.metrics.tool_calls(1, 0)
            text = client.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_exists(samples: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = NAME.findall(expression)
        assert names, expression
        assert set(names) <= set(samples), expression
        labels = set().union(*(samples[name] for name in names)) | SCRAPED
        asked = set(re.findall(r"(\w+)\s*=~?\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            asked |= {label.strip() for label in group.split(",")}
        assert asked <= labels, expression
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= {
                label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")
            }


def test_every_series_of_the_server_itself_is_shown(samples: dict[str, set[str]]) -> None:
    shown = {name for expression in expressions() for name in NAME.findall(expression)}
    bare = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in samples if "engine" not in name}
    missing = {name for name in bare if not any(one.startswith(name) for one in shown)}
    assert missing == {"gnomon_http_request_seconds"}


def test_counters_are_asked_for_by_their_growth() -> None:
    for expression in expressions():
        for match in re.finditer(r"gnomon_\w+_(total|bucket|sum|count)\b", expression):
            assert re.search(r"(rate|increase)\($", expression[: match.start()]), expression


def test_it_can_be_read_by_grafana() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used - {"__rate_interval", "__range"} == variables
    cells = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        for at in (panel["gridPos"] for panel in PANELS)
    ]
    assert all(x < 24 for cell in cells for x, _ in cell)
    assert not any(one & other for one, other in combinations(cells, 2))
