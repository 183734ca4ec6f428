"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gnomon.chat.template import ChatTemplate
from gnomon.isolate import Entry
from gnomon.serve.errors import APIError, show
from gnomon.serve.services import Services, services_of
from gnomon.serve.wire.models import ModelBody, ModelList

router = APIRouter()


def _all(services: Services) -> Iterator[ModelBody]:
    """The served model, or all of the pool with the default first. Loads none."""
    if services.pool is None:
        yield _served(services)
    else:
        yield from (_pooled(services, entry, about) for entry, about in services.pool.entries())


def _tool_format(template: ChatTemplate) -> str | None:
    return None if template.tools is None else template.tools.name


def _served(services: Services) -> ModelBody:
    model = services.engine.model
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": services.owner,
        "context_window": model.context_length,
        "reasoning": services.template.reasoning is not None,
        "vision": False,
        "tool_format": _tool_format(services.template),
        "model_type": model.model_type,
        "size_bytes": model.weight_bytes,
    }


def _pooled(services: Services, entry: Entry, about: Mapping[str, Any]) -> ModelBody:
    own = services.models.get(entry.id)
    body: ModelBody = {
        "id": entry.id,
        "object": "model",
        "created": entry.created,
        "owned_by": services.owner,
        "context_window": entry.context,
        "reasoning": None if own is None else own.template.reasoning is not None,
        "vision": False,
        "tool_format": None if own is None else _tool_format(own.template),
        "model_type": entry.model_type,
        "size_bytes": entry.size_bytes,
        "state": about["state"],
    }
    if about["reason"] is not None:
        body["reason"] = about["reason"]
    return body


@router.get("/v1/models")
async def models(services: Annotated[Services, Depends(services_of)]) -> ModelList:
    """The models that can be asked, the served one or the default first."""
    return {"object": "list", "data": list(_all(services))}


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, services: Annotated[Services, Depends(services_of)]) -> ModelBody:
    """One model; ids may hold slashes."""
    known = list(_all(services))
    found = next((one for one in known if one["id"] == model_id), None)
    if found is None:
        served = " and ".join(filter(None, (", ".join(one["id"] for one in known[:-1]), known[-1]["id"])))
        verb = "is" if len(known) == 1 else "are"
        raise APIError(
            404, f"the model {show(model_id)} is not served; {served} {verb}", param="model", code="model_not_found"
        )
    return found
