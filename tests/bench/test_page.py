"""The HTML report, read back with the standard library's parser: what stands in it, what is refused, and that nothing is executed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from gnomon.bench.page import render
from gnomon.bench.store import Store, load
from gnomon.cli.main import main

from . import records, report_runs


class Page(HTMLParser):
    """Elements with attributes, text, and the text of each table's rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._scripts = self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._scripts = tag in ("script", "style")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._scripts = False
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._scripts:
            return
        self.texts.append(data)
        if self._cell:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return report_runs.fill(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def page(store: Store) -> Page:
    return Page(render(*store.runs(), store.directory))


def test_every_number_of_a_saved_comparison_is_shown(page: Page) -> None:
    saved = load(report_runs.REPLAY)
    for c in saved.comparisons:
        if c.ratio is None or c.outcome in ("inapplicable", "blocked"):
            continue
        assert c.lower is not None
        assert c.upper is not None
        shown = f"{c.ratio:.3f} [{c.lower:.3f}, {c.upper:.3f}]"
        rows = [row for row in page.rows if len(row) > 4 and row[0] == c.candidate and row[2] == shown]
        assert any(row[1].startswith(c.metric) and row[3] == str(len(c.pairs)) and row[4] == c.outcome for row in rows)


def test_absolute_values_carry_units_range_and_count(page: Page) -> None:
    row = next(row for row in page.rows if row[0] == "peak_resident_bytes, lower is better")
    assert row[1:] == [
        f"{size} ({size} to {size}, n=5)" for size in ("190.7 MiB", "286.1 MiB", "95.4 MiB")
    ]  # 2e8, 3e8, 1e8 over 2**20
    rate = next(row for row in page.rows if row[0].startswith("decode_tokens") and "102.00" in row[1])
    assert rate[1] == "102.00 token/s (100.00 token/s to 104.00 token/s, n=5)"


def test_what_failed_is_shown_with_its_reason(page: Page) -> None:
    saved = load(report_runs.REPLAY)
    odd = [s for s in saved.samples if s.status != "ok"]
    assert {s.status for s in odd} == {"failed", "invalid", "timeout", "interrupted", "unsupported"}
    for s in odd:
        assert [str(s.index), s.cell, str(s.block), s.arm, s.status, s.reason] in page.rows


def test_no_ratio_between_different_work(page: Page) -> None:
    assert (
        "No comparison of C against A: no ratio: different work: output_tokens is 32 against 31 (in 5 blocks)."
        in page.text
    )
    mine = [row for row in page.rows if len(row) == 6 and "diagnostic" in row[4]]
    assert {row[0] for row in mine} == {"A", "B"}
    offered = [attrs["data-baseline"] for tag, attrs in page.elements if "data-baseline" in attrs]
    assert offered.count("C") == 0
    # C's rate would stand out in the plot of memory, too.
    assert "Not in the plot of memory: C: different work: output_tokens is 32 against 31." in page.text
    assert "C: 95.4 MiB" not in page.text


def test_the_reverse_of_a_comparison_is_offered_and_marked(page: Page) -> None:
    rows = [row for row in page.rows if len(row) == 6 and "diagnostic" in row[4] and row[1].startswith(records.RATE)]
    forth, back = (float(row[2].split()[0]) for row in rows)
    assert forth * back == pytest.approx(1, abs=2e-3)
    assert "Against B (not the baseline that was declared)" in page.text


def test_doubts_are_told(page: Page) -> None:
    assert "Diagnostic only, not for quoting: others use 40 % of the processors." in page.text
    assert "Cut short: the lid was closed." in page.text


def test_legs_of_the_serving_suite_stand_side_by_side(page: Page) -> None:
    """Medians of the replay by hand: of 90 x (1 + n / 500), n below 5, the middle one is n = 2."""
    decode = next(row for row in page.rows if row[0] == "decode stream:1x64")
    assert decode[1:4] == ["decode_tokens_per_second, higher is better", "90.36 token/s", "30.12 token/s"]
    assert decode[4].startswith("mlx_lm.server: 3.000 [3.000, 3.000] repeatable win")
    poisson = next(row for row in page.rows if row[0] == "poisson poisson:10x24@1.5:1:0.1")
    assert poisson[2:5] == ["1.25 request/s", "—", ""]
    assert "mlx_lm.server: 5 of 5 did not count (failed: all 10 requests were refused: status 429)" in poisson[5]
    assert "Not measured: readiness, parity, first-token, prefill, long-prefill, depth, restart" in page.text


def test_quality_against_size_across_models(page: Page) -> None:
    assert "small-1 (11111111), gnomon: 95.4 MiB, 21.5" in page.text
    assert "small-2 (22222222), gnomon: 286.1 MiB, 17.25" in page.text


def test_links_lead_to_the_raw_data(page: Page, store: Store) -> None:
    links = [attrs["href"] or "" for tag, attrs in page.elements if tag == "a"][1:]
    assert all(not urlparse(link).scheme for link in links)
    files = [link for link in links if not link.startswith("#")]
    assert sorted(store.directory / unquote(link) for link in files) == sorted(store.files())
    targets = {attrs.get("id") for _, attrs in page.elements}
    inside = [link[1:] for link in links if link.startswith("#")]
    assert len(inside) == len(report_runs.SERVING)
    assert set(inside) <= targets


def test_unreadable_files_are_named(page: Page) -> None:
    assert (
        "20250101T000000Z-ab-00000000.json : 20250101T000000Z-ab-00000000.json: format 99, this version reads 1"
        in page.text
    )
    assert "a:b <i>.json" in page.text


def test_outside_text_stays_text(page: Page) -> None:
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not [tag for tag, _ in page.elements if tag in ("img", "i")]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert page.text.count(report_runs.HOSTILE) > 10


def test_nothing_is_fetched_from_elsewhere(page: Page) -> None:
    sources = [
        value for _, attrs in page.elements for name, value in attrs.items() if name in ("src", "srcset", "xlink:href")
    ]
    assert sources == []
    assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "object", "base")]


def test_the_command_writes_beside_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"GNOMON_CACHE": str(tmp_path / "cache")}
    results = tmp_path / "results"
    assert main(["bench", "report", "--out", str(results)], variables) != 0
    assert f"no results in {results}" in capsys.readouterr().err
    report_runs.fill(results)
    assert main(["bench", "report", "--out", str(results)], variables) == 0
    assert capsys.readouterr().out.strip() == str(results / "report.html")
    elsewhere = tmp_path / "none" / "x.html"
    assert main(["bench", "report", "--out", str(results), "--html", str(elsewhere)], variables) != 0
    assert f"--html is {elsewhere}" in capsys.readouterr().err
    deeper = tmp_path / "a page"
    deeper.mkdir()
    assert main(["bench", "report", "--out", str(results), "--html", str(deeper / "x.html")], variables) == 0
    links = [attrs["href"] or "" for tag, attrs in Page((deeper / "x.html").read_text()).elements if tag == "a"][1:]
    assert all((deeper / unquote(link)).resolve().is_file() for link in links if not link.startswith("#"))
