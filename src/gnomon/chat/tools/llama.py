"""Llama's calls: JSON with `parameters`, bare or behind `<|python_tag|>`; and Llama 4's list of Python calls."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.json_calls import call_object
from gnomon.chat.tools.pythonic import call_expression, expression_list
from gnomon.chat.tools.reader import Reader, Steps

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
