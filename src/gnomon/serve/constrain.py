"""The form a request demands of its answer: enforced by the engine, or else asked of the model with a warning to the client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.chat.constraint import FIELDS, Constraint, ConstraintError, from_fields, instruction
from gnomon.chat.tool_choice import tool_call
from gnomon.engine.api import Unenforceable
from gnomon.serve.errors import invalid
from gnomon.serve.services import Services
from gnomon.serve.wire.chat import ChatRequest
from gnomon.serve.wire.messages import template_tools
from gnomon.serve.wire.sampling import SamplingFields

logger = logging.getLogger(__name__)
WARNED = 200
"""Characters of a reason that the Warning header repeats."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the engine enforces, and what it doesn't: the clients' warnings, and what to tell the model."""

    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()
    instruction: str | None = None

    def told(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with the instruction, if there is one, in its system message."""
        if self.instruction is None:
            return messages
        if messages and messages[0]["role"] in ("system", "developer"):
            first, *rest = messages
            return [{**first, "content": f"{first['content']}\n\n{self.instruction}"}, *rest]
        return [{"role": "system", "content": self.instruction}, *messages]


def demand(fields: SamplingFields, services: Services) -> Demand:
    """Read, check and compile what a request demands. Takes long for a large schema: not for the event loop.

    Raises APIError 400 for a demand that makes no sense, saying where, and for a strict one that can't be enforced.
    """
    try:
        wanted = from_fields({name: getattr(fields, name) for name in FIELDS})
    except ConstraintError as error:
        raise invalid(str(error), error.param) from error
    if wanted is None:
        return Demand()
    try:
        gaps = services.engine.compile(wanted)
    except Unenforceable as error:
        if error.code != "grammar_off" and not wanted.is_sound:
            raise invalid(str(error), wanted.param) from error
        return _unmet(wanted, str(error), enforced=False)
    return _unmet(wanted, _listed(gaps), enforced=True) if gaps else Demand(wanted)


def chat_demand(request: ChatRequest, services: Services) -> Demand:
    """What a chat request demands: a tool call when it insists on one, which outranks a form of the answer. Raises APIError 400."""
    if not request.demands_call:
        return demand(request, services)
    tools = template_tools(request.tools) or []
    single = request.parallel_tool_calls is False
    try:
        wanted = tool_call(services.template.tools, tools, name=request.named_tool, single=single)
        services.engine.compile(wanted)
    except (ConstraintError, Unenforceable) as error:
        raise invalid(str(error), error.param, "unsupported") from error
    return Demand(wanted)


def _unmet(wanted: Constraint, reason: str, *, enforced: bool) -> Demand:
    if wanted.strict:
        raise invalid(f"{wanted.param} is strict, but {reason}", wanted.param, "unsupported")
    about = "grammar not enforced in full" if enforced else "grammar not enforced"
    logger.info("%s: %s", about, reason)
    return Demand(wanted if enforced else None, (_header(f"{about}: {reason}"),), instruction(wanted))


def _listed(gaps: Sequence[str]) -> str:
    return f"not supported in a JSON schema: {', '.join(gaps)}"


def _header(text: str) -> str:
    """A quoted string's content, as a header can carry it."""
    plain = " ".join(text.replace("\\", "/").replace('"', "'").split()).encode("ascii", "replace").decode()
    return plain if len(plain) <= WARNED else plain[: WARNED - 3] + "..."
