"""Gemma 4's and FunctionGemma's calls: `call:name{key:value}` between sentinels, strings in marks of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.values import Notation, value

_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma(ToolFormat):
    """Keys and everything but strings are bare; a word that is no JSON literal is a string too."""

    close: str
    notation: Notation

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.expect(self.openers[0])
        yield from r.space()
        yield from r.expect("call:", bare=True)
        going = True
        while going:
            name = calls.check((yield from r.word(_NAME, "a name")))
            yield from r.space()
            if not (yield from r.stands("{")):
                raise Unparseable((yield from r.unexpected("'{'")))
            calls.begin(name)
            yield from value(r, calls.write, self.notation)
            calls.end()
            if (yield from r.took_next(self.close)):
                return
            going = yield from r.took_next("call:")
