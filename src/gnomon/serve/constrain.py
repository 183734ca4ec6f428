"""The form a request demands of its answer: enforced by the engine, or else asked of the model with a warning to the client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gnomon.chat.constraint import FIELDS, Constraint, ConstraintError, from_fields, instruction
from gnomon.chat.tool_choice import PARAM, Unwritable, tool_call
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
    calls: bool = True
    """Whether the answer may hold calls: where it is held to a form alone, what looks like one is none."""

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
    return _unmet(wanted, _listed(gaps), enforced=True) if gaps else Demand(wanted, calls=False)


def chat_demand(request: ChatRequest, services: Services) -> Demand:
    """What a chat request demands: calls, a form of the answer, or either where it leaves the choice. Raises APIError 400.

    A call that is insisted on outranks a form. Tools that are `strict` have their arguments held to their schemas wherever the model
    calls them. With a form other than JSON no call can be made.
    """
    tools = template_tools(request.offered_tools()) or []
    strict = any(tool["function"].get("strict") for tool in tools)
    form = Demand() if request.demands_call else demand(request, services)
    answer = form.constraint
    if not request.demands_call and (not tools or (not strict and answer is None)):
        return form
    if answer is not None and answer.kind != "json":
        return form
    name, single = request.named_tool, request.parallel_tool_calls is False
    try:
        wanted = tool_call(
            services.template.tools,
            tools,
            name=name,
            required=request.demands_call,
            single=single,
            answer=answer,
            split=services.vocabulary.split,
        )
        services.engine.compile(wanted)
    except Unwritable as error:
        return _uncalled(form, tools, name, error, error.param, required=request.demands_call)
    except ConstraintError as error:
        raise invalid(str(error), error.param, "unsupported") from error
    except Unenforceable as error:
        return _uncalled(form, tools, name, error, PARAM, required=request.demands_call)
    return replace(form, constraint=wanted, calls=True)


def _uncalled(
    form: Demand, tools: Sequence[dict[str, Any]], name: str | None, error: Exception, param: str, *, required: bool
) -> Demand:
    """What remains of a demand for calls that can't be enforced: to ask the model, and to say so; nothing of `strict` tools."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if any(function.get("strict") for function in functions):
        raise invalid(f"a tool is strict, but {error}", param, "unsupported") from error
    if not required:
        return replace(form, warnings=(*form.warnings, _header(f"no tool can be called: {error}")))
    logger.info("tool_choice not enforced: %s", error)
    names = " or ".join(str(function["name"]) for function in functions)
    asked = f"Answer with a call of {names}."
    return Demand(None, (_header(f"tool_choice not enforced: {error}"),), asked, calls=True)


def _unmet(wanted: Constraint, reason: str, *, enforced: bool) -> Demand:
    if wanted.strict:
        raise invalid(f"{wanted.param} is strict, but {reason}", wanted.param, "unsupported")
    about = "grammar not enforced in full" if enforced else "grammar not enforced"
    logger.info("%s: %s", about, reason)
    return Demand(
        wanted if enforced else None,
        (_header(f"{about}: {reason}"),),
        instruction(wanted),
        calls=not enforced,
    )


def _listed(gaps: Sequence[str]) -> str:
    return f"not supported in a JSON schema: {', '.join(gaps)}"


def _header(text: str) -> str:
    """A quoted string's content, as a header can carry it."""
    plain = " ".join(text.replace("\\", "/").replace('"', "'").split()).encode("ascii", "replace").decode()
    return plain if len(plain) <= WARNED else plain[: WARNED - 3] + "..."
