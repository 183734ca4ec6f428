"""Calls between two tags, as JSON objects or as elements with parameters."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.json_calls import call_list, call_object, closed
from gnomon.chat.tools.parameters import Framing
from gnomon.chat.tools.qwen import FUNCTION, function_element
from gnomon.chat.tools.reader import Reader, Steps, Unparseable


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(ToolFormat):
    """What stands between the tags decides how it is read, whatever the model was taught: fine-tunes mix the notations.

    JSON: Hermes, Qwen2.5 and 3, SmolLM3, Granite, Command R and many more. Elements: Qwen3-Coder, Seed-OSS; with `FUNCTION` among
    the openers they may stand without the outer tag.
    """

    close: str
    framing: Framing = "newline"
    """What stands around the values of elements."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        opener = yield from r.first_of(self.openers)
        bare = opener == FUNCTION
        if not bare:
            r.at += len(opener)
            yield from r.space()
        kind = yield from r.first_of(("{", "[", FUNCTION))
        if not kind:
            raise Unparseable((yield from r.unexpected("a call")), literal=True)
        while kind:
            if kind == "{":
                yield from call_object(r, calls)
            elif kind == "[":
                yield from call_list(r, calls)
            else:
                yield from function_element(r, calls, self.close, self.framing, bare=bare)
            if (yield from closed(r, self.close)):
                return
            kind = yield from r.next_of((FUNCTION,) if bare else ("{", FUNCTION))
