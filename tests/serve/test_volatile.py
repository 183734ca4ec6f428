"""Lines that change with every request are moved off the front of system prompts, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, make_app
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from gnomon.config import HTTPConfig
from gnomon.serve.volatile import settle

LINE = "x-anthropic-billing-header: cc_version=2.1.15.f5c; cc_entrypoint=cli; cch=0f5c1;"
ASK = {"role": "user", "content": "Hi"}


def system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}, ASK]


@pytest.mark.parametrize("joint", ["\n", "", "\n\n", " \n"])
def test_the_billing_line_is_moved_however_blocks_are_joined(joint: str) -> None:
    messages, moved = settle(system(LINE + joint + "You are helpful."))
    assert messages == system("You are helpful.")
    assert moved == ("anthropic-billing",)


@pytest.mark.parametrize(
    "text",
    [
        "You are helpful.\n" + LINE,
        "The client sends " + LINE,
        "x-anthropic-billing-header is a header.",
        LINE,
        "",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert settle(system(text)) == (system(text), ())


def test_only_the_first_system_prompt_is_looked_at() -> None:
    user = [{"role": "user", "content": LINE + "\nHi"}]
    assert settle(user) == (user, ())
    assert settle([]) == ([], ())


@given(st.text())
def test_a_prompt_without_known_lines_is_never_changed(text: str) -> None:
    assert settle(system(text)) == (system(text), ())


@pytest.mark.parametrize("stable", [True, False])
def test_the_response_says_what_was_moved_and_a_flag_leaves_it(stable: bool) -> None:
    engine = FakeEngine()
    with TestClient(make_app(engine, http=HTTPConfig(stable_prompts=stable)), base_url="http://127.0.0.1") as client:
        for nonce in ("11111", "22222"):
            line = LINE.replace("0f5c1", nonce)
            answer = client.post("/v1/chat/completions", json={"messages": system(line + "\nBe brief.")})
            assert answer.headers.get("x-gnomon-moved") == ("anthropic-billing" if stable else None)
        plain = client.post("/v1/chat/completions", json={"messages": system("Be brief.")})
    assert "x-gnomon-moved" not in plain.headers
    first, second, third = (request.prompt for request in engine.submitted)
    assert (first == second == third) is stable
