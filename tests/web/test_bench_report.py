"""The benchmark report in a real browser, opened as a file: filters, baselines, keys, accessibility, and that nothing is executed."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from bench import report_runs
from gnomon.bench.page import render

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("results")
    store = report_runs.fill(directory)
    path: Path = directory / "report.html"
    path.write_text(render(*store.runs(), directory), encoding="utf-8")
    return path.as_uri()


def test_filters_hide_runs_and_their_points(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.get_by_role("status")).to_have_text("7 of 7 runs shown")
    page.get_by_label("Backend").select_option("gpu")
    expect(page.get_by_role("status")).to_have_text("2 of 7 runs shown")
    expect(page.locator(".serving")).to_be_hidden()
    page.get_by_label("Model").select_option("small-1 (11111111)")
    expect(page.get_by_role("status")).to_have_text("1 of 7 runs shown")
    expect(page.locator("article:visible h2")).to_have_text("quality of small-1")
    expect(page.locator("#quality li:visible")).to_have_count(1)
    expect(page.locator("#quality g:visible")).to_have_count(1)
    page.get_by_label("Backend").select_option("")
    page.get_by_label("Model").select_option("")
    page.get_by_role("combobox", name="Arm", exact=True).select_option("C")
    expect(page.locator("article:visible h2")).to_have_text("three arms")
    expect(page.locator("#quality figure:visible")).to_have_count(0)
    page.get_by_role("combobox", name="Arm", exact=True).select_option(report_runs.HOSTILE)
    expect(page.locator("article:visible h2")).to_have_text(report_runs.HOSTILE)


def test_only_compatible_baselines_are_offered(page: Page, url: str) -> None:
    page.goto(url)
    run = page.locator("article", has=page.get_by_role("heading", name="three arms"))
    choose = run.get_by_label("Baseline")
    expect(choose.locator("option")).to_have_text(["A", "B"])
    expect(choose).to_have_value("A")
    expect(run.get_by_role("heading", name="Against A")).to_be_visible()
    choose.focus()
    page.keyboard.press("ArrowDown")
    expect(run.get_by_role("heading", name="Against B")).to_be_visible()
    expect(run.get_by_role("heading", name="Against A")).to_be_hidden()


def test_saved_text_is_never_executed(page: Page, url: str) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url)
    expect(page).to_have_title("Gnomon: measurements")
    assert requests == [url]


def test_the_policy_stops_what_escaping_would_miss(page: Page, tmp_path: Path) -> None:
    """The style and script written are the hashed ones, and a script that is smuggled in does not run."""
    text = render([], [], tmp_path).replace("</main>", "<script>document.title = 'pwned'</script></main>")
    (tmp_path / "x.html").write_text(text)
    page.goto((tmp_path / "x.html").as_uri())
    expect(page.get_by_role("status")).to_have_text("0 of 0 runs shown")
    expect(page).to_have_title("Gnomon: measurements")


def test_without_script_all_runs_and_the_declared_baselines_are_there(browser, url: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(url)
    expect(plain.locator("article:visible")).to_have_count(7)
    expect(plain.locator("#filters")).to_be_hidden()
    expect(plain.get_by_role("heading", name="Against A").first).to_be_visible()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_axe_finds_nothing(page: Page, url: str, scheme: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.goto(url)
    page.locator("summary").first.click()
    violations = Axe().run(page).response["violations"]
    assert [f"{one['id']}: {node['html']}" for one in violations for node in one["nodes"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_keyboard_reaches_the_results(page: Page, url: str) -> None:
    page.goto(url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the results")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
