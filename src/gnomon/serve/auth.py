"""Who may come in: the Host and Origin of browsers, then the key. Each door is a small ASGI layer that answers a refusal itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gnomon.serve import sessions
from gnomon.serve.errors import APIError, show, too_many
from gnomon.serve.keys import KeyRing

OPEN_PATHS = frozenset({"/health", "/", "/status"})
"""Answered without a key: supervisors need none, and the pages ask for one themselves."""
OPEN_PREFIX = "/web/"
"""Of the pages' own files."""


def host_name(header: str) -> str:
    """The host of a Host header, lower case, without port, brackets or final dot: `[::1]:8080` → `::1`."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0].rstrip(".") if header.count(":") == 1 else header.rstrip(".")


class HostDoor:
    """Lets through requests whose Host is an address, localhost, the bound name, or an allowed one; 403 otherwise.

    A page that reaches this server by rebinding its own name in DNS sends that name, and never an address.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self.app = app
        self.names = frozenset(host_name(name) for name in names)

    def allows(self, header: str) -> bool:
        name = host_name(header)
        if "*" in self.names or name in self.names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = Headers(scope=scope).get("host", "")
            if not self.allows(header):
                refusal = APIError(
                    403,
                    f"Host {show(header)} is not served here; start the server with --allowed-host {host_name(header)} to allow it"
                    if header.strip()
                    else "a Host header is required, and it has to name this server",
                    param="Host",
                    code="host_not_allowed",
                )
                await refusal.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


class OriginDoor:
    """Lets through requests without an Origin (no browser), of the same origin, or of an allowed one; 403 otherwise."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self.app = app
        self.origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def allows(self, origin: str, host: str) -> bool:
        origin = origin.strip().lower()
        if "*" in self.origins or origin in self.origins:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and bool(host) and parts.netloc == host.strip().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self.allows(origin, headers.get("host", "")):
                refusal = APIError(
                    403,
                    f"Origin {show(origin)} is not allowed; start the server with --allowed-origin {origin} to allow it",
                    param="Origin",
                    code="origin_not_allowed",
                )
                await refusal.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


class KeyDoor:
    """Lets through requests that carry one of the keys, as `Authorization: Bearer` or `x-api-key`; 401 otherwise.

    A POST takes one of the key's places until its response has ended; 429 when it has none left. `scope["state"]` gets `key_name`.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.keys.required or _is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        self.keys.refresh()
        key = sent_key(Headers(scope=scope))
        name = None if key is None else self.keys.name_of(key)
        if name is None:
            self.keys.unknown += 1
            wrong = "no API key was sent" if key is None else "the API key is not one of this server's"
            refusal = APIError(
                401,
                f"{wrong}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal.response(scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["key_name"] = name
        sessions.key_name.set(name)
        use, limit = self.keys.use(name), self.keys.limit
        use.requests += 1
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if limit is not None and use.open >= limit:
            use.refused += 1
            refusal = too_many(
                f"key {name} has {use.open} requests under way; the limit is {limit} (--key-concurrency)",
                1,
                "key_concurrency",
            )
            await refusal.response(scope["path"])(scope, receive, send)
            return
        use.open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            use.open -= 1


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def sent_key(headers: Headers) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")
