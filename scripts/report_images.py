"""Take the pictures of the benchmark report for docs/images, from the tests' replay store: `uv run python scripts/report_images.py`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from gnomon.bench.page import render
from gnomon.bench.store import Store, load

ROOT = Path(__file__).parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from bench import report_runs

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no Chromium on this machine (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        store = Store(Path(folder))
        legs = (report_runs.serving(*leg) for leg in report_runs.SERVING)
        for run in (load(report_runs.REPLAY), report_runs.three_arms(), *legs):
            store.save(run)
        page_file = store.directory / "report.html"
        page_file.write_text(render(*store.runs(), store.directory), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page.goto(page_file.as_uri())
                page.screenshot(path=ROOT / "docs" / "images" / f"bench-report-{width}-{scheme}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
