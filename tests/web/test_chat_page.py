"""The chat page in a real browser: whole conversations, stop, edit, reload, errors, tools, keys, accessibility."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_engine import CALLING, KEY, MODEL, THINKING, FakeEngine, Live, full, live_server
from playwright.sync_api import Page, expect

from gnomon.config import HTTPConfig

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def live() -> Iterator[Live[FakeEngine]]:
    with live_server(FakeEngine(None)) as made:
        yield made


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page):
    return page.locator(".turn.assistant .said")


def answered(page: Page) -> None:
    """Wait until an answer that is seen has also ended: what is clicked before may be drawn anew."""
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_conversation_streams_and_survives_a_reload(page: Page, live: Live[FakeEngine]) -> None:
    page.goto(live.url)
    say(page, "First")
    job = live.engine.take()
    job.delta("Hel")
    expect(answers(page)).to_have_text("Hel")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    job.delta("lo")
    job.finish()
    job.end(cached_tokens=3)
    expect(answers(page)).to_have_text("Hello")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator(".turn.assistant .tools")).to_contain_text("5 tokens")
    expect(page.locator(".turn.assistant .tools")).to_contain_text(
        f"3 of {len(job.request.prompt)} prompt tokens reused"
    )
    say(page, "Second")
    again = live.engine.take()
    assert again.text == "<user>First\n<assistant>Hello\n<user>Second\n<assistant>"
    again.say("Well")
    expect(answers(page).last).to_have_text("Well")
    answered(page)
    page.reload()
    expect(answers(page)).to_have_text(["Hello", "Well"])
    expect(page.locator("#conversations .open")).to_have_text("First")
    expect(page.locator("#model-name")).to_have_text(MODEL)


def test_markup_in_an_answer_stays_text(page: Page, live: Live[FakeEngine]) -> None:
    hostile = "<img src=x onerror=\"document.title='pwned'\"> [x](javascript:alert(1)) <script>document.title='pwned'</script>"
    page.goto(live.url)
    say(page, hostile)
    live.engine.take().say(hostile)
    expect(answers(page)).to_contain_text(hostile)
    assert page.locator(".turn img, .turn script, .turn a").count() == 0
    assert page.title() == "Gnomon"


def test_markdown(page: Page, live: Live[FakeEngine]) -> None:
    text = (
        "# Title\n\nSome **bold**, *slanted*, `code` and https://example.org/a.\n\n- one\n- two\n  - inner\n\n3. three\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = '<b>'\n\ny = 2\n```\n\n> quoted\n"
    )
    page.goto(live.url)
    say(page, "x")
    live.engine.take().say(text)
    said = answers(page)
    expect(said.locator("h3")).to_have_text("Title")
    expect(said.locator("strong")).to_have_text("bold")
    expect(said.locator("em")).to_have_text("slanted")
    expect(said.locator("p code")).to_have_text("code")
    expect(said.locator("a")).to_have_attribute("href", "https://example.org/a")
    expect(said.locator("ul ul li")).to_have_text("inner")
    expect(said.locator("ol")).to_have_attribute("start", "3")
    expect(said.locator("td")).to_have_text(["1", "2"])
    expect(said.locator("pre")).to_have_text("x = '<b>'\n\ny = 2")
    expect(said.locator("blockquote")).to_have_text("quoted")
    answered(page)
    said.get_by_role("button", name="Copy").click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text === \"x = '<b>'\\n\\ny = 2\")")


def test_stop_cancels_the_request_and_keeps_what_came(page: Page, live: Live[FakeEngine]) -> None:
    page.goto(live.url)
    say(page, "x")
    job = live.engine.take()
    job.delta("partly")
    expect(answers(page)).to_have_text("partly")
    page.keyboard.press("Escape")
    assert job.cancelled.wait(300)
    expect(page.locator(".turn.assistant .tools")).to_contain_text("stopped")
    page.reload()
    expect(answers(page)).to_have_text("partly")


def test_edit_and_resend_drops_what_came_after(page: Page, live: Live[FakeEngine]) -> None:
    page.goto(live.url)
    say(page, "one")
    live.engine.take().say("1")
    expect(page.get_by_role("button", name="Again")).to_be_visible()
    say(page, "two")
    live.engine.take().say("2")
    expect(page.get_by_role("button", name="Again")).to_have_count(2)
    page.get_by_role("button", name="Edit and resend").first.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("one")
    say(page, "uno")
    job = live.engine.take()
    assert job.text == "<user>uno\n<assistant>"
    job.say("eins")
    expect(answers(page)).to_have_text(["eins"])
    page.get_by_role("button", name="Again").click()
    live.engine.take().say("ein")
    expect(answers(page)).to_have_text(["ein"])


def test_errors_are_shown_and_do_not_end_the_conversation(page: Page, live: Live[FakeEngine]) -> None:
    page.goto(live.url)
    live.engine.refusal = full()
    say(page, "x")
    expect(page.get_by_role("alert").filter(has_text="the queue is full")).to_be_visible()
    live.engine.refusal = None
    page.get_by_role("button", name="Again").click()
    job = live.engine.take()
    job.delta("half")
    expect(answers(page)).to_have_text("half")
    job.fail("the device broke")
    expect(page.get_by_role("alert").filter(has_text="the device broke")).to_be_visible()
    expect(answers(page)).to_have_text("half")


def test_thinking_is_folded(page: Page) -> None:
    with live_server(FakeEngine(None), template=THINKING) as live:
        page.goto(live.url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Thinking").select_option("on")
        page.get_by_label("System prompt").fill("Be short.")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("99")
        page.get_by_role("button", name="Done").click()
        say(page, "x")
        job = live.engine.take()
        assert job.text == "<system>Be short.\n<user>x\n<assistant><think>\n"
        assert (job.request.sampling.temperature, job.request.max_tokens) == (0, 99)
        job.say("deep thought</think>So.")
        expect(answers(page)).to_have_text("So.")
        answered(page)
        expect(page.locator(".turn.assistant .thought")).to_be_hidden()
        page.locator(".turn.assistant summary").click()
        expect(page.locator(".turn.assistant .thought")).to_have_text("deep thought")


def test_tool_calls_are_shown_and_answered(page: Page) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    with live_server(FakeEngine(None), template=CALLING) as live:
        page.goto(live.url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label(re.compile("^Tools")).fill("{}")
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_text("the tools have to be a list")).to_be_visible()
        page.get_by_label(re.compile("^Tools")).fill(json.dumps(tools))
        page.get_by_role("button", name="Done").click()
        say(page, "x")
        live.engine.take().say('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>')
        expect(page.locator(".call strong")).to_have_text("Calls weather")
        expect(page.locator(".call pre")).to_contain_text('"city": "Oslo"')
        answered(page)
        page.get_by_label("Result of weather").fill("snow")
        page.get_by_role("button", name="Send results").click()
        job = live.engine.take()
        assert "<tool>snow" in job.text
        job.say("It snows.")
        expect(answers(page).last).to_have_text("It snows.")


def test_a_key_is_asked_for(page: Page) -> None:
    with live_server(FakeEngine(None), http=HTTPConfig(api_keys=(KEY,))) as live:
        page.goto(live.url)
        expect(page.get_by_role("alert").filter(has_text="no API key was sent")).to_be_visible()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#model-name")).to_have_text(MODEL)
        say(page, "x")
        live.engine.take().say("open")
        expect(answers(page)).to_have_text("open")
        assert page.evaluate("JSON.stringify(localStorage)").find(KEY) < 0


def test_files_are_sent_as_text(page: Page, live: Live[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("écrit")
    (tmp_path / "raw.bin").write_bytes(b"\xff\xfe\x00")
    page.goto(live.url)
    page.locator("#file").set_input_files([tmp_path / "notes.txt", tmp_path / "raw.bin"])
    expect(page.get_by_role("alert").filter(has_text="raw.bin is not text in UTF-8")).to_be_visible()
    say(page, "Read it.")
    job = live.engine.take()
    assert job.text == "<user>File notes.txt:\n```\nécrit\n```\n\nRead it.\n<assistant>"
    job.say("Read.")
    expect(page.locator(".turn.user")).to_contain_text("notes.txt (5 characters)")


def test_several_conversations(page: Page, live: Live[FakeEngine]) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(live.url)
    for name in ("alpha", "beta"):
        say(page, name)
        live.engine.take().say(name.upper())
        expect(answers(page).last).to_have_text(name.upper())
        answered(page)
        page.get_by_role("button", name="New conversation").click()
        expect(answers(page)).to_have_count(0)
    page.get_by_role("button", name="alpha", exact=True).click()
    expect(answers(page)).to_have_text("ALPHA")
    page.get_by_role("button", name="Delete alpha").click()
    expect(page.locator("#conversations .open")).to_have_text(["beta"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_accessible_and_fits(page: Page, live: Live[FakeEngine], scheme, width) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(live.url)
    say(page, "x" * 400)
    live.engine.take().say("# A\n\n```\n" + "y" * 400 + "\n```\n\n| a | b |\n|-|-|\n| " + "z" * 200 + " | 2 |\n")
    expect(page.get_by_role("button", name="Again")).to_be_visible()
    assert found(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 400:
        page.get_by_role("button", name="Conversations").click()
        expect(page.get_by_role("button", name="New conversation")).to_be_visible()
        assert found(page) == []
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    assert found(page) == []


def found(page: Page) -> list[str]:
    """What axe finds, in words."""
    return [f"{one['id']}: {node['html']}" for one in Axe().run(page).response["violations"] for node in one["nodes"]]


def test_the_keyboard_is_enough(page: Page, live: Live[FakeEngine]) -> None:
    page.goto(live.url)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    expect(page.locator("#model-name")).to_have_text(MODEL)
    page.keyboard.type("typed")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    job = live.engine.take()
    assert job.text == "<user>typed\nmore\n<assistant>"
    expect(page.get_by_role("button", name="Again")).to_have_count(0)  # not before there is an answer
    job.say("ok")
    expect(page.get_by_role("button", name="Again")).to_be_visible()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Message", exact=True)).to_have_value("typed\nmore")
