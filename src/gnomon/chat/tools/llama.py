"""Llama's calls: JSON with `parameters`, bare or behind `<|python_tag|>`; and Llama 4's list of Python calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.json_calls import call_object, call_rule
from gnomon.chat.tools.pythonic import call_expression, expression_list, list_rule
from gnomon.chat.tools.reader import Reader, Steps
from gnomon.chat.tools.rules import Function, Inexpressible, Rules

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(ToolFormat):
    """Without a tag a call counts only at the beginning of the answer, and only if it is one of a known tool."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        opener = yield from r.first_of((PYTHON_TAG, PYTHON_START))
        r.at += len(opener)
        yield from r.space()
        if (yield from r.stands("[")):
            yield from expression_list(r, calls, bare=True)
        elif (yield from r.stands("{")):
            yield from call_object(r, calls, bare=True)
            while (yield from r.took_next(";")):
                yield from r.space()
                yield from call_object(r, calls, bare=True)
        else:
            # Code for an interpreter begins like this too.
            yield from call_expression(r, calls, bare=True)
        yield from r.took_next(PYTHON_END)

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        """Llama 4's list where the vocabulary has its token, and else Llama 3's objects."""
        if g.special(PYTHON_START):
            return Section(PYTHON_START, f"{list_rule(g, functions, single=single)} {g.text(PYTHON_END)}")
        each = g.rule(" | ".join(call_rule(g, one, arguments="parameters") for one in functions))
        return Section("", each, g.text("; "))

    def turn(
        self, g: Rules, functions: Sequence[Function], *, required: bool, single: bool, answer: str | None = None
    ) -> str:
        """An answer of JSON begins like a call: then calls come behind the tag, which the vocabulary must have."""
        if required or answer is None or g.special(PYTHON_START):
            return ToolFormat.turn(self, g, functions, required=required, single=single, answer=answer)
        if not g.special(PYTHON_TAG):
            raise Inexpressible("an answer of JSON can't be told from a call in this model's notation", "tools")
        return f"{answer} | {g.text(PYTHON_TAG)} {self.section(g, functions, single=single).body}"
