"""Prints answers as they come: reasoning dimmed, content plain; on pipes content alone goes to stdout."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gnomon.chat.reasoning import Kind, Segment
from gnomon.cli._talk import Ended, Event, Reading

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class Answer:
    """What was printed. `ended` is None for an answer that was broken off."""

    content: str = ""
    reasoning: str = ""
    ended: Ended | None = None
    seconds: float = 0.0


class Screen:
    """stdout and stderr, as terminals or pipes."""

    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        self.out = out or Console(highlight=False)
        self.err = err or Console(stderr=True, highlight=False)

    def show(self, events: Generator[Event]) -> Answer:
        """Print an answer as it streams. Ctrl-C breaks it off; what was printed so far is returned."""
        answer = Answer()
        printed: Kind | None = None
        started = time.perf_counter()
        status = self.err.status("") if self.err.is_terminal and not self.err.is_dumb_terminal else None
        try:
            with closing(events):
                for event in events:
                    if isinstance(event, Reading) and status is not None and printed is None:
                        status.update(f"reading the prompt: {event.processed} of {event.total} tokens")
                        status.start()
                    elif isinstance(event, Segment):
                        if status is not None:
                            status.stop()
                            status = None
                        if printed != event.kind:
                            self._turn(printed, event.kind)
                        printed = event.kind
                        # Kept first: what Ctrl-C lets the user see is part of the conversation.
                        if event.kind == "content":
                            answer.content += event.text
                        else:
                            answer.reasoning += event.text
                        self._print(event)
                    elif isinstance(event, Ended):
                        answer.ended = event
        except KeyboardInterrupt:
            answer.ended = None
        finally:
            if status is not None:
                status.stop()
        answer.seconds = time.perf_counter() - started
        if printed is not None:
            self._line_end(answer)
        return answer

    def _print(self, segment: Segment) -> None:
        if segment.kind == "content":
            self._write(self.out, segment.text, Style())
        elif self.out.is_terminal:
            self._write(self.out, segment.text, Style(dim=True))
        else:
            # A pipe gets the answer alone.
            self._write(self.err, segment.text, Style(dim=True))

    def _write(self, console: Console, text: str, style: Style) -> None:
        if not console.is_terminal:
            console.file.write(text)
            console.file.flush()
            return
        # A model's text must not steer the terminal.
        shown = CONTROL.sub(lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 0x20 else "\ufffd", text)
        console.print(Text(shown, style), end="", soft_wrap=True)

    def _turn(self, before: Kind | None, now: Kind) -> None:
        """Set reasoning and content apart; where text can't be dimmed, by words."""
        if not self.out.is_terminal:
            return
        if before is not None:
            self.out.print("\n")
        if self.out.is_dumb_terminal and (before is not None or now == "reasoning"):
            self.out.print("(thinking)" if now == "reasoning" else "(answer)")

    def _line_end(self, answer: Answer) -> None:
        said = answer.content or answer.reasoning
        if not said.endswith("\n") or answer.ended is None:
            self.out.print()

    def summary(self, answer: Answer) -> None:
        """A line of counts and speed, for terminals."""
        ended = answer.ended
        if ended is None or not self.err.is_terminal:
            return
        rate = ended.completion_tokens / answer.seconds if answer.seconds else 0.0
        cut = "; stopped at the token limit" if ended.reason == "length" else ""
        self.err.print(
            f"{ended.prompt_tokens} + {ended.completion_tokens} tokens, {answer.seconds:.1f} s, {rate:.1f} tokens/s{cut}",
            style="dim",
        )
