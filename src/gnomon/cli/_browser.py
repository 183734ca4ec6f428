"""Opens a page in the person's browser, if there is one with a window."""

from __future__ import annotations

import contextlib
import threading
import webbrowser


def find() -> webbrowser.BaseBrowser | None:
    """The browser of this desktop. Browsers that would take over the terminal don't count."""
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return None
    own_window = isinstance(found, webbrowser.BackgroundBrowser) or not isinstance(found, webbrowser.GenericBrowser)
    return found if own_window and type(found).__name__ not in ("Elinks", "Links") else None


def show(url: str) -> None:
    """Open `url` without waiting for the browser; one that can't is no matter."""
    browser = find()
    if browser is None:
        return

    def run() -> None:
        with contextlib.suppress(webbrowser.Error, OSError):
            browser.open(url)

    threading.Thread(target=run, name="browser", daemon=True).start()
