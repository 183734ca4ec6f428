"""The OpenAPI document: request bodies are parsed by the routes themselves, off the event loop, so their schemas are added by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model` as its JSON body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Let `app.openapi` include the schemas of `bodies`, the models that routes name with `json_body`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
            for model in bodies:
                schema = model.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi
