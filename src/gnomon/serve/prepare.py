"""What is checked and computed of a request before the engine sees it, shared by the generating routes. Runs off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.chat.tools import Extractor, ToolFormat, Tools
from gnomon.engine.api import Request, overflow
from gnomon.serve import volatile
from gnomon.serve.errors import invalid, show
from gnomon.serve.services import Services
from gnomon.serve.wire.sampling import SamplingFields


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready for the engine, whatever its route: `requests` share the HTTP response."""

    id: str
    created: int
    requests: tuple[Request, ...]
    stream: bool
    usage: bool
    tier: str
    warnings: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    """Names of the lines that were moved out of the prompt."""

    def headers(self, tier: str | None = None) -> dict[str, str]:
        headers = {"x-gnomon-tier": tier or self.tier}
        if self.warnings:
            headers["warning"] = ", ".join(f'299 gnomon "{text}"' for text in self.warnings)
        if self.moved:
            headers[volatile.HEADER] = ", ".join(self.moved)
        return headers


def check_ids(ids: Sequence[object], vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids within the vocabulary. Raises APIError 400."""
    checked: list[int] = []
    for one in ids:
        if type(one) is not int:
            raise invalid(f"{param} must hold token ids of type int, got {show(one)}", param)
        if not 0 <= one < vocab_size:
            raise invalid(f"{param}: token id {show(one)} must be at least 0 and at most {vocab_size - 1}", param)
        checked.append(one)
    return tuple(checked)


def check_size(texts: Iterable[str], services: Services, param: str) -> None:
    """Raise APIError 400 for texts that are too long for the context however they are tokenised, which may take minutes."""
    longest, context = services.vocabulary.longest_token, services.engine.model.context_length
    if longest is None or context is None:
        return
    size = sum(len(text.encode()) for text in texts)
    if size > longest * context:
        raise invalid(
            f"{overflow(size // longest, context)}, and {param} has {size} bytes, of which a token holds {longest} at most",
            param,
            "context_length_exceeded",
        )


def tier(services: Services, fields: SamplingFields) -> str:
    """The tier a request will run in, as far as can be told before it does: tone-curve sampling has no oracle outside."""
    return "Lab" if fields.tone_curve(services.sampling) is not None else services.engine.model.tier


def extractor_for(
    format: ToolFormat | None, offered: Sequence[Mapping[str, Any]] | None, *, single: bool
) -> Callable[[], Extractor] | None:
    """Makes an extractor for each choice; None where nothing can be a call."""
    if format is None or not offered:
        return None
    tools = Tools(offered)
    return lambda: Extractor(format, tools, single=single)
