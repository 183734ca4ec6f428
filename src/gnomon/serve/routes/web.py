"""GET /, /status and /web/{file}: the pages people open in a browser."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from gnomon.serve.errors import APIError, show

router = APIRouter(include_in_schema=False)

HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the pages."""

    content: bytes
    media_type: str
    tag: str

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _assets() -> Mapping[str, Asset]:
    found: dict[str, Asset] = {}
    for file in files("gnomon.serve").joinpath("web").iterdir():
        content = file.read_bytes()
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        found[file.name] = Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


ASSETS = _assets()


@router.api_route("/", methods=["GET", "HEAD"])
async def chat(request: Request) -> Response:
    """The chat page."""
    return ASSETS["chat.html"].response(request)


@router.api_route("/status", methods=["GET", "HEAD"])
async def status(request: Request) -> Response:
    """The status page."""
    return ASSETS["status.html"].response(request)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def asset(name: str, request: Request) -> Response:
    """A file of the pages. Only those of the package are known, by name."""
    if name not in ASSETS:
        raise APIError(404, f"there is no file {show(name)} here", code="not_found")
    return ASSETS[name].response(request)
