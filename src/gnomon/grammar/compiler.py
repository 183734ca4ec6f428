"""Demands on an answer's form, compiled for a vocabulary."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from gnomon.chat.constraint import Constraint
from gnomon.chat.tools.rules import COMPACT, FLEXIBLE
from gnomon.grammar.matcher import Matcher, Words, plain
from gnomon.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

EXACT: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
LOOSE: JsonCompileOptions = {"lenient": True, "coerce_one_of": True}


LEXER_FUEL = 200_000
"""Work that a grammar's regular expressions may take before the first token (llguidance counts about 50,000 in a millisecond)."""
TRIED = 4
"""First tokens that are tried."""


class Unenforceable(ValueError):
    """A demand that no grammar could be made of."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at its beginning. `gaps` say what of the demand it does not enforce."""

    matcher: Matcher
    gaps: tuple[str, ...] = ()

    def start(self) -> Matcher:
        """A matcher for one answer."""
        return self.matcher.fork()


class Compiler:
    """Compiles for one vocabulary and remembers the last `capacity` results. May be used from several threads."""

    def __init__(self, vocabulary: Vocabulary, capacity: int = 64) -> None:
        self.vocabulary = vocabulary
        self._capacity = capacity
        self._known: OrderedDict[tuple[str, str, bool], Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self.num_compiled = 0

    def compile(self, constraint: Constraint) -> Compiled:
        """The grammar of a demand. Raises Unenforceable with the place, as far as llguidance tells, and the reason."""
        key = (constraint.kind, constraint.source, constraint.any_whitespace)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            # Built by one thread, not by each that comes first.
            _ = self.vocabulary.index
        # Outside the lock: a large schema takes long, and llguidance lets other threads run.
        made = self._build(constraint)
        with self._lock:
            self.num_compiled += 1
            self._known[key] = made
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return made

    def _build(self, constraint: Constraint) -> Compiled:
        matcher = self._matcher(_grammar(constraint, EXACT))
        gaps: tuple[str, ...] = ()
        if matcher.is_error() and constraint.kind == "json":
            loose = self._matcher(_grammar(constraint, LOOSE))
            if not loose.is_error():
                matcher, gaps = loose, tuple(_gap(text) for text in loose.get_grammar_warnings())
        if matcher.is_error():
            reason = plain(matcher.get_error())
            raise Unenforceable("no text has this form" if reason.startswith("NoExtension") else reason)
        return Compiled(Matcher(matcher, self.vocabulary), gaps)

    def _matcher(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
        made = LLMatcher(self.vocabulary.index, grammar, log_level=0, limits=limits)
        if not made.is_error():
            # Finds grammars that derive nothing, and takes the costly first mask off the engine's thread.
            words = np.frombuffer(made.compute_bitmask(), dtype=np.uint32)
            self._try_on(made, words)
        return made

    def _try_on(self, matcher: LLMatcher, words: Words) -> None:
        """Take a first token in some ways: what is too large to follow gives up here already. `matcher` then is in error.

        Raises Unenforceable.
        """
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: len(self.vocabulary.spellings)])
        for token in ids[:: max(1, len(ids) // TRIED)].tolist():
            if token in self.vocabulary.eos_ids:
                continue
            tried = matcher.deep_copy()
            tried.consume_token(token)
            if not tried.is_error():
                tried.compute_bitmask()
            if tried.is_error():
                raise Unenforceable(plain(tried.get_error()))


def _grammar(constraint: Constraint, exactness: JsonCompileOptions) -> str:
    source = constraint.source
    match constraint.kind:
        case "json":
            spacing = cast("JsonCompileOptions", FLEXIBLE if constraint.any_whitespace else COMPACT)
            try:
                return LLMatcher.grammar_from_json_schema(source, overrides={**spacing, **exactness})
            except ValueError as error:
                raise Unenforceable(str(error)) from error
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            options = sorted(set(json.loads(source)))
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, options)))
        case "grammar":
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(source))
            except Exception as error:  # the converter raises Exception itself for what is wrong with a grammar
                raise Unenforceable(str(error)) from error


def _gap(warning: str) -> str:
    """`Unimplemented keys: ["uniqueItems"]` → `uniqueItems`."""
    listed = re.fullmatch(r"Unimplemented keys: (\[.*\])", warning)
    if listed:
        return ", ".join(json.loads(listed[1]))
    return "oneOf (any of them may match)" if "oneOf" in warning else plain(warning)
