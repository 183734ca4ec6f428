"""Renders conversations through a model's own chat template, as transformers does, without importing it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from gnomon.chat.messages import ChatError, Habits, normalise, plain
from gnomon.chat.reasoning import ReasoningFormat, Splitter, TagFormat, Thinking, detect, partial_suffix, splitter
from gnomon.chat.tool_prompt import offer, told, written_out
from gnomon.chat.tools import GENERIC, ToolFormat
from gnomon.chat.tools import detect as detect_tools

SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates read whether to think; the first is also what requests call it."""
RESERVED = ("messages", "tools", "raise_exception", "strftime_now")

CALLED: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "?"},
    # Mistral's templates want ids of nine letters or digits.
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {"needle": "hay"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "f", "content": "!"},
    {"role": "assistant", "content": "."},
)
"""A conversation that tries how a template takes tool calls."""
LATE: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "."},
    {"role": "user", "content": "?"},
    {"role": "system", "content": "needle"},
    {"role": "assistant", "content": "!"},
    {"role": "user", "content": "?"},
)
"""One that tries how it takes a system message behind others, such as Claude Code 2.1.332 sends."""

TRIED: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {"name": "needle", "description": "?", "parameters": {"type": "object", "properties": {}}},
    },
)
"""A tool that tries whether a template writes tools."""

_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template's code can raise: its own refusals and the ordinary mistakes of an expression over unexpected values."""


class TemplateTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Sources by name; the usual one is named `default`."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and the like, by name."""
        ...

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`; `special` adds what the tokenizer adds on its own, such as a BOS."""
        ...

    def token_id(self, piece: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it.

    `text[generation_start:]` is what the template wrote to open the answer. `stable` tells that the text before it is what the
    template writes without opening an answer, so that the next turn starts with the same text; then `stable_tokens` is its length
    in tokens, where it ends on a token. `thinking_open` tells that the answer starts inside a reasoning block, `thinking` that this
    turn thinks at all.
    """

    text: str
    ids: tuple[int, ...]
    generation_start: int
    stable: bool
    stable_tokens: int | None
    thinking_open: bool
    thinking: bool

    @property
    def generation_prompt(self) -> str:
        return self.text[self.generation_start :]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The `dict` templates see: it builds dictionaries and offers no attribute to climb from."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _public(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template can't store {name!r} on a namespace")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes for HTML; prompts want plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment(now: Callable[[], datetime] = datetime.now) -> jinja2.Environment:
    """The sandbox chat templates are written for: trimmed blocks, loop controls, and the globals transformers gives them."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    extra: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    made.globals.update(extra)
    return made


class ChatTemplate:
    """A model's chat templates, compiled once. Rendering is pure and may run on several threads.

    `now` is the clock of `strftime_now`. Raises ChatError when the model has templates that don't compile.
    """

    def __init__(self, tokenizer: TemplateTokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        self.tokenizer = tokenizer
        self.sources: dict[str, str] = dict(tokenizer.chat_templates)
        self.special: dict[str, str] = dict(tokenizer.special_tokens)
        sandbox = environment(now)
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, frozenset[str]] = {}
        for name, source in self.sources.items():
            try:
                self._templates[name] = sandbox.from_string(source)
                self._variables[name] = frozenset(jinja2.meta.find_undeclared_variables(sandbox.parse(source)))
            except jinja2.TemplateError as e:
                raise ChatError(
                    f"the model's chat template {name!r} doesn't compile: {e}", code="template_error"
                ) from e
        written = "\n".join(self.sources.values())

        def has_token(token: str) -> bool:
            return tokenizer.token_id(token) is not None

        self.shows_tools = self._shows_tools()
        """Whether the template tells the model of tools; for one that doesn't, `render` does."""
        taught = detect_tools(written, has_token)
        untaught = taught is None and not self.shows_tools and self.calling is None
        self.tools: ToolFormat | None = GENERIC if untaught else taught
        """How the model writes tool calls: as it was taught, or, if its template knows nothing of them, as it is told. None where the
        template tells it in a way that isn't known."""
        reasoning = detect(written, has_token)
        if isinstance(reasoning, TagFormat) and self.tools is not None:
            reasoning = replace(reasoning, enders=self.tools.ends_thinking)
        self.reasoning: ReasoningFormat | None = reasoning

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all; base models have none."""
        return bool(self._templates)

    def name_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Which of several templates renders a conversation."""
        if not self._templates:
            raise ChatError("this model has no chat template: use /v1/completions", code="no_chat_template")
        if tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" not in self._templates:
            raise ChatError(f"none of the model's chat templates is the default: {', '.join(sorted(self._templates))}")
        return "default"

    def knows(self, variable: str, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether the template reads this variable."""
        return self.exists and variable in self._variables[self.name_for(tools)]

    @cached_property
    def switch(self) -> str | None:
        """The variable that switches thinking on and off, if the template has one."""
        return next((name for name in SWITCHES if self.knows(name)), None)

    @cached_property
    def thinks_by_default(self) -> bool | None:
        """What the template does when nobody says: found by comparing renderings. None if it has no switch."""
        if self.switch is None:
            return None
        try:
            unsaid, on, off = (
                self._render(
                    "default", [{"role": "user", "content": "?"}], None, {**said, "add_generation_prompt": True}
                )
                for said in ({}, {self.switch: True}, {self.switch: False})
            )
        except ChatError:
            return None
        return unsaid == on if on != off else None

    def _shows_tools(self) -> bool:
        if not self.exists:
            return True
        try:
            name = self.name_for(TRIED)
            said = self._render(name, [{"role": "user", "content": "?"}], TRIED, {"add_generation_prompt": True})
        except ChatError:
            # Its own reasons have nothing to do with tools.
            return any("tools" in variables for variables in self._variables.values())
        return "needle" in said

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template writes a system message."""
        asked = [{"role": "system", "content": "needle"}, {"role": "user", "content": "?"}]
        said = self._try(normalise(asked, self.habits))
        return said is not None and "needle" in said

    @cached_property
    def habits(self) -> Habits:
        """What this template expects of messages, found by rendering small conversations."""
        return self.calling or self._talking

    @cached_property
    def calling(self) -> Habits | None:
        """What it expects of messages with tool calls; None if it doesn't write any."""
        if not self.exists:
            return None
        for no_content, text in product(("absent", "empty", "none"), (False, True)):
            habits = replace(self._talking, text_arguments=text, no_content=no_content)
            told = self._try(normalise(CALLED, habits))
            # Python's own way of writing things shows a template that prints what it gets without asking what it is.
            if told is not None and "needle" in told and "'needle'" not in told and "None" not in told:
                return habits
        return None

    @cached_property
    def _talking(self) -> Habits:
        if not self.exists:
            return Habits()
        typed = False
        seen = self._try([{"role": "user", "content": "needle"}])
        if seen is None or "needle" not in seen:
            parts = self._try([{"role": "user", "content": [{"type": "text", "text": "needle"}]}])
            typed = parts is not None and "needle" in parts
        habits = Habits("developer" in self.sources[self.name_for(None)], typed)
        # Some refuse them, some leave them out without a word.
        late = self._try(normalise(LATE, habits))
        once, twice = (self._try(normalise([{"role": "user", "content": "?"}] * n, habits)) for n in (1, 2))
        return replace(
            habits, late_system=late is not None and "needle" in late, repeats=twice is not None or once is None
        )

    def _try(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        try:
            return self._render(self.name_for(None), messages, None, {"add_generation_prompt": False})
        except ChatError:
            return None

    def thinking_kwargs(
        self, request: Mapping[str, Any] | None, effort: str | None, default: bool | None
    ) -> dict[str, Any]:
        """Template variables of a request: its own `chat_template_kwargs`, over `reasoning_effort`, over the server's `--thinking`.

        An effort of "none" switches thinking off, any other on; where the template reads the effort itself it is passed on too.
        Raises ChatError when `enable_thinking` is no boolean.
        """
        given = dict(request or {})
        wanted = given.get("enable_thinking")
        if wanted is not None and not isinstance(wanted, bool):
            raise ChatError(
                f"chat_template_kwargs.enable_thinking is {wanted!r}: true or false is required", "chat_template_kwargs"
            )
        if wanted is None:
            wanted = default if effort is None else effort != "none"
        made: dict[str, Any] = {}
        if wanted is not None:
            made |= {"enable_thinking": wanted, **({self.switch: wanted} if self.switch else {})}
        if effort is not None and effort != "none" and self.knows("reasoning_effort"):
            made["reasoning_effort"] = effort
        return {**made, **{key: value for key, value in given.items() if value is not None}}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        """Render and tokenise. `kwargs` are variables of the template, known to it or not; no special tokens are added to what it writes.

        Raises ChatError: for messages of a wrong shape, or with the template's own message when it refuses the conversation.
        """
        for name in RESERVED:
            if name in kwargs:
                raise ChatError(f"chat_template_kwargs.{name} is reserved", "chat_template_kwargs")
        tools = tools or None
        name = self.name_for(tools)
        ready = normalise(self._with_tools(messages, tools), self.habits)
        variables = {**kwargs, "add_generation_prompt": add_generation_prompt}
        text = self._render(name, ready, tools, variables)
        before = (
            self._render(name, ready, tools, {**variables, "add_generation_prompt": False})
            if add_generation_prompt
            else text
        )
        start = self._start(text, before)
        stable = text[:start] == before
        ids = tuple(self.tokenizer.encode(text, special=False))
        opened = self.splitter(text[start:]).thinking
        return Rendered(
            text,
            ids,
            start,
            stable,
            self._stable_tokens(text, ids, start) if stable else None,
            opened,
            self._thinks(kwargs, opened),
        )

    def _with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[Mapping[str, Any]]:
        """The conversation with what the template has no place for: the tools, and, unless it was taught, calls and results."""
        generic = self.tools is GENERIC
        said = written_out(messages) if generic else messages
        if self.shows_tools or not tools:
            return said
        said = normalise(said, Habits(developer=self.habits.developer))
        return told(said, offer(tools, notation=generic), system=self.takes_system)

    def splitter(self, generation_prompt: str) -> Splitter:
        """A splitter of reasoning and content for the answer to a rendered prompt."""
        return splitter(self.reasoning, generation_prompt)

    def thinking(self, rendered: Rendered) -> Thinking | None:
        """Where the answer to a rendered prompt starts; None for a model that marks no reasoning."""
        if self.reasoning is None:
            return None
        return Thinking(self.reasoning, rendered.generation_prompt, rendered.thinking or self.switch is None)

    def _thinks(self, kwargs: Mapping[str, Any], opened: bool) -> bool:
        if self.switch is not None:
            said = kwargs.get(self.switch, self.thinks_by_default)
            if said is not None:
                return bool(said)
        return opened or (self.reasoning is not None and self.reasoning.always)

    def _start(self, text: str, before: str) -> int:
        """Where the opening of the answer begins in `text`, which without it is `before`."""
        markers = self.reasoning.markers if self.reasoning else ()
        if text == before:
            # A template that knows no generation prompt may still end with a marker.
            bare = text.rstrip()
            return next((len(bare) - len(marker) for marker in markers if bare.endswith(marker)), len(text))
        if text.startswith(before):
            return len(before)
        start = next(
            (i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), min(len(text), len(before))
        )
        # The shared part must not cut a marker in two.
        return start - partial_suffix(text[:start], markers)

    def _stable_tokens(self, text: str, ids: tuple[int, ...], start: int) -> int | None:
        tail = tuple(self.tokenizer.encode(text[start:], special=False))
        return len(ids) - len(tail) if ids[len(ids) - len(tail) :] == tail else None

    def _render(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        seen = {"documents": None, **self.special, **{key: plain(value) for key, value in variables.items()}}
        try:
            return self._templates[name].render({**seen, "messages": messages, "tools": plain(tools)})
        except jinja2.TemplateError as e:
            raise ChatError(e.message or str(e), code="template_error") from e
        except _FAILURES as e:
            raise ChatError(f"the model's chat template failed on this conversation: {e}", code="template_error") from e
