"""A request and what an identical earlier one had come to."""

from __future__ import annotations

from dataclasses import replace

from gnomon.chat.tokenizer import Tokenizer
from gnomon.engine.api import Request
from gnomon.engine.constrained import RowConstraint
from gnomon.engine.resume.key import request_key
from gnomon.engine.resume.record import Record
from gnomon.engine.resume.store import Slot, Store
from gnomon.grammar import Compiled, GrammarFailed


def claim(
    store: Store, request: Request, identity: str, tokenizer: Tokenizer, vocab_size: int, grammar: Compiled | None
) -> tuple[Request, Slot | None, Record | None]:
    """Where a request's answer is saved (nowhere, if it has several choices), and what was saved of an identical one.

    The request given back has the prompt that was processed then: the same text, perhaps in other ids.
    """
    if request.n > 1:
        store.tell_skipped()
        return request, None, None
    key = request_key(request, identity)
    while (found := store.claim(key)) is not None:
        slot, record = found
        if _fits(record, request, tokenizer, vocab_size, grammar):
            return _as_recorded(request, record), slot, record
        store.reject(slot)
    return request, store.open(key), None


def _fits(record: Record, request: Request, tokenizer: Tokenizer, vocab_size: int, grammar: Compiled | None) -> bool:
    """Whether a record could be this request's: its ids exist, it has the scores asked for, and its grammar allows them."""
    scored = request.sampling.logprobs is not None
    if scored != bool(record.scores) or any(not 0 <= one < vocab_size for one in (*record.prompt, *record.tokens)):
        return False
    if grammar is not None:
        constraint = RowConstraint(grammar.start(), tokenizer, request.thinking)
        try:
            for token in record.tokens:
                constraint.advance(token)
        except GrammarFailed:
            return False
    return True


def _as_recorded(request: Request, record: Record) -> Request:
    boundary = request.boundary
    if boundary is not None:
        tail = request.prompt[boundary:]
        start = len(record.prompt) - len(tail)
        boundary = start if start >= 0 and record.prompt[start:] == tail else None
    return replace(request, prompt=record.prompt, boundary=boundary)
