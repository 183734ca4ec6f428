"""Splits what a model writes into reasoning and content, as it streams.

A `ReasoningFormat` is found from a model's template and vocabulary; its `splitter` is a pure automaton over text, started from the
end of the rendered prompt. Splitting in any pieces gives the same reasoning and the same content as splitting at once.
"""
# ruff: noqa: ARG002  (the moves of an automaton share one signature)

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["reasoning", "content"]
Stage = Literal["undecided", "thinking", "content"]
"""What the next character of an answer belongs to. `undecided`: a marker may come first. `thinking` includes headers and tool calls."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text of one kind; never empty."""

    kind: Kind
    text: str


class Splitter(Protocol):
    """Takes a model's text piece by piece. What might be the start of a marker is held back until it is decided.

    `copy.copy` gives an independent one at the same place.
    """

    @property
    def thinking(self) -> bool:
        """Whether the next character would be reasoning."""
        ...

    @property
    def stage(self) -> Stage: ...

    @property
    def ending(self) -> str:
        """What would end the reasoning here if it were written next: the rest of the closing tag. Empty where no text can."""
        ...

    def feed(self, text: str) -> list[Segment]: ...

    def finish(self) -> list[Segment]:
        """What was held back when the text ended. A block that never closed leaves everything in reasoning."""
        ...


class ReasoningFormat(Protocol):
    """How a model marks its reasoning."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker the automaton looks for. Those that are tokens must not be hidden by the decoder."""
        ...

    @property
    def always(self) -> bool:
        """Whether the model reasons on every turn, however the prompt ends."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that may come first where the stage is undecided."""
        ...

    @property
    def direct(self) -> bool:
        """Whether content may come without a marker there."""
        ...

    def splitter(self, generation_prompt: str = "") -> Splitter:
        """A splitter for the text that follows `generation_prompt`, the part of the prompt the template wrote after the last message."""
        ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where an answer starts: what an engine needs to know to tell on tokens where its content begins.

    `generation_prompt` is what the template wrote to open the answer. `may_open` tells that the model may still open a block there.
    """

    format: ReasoningFormat
    generation_prompt: str = ""
    may_open: bool = True

    def splitter(self) -> Splitter:
        return self.format.splitter(self.generation_prompt)


def partial_suffix(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of one of `markers`."""
    longest, size = 0, len(text)
    for marker in markers:
        if len(marker) < 2:
            continue
        # Most texts don't even have its first character where it could begin.
        at = text.find(marker[0], max(0, size - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                longest = max(longest, size - at)
                break
            at = text.find(marker[0], at + 1)
    return longest


def _first(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """Position and value of the marker that occurs first in `text` (the longest of those that start there), or (-1, "")."""
    at, found = -1, ""
    for marker in markers:
        i = text.find(marker)
        if i >= 0 and (at < 0 or i < at or (i == at and len(marker) > len(found))):
            at, found = i, marker
    return at, found


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Reasoning between two tags, at the start of the answer.

    `named` blocks start with a line that names them and is dropped. `again` allows further blocks after content has begun, for tags
    that text can't spell. `dropped` markers are taken out of the content. `enders` end a block that wasn't closed and stay in the
    content: tool calls of families that go straight from thinking to calling.
    """

    open: str
    close: str
    named: bool = False
    again: bool = False
    dropped: tuple[str, ...] = ()
    always: bool = False
    enders: tuple[str, ...] = ()

    direct = True

    @property
    def name(self) -> str:
        return self.open

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, *self.dropped, *self.enders)

    def splitter(self, generation_prompt: str = "") -> TagSplitter:
        made = TagSplitter(self)
        opened, closed = generation_prompt.rfind(self.open), generation_prompt.rfind(self.close)
        if opened > closed:
            made.feed(generation_prompt[opened:])
        elif closed >= 0:
            made.state = "after"
        # What the prompt itself holds back (a newline after the tag) is not the model's.
        made.held = ""
        return made


class TagSplitter:
    """Automaton of `TagFormat`: start → (name →) lead → think → after → content."""

    def __init__(self, format: TagFormat) -> None:
        self.format = format
        self.state: Literal["start", "name", "lead", "think", "after", "content"] = "start"
        self.held = ""

    @property
    def thinking(self) -> bool:
        return self.state in ("name", "lead", "think")

    @property
    def stage(self) -> Stage:
        return "undecided" if self.state == "start" else "thinking" if self.thinking else "content"

    @property
    def ending(self) -> str:
        close = self.format.close
        return close[partial_suffix(self.held, (close,)) :]

    def feed(self, text: str) -> list[Segment]:
        self.held += text
        out: list[Segment] = []
        while self.held and self._step(out):
            pass
        return out

    def finish(self) -> list[Segment]:
        held, self.held = self.held, ""
        if self.state in ("name", "after"):
            return []
        return [Segment("reasoning" if self.thinking else "content", held)] if held else []

    def _step(self, out: list[Segment]) -> bool:
        """One move; False when more text is needed."""
        return getattr(self, f"_{self.state}")(out)

    def _start(self, out: list[Segment]) -> bool:
        text = self.held.lstrip()
        if text.startswith(self.format.open):
            self._enter(text[len(self.format.open) :])
        elif not self.format.open.startswith(text):
            self.state = "content"
        else:
            return False
        return True

    def _enter(self, rest: str) -> None:
        self.state, self.held = "name" if self.format.named else "lead", rest

    def _name(self, out: list[Segment]) -> bool:
        at, found = _first(self.held, ("\n", self.format.close))
        if at < 0:
            return False
        self.state, self.held = "lead" if found == "\n" else "after", self.held[at + len(found) :]
        return True

    def _lead(self, out: list[Segment]) -> bool:
        self.held = self.held.lstrip("\n")
        if not self.held:
            return False
        # A model whose prompt already opened the block may write the tag once more.
        if self.held.startswith(self.format.open):
            self._enter(self.held[len(self.format.open) :])
        elif self.format.open.startswith(self.held):
            return False
        else:
            self.state = "think"
        return True

    def _think(self, out: list[Segment]) -> bool:
        ends = (self.format.close, *self.format.enders)
        at, found = _first(self.held, ends)
        if at >= 0:
            _put(out, "reasoning", self.held[:at].rstrip("\n"))
            self.state, self.held = "after", self.held[at + (len(found) if found == self.format.close else 0) :]
            return True
        body = self.held[: len(self.held) - partial_suffix(self.held, ends)].rstrip("\n")
        _put(out, "reasoning", body)
        self.held = self.held[len(body) :]
        return False

    def _after(self, out: list[Segment]) -> bool:
        self.held = self.held.lstrip("\n")
        if self.held:
            self.state = "content"
        return bool(self.held)

    def _content(self, out: list[Segment]) -> bool:
        markers = (*((self.format.open,) if self.format.again else ()), *self.format.dropped)
        at, found = _first(self.held, markers)
        if at < 0:
            safe = len(self.held) - partial_suffix(self.held, markers)
            _put(out, "content", self.held[:safe])
            self.held = self.held[safe:]
            return False
        _put(out, "content", self.held[:at])
        rest = self.held[at + len(found) :]
        if found == self.format.open:
            self._enter(rest)
        else:
            self.held = rest
        return True


def _put(out: list[Segment], kind: Kind, text: str) -> None:
    if text:
        out.append(Segment(kind, text))


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Messages on channels: `<|start|>role<|channel|>name<|message|>text<|end|>`. The analysis channel is reasoning.

    A message addressed to a recipient (`to=`) is a tool call: it stays in the content with its markup.
    """

    name: str = "harmony"
    always: bool = True

    direct = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (CHANNEL, START)

    @property
    def markers(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, END, RETURN, CALL)

    def splitter(self, generation_prompt: str = "") -> HarmonySplitter:
        made = HarmonySplitter()
        at = generation_prompt.rfind(START)
        # After a bare role the model writes the rest of the header, or none.
        if at >= 0 and CHANNEL in generation_prompt[at:]:
            made.feed(generation_prompt[at:])
            if made.state != "header":
                made.held = ""
        return made


class HarmonySplitter:
    """Automaton of `HarmonyFormat`: between → header → body → between …"""

    def __init__(self) -> None:
        self.state: Literal["between", "header", "body"] = "between"
        self.kind: Kind = "content"
        self.call = False
        self.held = ""
        self._said: dict[Kind, bool] = {"reasoning": False, "content": False}
        self._fresh = False

    ending = ""

    @property
    def thinking(self) -> bool:
        return self.state == "body" and self.kind == "reasoning"

    @property
    def stage(self) -> Stage:
        if self.state == "between":
            return "undecided"
        return "content" if self.state == "body" and self.kind == "content" and not self.call else "thinking"

    def feed(self, text: str) -> list[Segment]:
        self.held += text
        out: list[Segment] = []
        while self.held and getattr(self, f"_{self.state}")(out):
            pass
        return out

    def finish(self) -> list[Segment]:
        held, self.held = self.held, ""
        out: list[Segment] = []
        # An unfinished header is markup, not text, unless it never became one.
        if self.state == "body" or (CHANNEL not in held and not held.isspace()):
            self._say(out, held)
        return out

    def _between(self, out: list[Segment]) -> bool:
        text = self.held.lstrip()
        heads = (START, CHANNEL, MESSAGE, "to=")
        if any(text.startswith(head) for head in heads):
            self.state = "header"
        elif any(head.startswith(text) for head in heads):
            return False
        else:
            self._open("content", call=False)
        return True

    def _header(self, out: list[Segment]) -> bool:
        at = self.held.find(MESSAGE)
        if at < 0:
            return False
        header, self.held = self.held[:at], self.held[at + len(MESSAGE) :]
        words = header.partition(CHANNEL)[2].split()
        call = "to=" in header
        self._open("reasoning" if words[:1] == ["analysis"] and not call else "content", call=call)
        if call:
            self._say(out, header.lstrip() + MESSAGE)
        return True

    def _open(self, kind: Kind, *, call: bool) -> None:
        self.state, self.kind, self.call = "body", kind, call
        self._fresh = self._said[kind]

    def _body(self, out: list[Segment]) -> bool:
        ends = (END, RETURN, CALL, START)
        at, found = _first(self.held, ends)
        if at < 0:
            safe = len(self.held) - partial_suffix(self.held, ends)
            self._say(out, self.held[:safe])
            self.held = self.held[safe:]
            return False
        self._say(out, self.held[:at] + (found if self.call and found != START else ""))
        self.state, self.held = "between", self.held[at + (0 if found == START else len(found)) :]
        return True

    def _say(self, out: list[Segment], text: str) -> None:
        if not text:
            return
        if self._fresh:
            # A further message of the same kind starts on a line of its own.
            text = "\n" + text
        said: dict[Kind, bool] = {**self._said, self.kind: True}
        # Replaced, not changed: copies share it.
        self._fresh, self._said = False, said
        _put(out, self.kind, text)


class PlainSplitter:
    """For models that don't mark reasoning: all is content, literal tags included."""

    thinking = False
    stage: Stage = "content"
    ending = ""

    def feed(self, text: str) -> list[Segment]:
        return [Segment("content", text)] if text else []

    def finish(self) -> list[Segment]:
        return []


TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("◁think▷", "◁/think▷"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)


def detect(template: str | None, has_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format of a model, from the source of its chat template and what tokens its vocabulary has; None if it marks no reasoning.

    Structures made of special tokens come first, then tags the template writes, then tags that are tokens.
    """
    if all(has_token(token) for token in (START, CHANNEL, MESSAGE)):
        return HarmonyFormat()
    if has_token("<|channel>") and has_token("<channel|>"):
        return TagFormat("<|channel>", "<channel|>", named=True, again=True)
    if all(has_token(token) for token in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")):
        markers = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
        return TagFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>", dropped=markers)
    source = template or ""
    for opened, closed in TAGS:
        if opened in source or closed in source:
            return TagFormat(opened, closed)
    for opened, closed in TAGS:
        if has_token(opened) and has_token(closed):
            return TagFormat(opened, closed)
    return None


def splitter(format: ReasoningFormat | None, generation_prompt: str = "") -> Splitter:
    """A splitter for what follows `generation_prompt`; for a model without a format one that calls everything content."""
    return PlainSplitter() if format is None else format.splitter(generation_prompt)


def split(format: ReasoningFormat | None, text: str, generation_prompt: str = "") -> tuple[str, str]:
    """Reasoning and content of a whole text."""
    made = splitter(format, generation_prompt)
    segments = [*made.feed(text), *made.finish()]
    return tuple("".join(s.text for s in segments if s.kind == kind) for kind in ("reasoning", "content"))  # pyright: ignore[reportReturnType]
