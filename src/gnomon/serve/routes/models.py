"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from gnomon.serve.errors import APIError, show
from gnomon.serve.services import Services, services_of
from gnomon.serve.wire.models import ModelBody, ModelList

router = APIRouter()


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
        "model_type": model.model_type,
        "size_bytes": model.weight_bytes,
    }


@router.get("/v1/models")
async def models(services: Annotated[Services, Depends(services_of)]) -> ModelList:
    """The models that can be asked, the served one first."""
    return {"object": "list", "data": [_served(services)]}


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, services: Annotated[Services, Depends(services_of)]) -> ModelBody:
    """One model; ids may hold slashes."""
    served = _served(services)
    if model_id != served["id"]:
        raise APIError(
            404, f"the model {show(model_id)} is not served; {served['id']} is", param="model", code="model_not_found"
        )
    return served
