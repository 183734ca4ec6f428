"""The status page: live numbers, a restart, a key, accessibility."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_engine import KEY, FakeEngine, live_server, serving
from playwright.sync_api import Page, expect
from test_http_pool import app_of, start

from gnomon.config import HTTPConfig
from gnomon.engine.api import Health

pytestmark = pytest.mark.xdist_group("browser")

SECTIONS = {
    "batch": {"configured": 8, "active_rows": 2, "kv_bytes": 3 << 20},
    "admission": {"waiting_requests": 1, "queue_limit": 64, "weights_bytes": 1 << 30, "usable_bytes": 2 << 30},
    "rows": [
        {
            "id": "chatcmpl-1",
            "state": "decoding",
            "prompt_tokens": 1200,
            "cached_tokens": 1024,
            "generated_tokens": 7,
            "seconds": 1.25,
        }
    ],
    "tokens": {"generated": 100},
    "prompt_cache": {
        "hits": 3,
        "misses": 1,
        "bytes": 5 << 20,
        "max_bytes": 8 << 30,
        "reused_tokens": 4096,
        "evictions": 0,
        "recent_misses": [
            {
                "request": "r",
                "kind": "edited text",
                "position": 17,
                "reused_tokens": 16,
                "prompt_tokens": 40,
                "before": "the",
                "prompt": "dog",
                "stored": "cat",
            }
        ],
    },
    "memory": {"active": 1 << 29},
    "proposals": {"proposed": 10, "accepted": 4},
    "memory_pressure": {
        "enabled": True,
        "step": "chunk",
        "level": 2,
        "step_seconds": 7.2,
        "used_bytes": 7 << 30,
        "ceiling_bytes": 8 << 30,
        "chunk_tokens": 256,
        "full_chunk_tokens": 512,
        "reclaims": 3,
        "reclaimed_bytes": 5 << 20,
        "chunk_halvings": 1,
        "holds": 0,
        "allocation_failures": 0,
        "history": [
            {"step": "cache", "seconds_ago": 9000.0, "used_bytes": 9 << 30, "chunk_tokens": 512},
            {"step": "chunk", "seconds_ago": 7.2, "used_bytes": 10 << 30, "chunk_tokens": 256},
        ],
    },
}


def engine() -> FakeEngine:
    made = FakeEngine()
    made.sections = json.loads(json.dumps(SECTIONS))
    return made


def test_numbers_are_live(page: Page) -> None:
    with live_server(engine()) as live:
        page.goto(f"{live.url}/status")
        expect(page.get_by_role("status")).to_have_text("running")
        expect(page.locator("#now")).to_contain_text("2 of 8")
        expect(page.locator("#rows")).to_contain_text("chatcmpl-1")
        expect(page.locator("#rows")).to_contain_text("1,024")
        expect(page.locator("#misses")).to_contain_text('edited text at token 17: stored "cat", asked "dog"')
        expect(page.locator("#memory")).to_contain_text("1 GiB")
        expect(page.locator("#speculation")).to_contain_text("40 %")
        expect(page.locator("#pressure")).to_contain_text("prefill windows are smaller")
        expect(page.locator("#pressure")).to_contain_text("256 of 512 tokens")
        expect(page.locator("#steps li")).to_have_text(
            [
                "7 s ago: prefill windows are smaller, windows of 256 tokens, at 10 GiB",
                "2.5 h ago: the cache gives way, windows of 512 tokens, at 9 GiB",
            ]
        )
        live.engine.sections["memory_pressure"].update(step="queue", history=[])
        expect(page.locator("#pressure")).to_contain_text("requests wait their turn")
        expect(page.locator("#steps")).to_have_text("none")
        live.engine.sections["batch"]["active_rows"] = 5
        expect(page.locator("#now")).to_contain_text("5 of 8")
        live.engine.state = Health("stalled", 9.0)
        expect(page.get_by_role("status")).to_contain_text("stalled: the engine's loop last turned 9.0 s ago")


def test_it_outlives_a_restart(page: Page) -> None:
    with live_server(engine()) as live:
        page.goto(f"{live.url}/status")
        expect(page.get_by_role("status")).to_have_text("running")
        port = live.port
    expect(page.get_by_role("status")).to_contain_text("asking again")
    again = engine()
    again.sections["batch"]["active_rows"] = 7
    # The same address has to come back; the new server has a port of its own, so what arrives at the old one is passed on.
    with live_server(again) as live, socket.create_server(("127.0.0.1", port)) as door:
        relay(door, live.port)
        expect(page.locator("#now")).to_contain_text("7 of 8")
        expect(page.get_by_role("status")).to_have_text("running")


def relay(door: socket.socket, port: int) -> None:
    """Pass the bytes of every connection on, until the door closes."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, target):
                one.close()

    def accept() -> None:
        while True:
            try:
                client, _ = door.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def test_a_key_is_asked_for(page: Page) -> None:
    with live_server(engine(), http=HTTPConfig(api_keys=(KEY,))) as live:
        page.goto(f"{live.url}/status")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_role("status")).to_have_text("running")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_accessible_and_fits(page: Page, scheme, width) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    with live_server(engine()) as live:
        page.goto(f"{live.url}/status")
        expect(page.get_by_role("status")).to_have_text("running")
        violations = Axe().run(page).response["violations"]
        assert [f"{one['id']}: {node['html']}" for one in violations for node in one["nodes"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_files_and_their_headers() -> None:
    with live_server(engine(), http=HTTPConfig(api_keys=(KEY,))) as live:
        with urllib.request.urlopen(f"{live.url}/") as response:
            assert response.headers["content-type"].startswith("text/html")
            assert "script-src 'self'" in response.headers["content-security-policy"]
            tag = response.headers["etag"]
        again = urllib.request.Request(f"{live.url}/", headers={"if-none-match": tag})
        with pytest.raises(urllib.error.HTTPError) as unchanged:
            urllib.request.urlopen(again)
        assert unchanged.value.code == 304
        for path in ("web/../auth.py", "web/%2e%2e/auth.py", "web/nothing.js"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{live.url}/{path}")
            assert refused.value.code in (401, 404)


def test_the_models_of_a_pool_and_the_numbers_of_one(page: Page) -> None:
    pool = start()
    http = HTTPConfig()
    try:
        with serving(app_of(pool, http), pool, http) as live:  # pyright: ignore[reportArgumentType]
            page.goto(f"{live.url}/status")
            table = page.locator("#models")
            expect(table.locator("tr")).to_have_count(3)
            expect(table.locator("tr").nth(0)).to_contain_text("resident")
            expect(table.locator("tr").nth(1)).to_contain_text("cold")
            expect(page.locator("#room")).to_contain_text("1 of 2 places taken")
            page.get_by_label("Numbers below are of").select_option("org/two")
            expect(page.locator("#model-name")).to_have_text("org/two")
            page.get_by_label("Numbers below are of").select_option("one")
            expect(page.locator("#model-name")).to_have_text("one")
            assert Axe().run(page).violations_count == 0
            page.goto(live.url)
            page.get_by_role("button", name="Settings").click()
            expect(page.locator("#s-model")).to_contain_text("org/two (cold)")
    finally:
        pool.stop()
