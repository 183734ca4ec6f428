"""The OpenAPI document: request bodies are parsed by the routes themselves, off the event loop, so their schemas are added by hand;
so are the refusals that any route can answer with, and the events of answers that are streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

from gnomon.serve.errors import ANTHROPIC_PATHS
from gnomon.serve.wire.errors import AnthropicErrorBody, ErrorBody

_REF = "#/components/schemas/{model}"
EVENTS = "text/event-stream"
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}


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
            # The framework's own refusals, which none of the routes makes.
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for model in bodies:
                added = _named(model)
                for schema in added.values():
                    _nullable(schema)
                schemas.update(added)
            for model in (ErrorBody, AnthropicErrorBody):
                schemas.update(_named(model))
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _complete(path, operation, schemas)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _named(model: type[Any]) -> dict[str, Any]:
    """The schemas of a model and of those it is made of, by name."""
    schema = TypeAdapter(model).json_schema(ref_template=_REF)
    return {**schema.pop("$defs", {}), model.__name__: schema}


def _nullable(schema: dict[str, Any]) -> None:
    """Let null stand for an optional field that is absent, as bodies are read."""
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and field.keys() & {"type", "anyOf", "enum", "$ref", "const"}:
            options = field.get("anyOf", [field])
            if not any(option.get("type") == "null" for option in options):
                schema["properties"][name] = {"anyOf": [*options, {"type": "null"}]}


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Add what every route of the API has in common to the responses of one."""
    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)
    error = AnthropicErrorBody if path.startswith(ANTHROPIC_PATHS) else ErrorBody
    refused = {"schema": {"$ref": _REF.format(model=error.__name__)}}
    responses["default"] = {"description": "A refusal or a failure", "content": {"application/json": refused}}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    taken = schemas.get(body.get("$ref", "").rpartition("/")[2], {})
    if "stream" in taken.get("properties", {}):
        responses["200"]["content"][EVENTS] = {"schema": _EVENT}
