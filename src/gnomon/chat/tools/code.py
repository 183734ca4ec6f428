"""Where Markdown is code."""

from __future__ import annotations


class Code:
    """Follows fences and inline spans of a text told in order."""

    def __init__(self) -> None:
        self._fence = ""
        self._opening = False
        self._span = 0
        self._line_start = True

    @property
    def inside(self) -> bool:
        return bool(self._fence or self._span)

    def newline(self) -> None:
        # A span may go on in the next line, but a lone backtick is more frequent than that.
        self._span, self._line_start, self._opening = 0, True, False

    def text(self) -> None:
        self._line_start = False

    def ticks(self, run: str) -> None:
        """A whole run of backticks or tildes."""
        if self._fence:
            if (self._line_start or self._opening) and run.startswith(self._fence):
                self._fence = ""
        elif self._line_start and len(run) >= 3:
            self._fence, self._opening = run, True
        elif run[0] == "`":
            self._span = 0 if self._span == len(run) else self._span or len(run)
        self._line_start = False
