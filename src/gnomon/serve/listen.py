"""The address: bound before a model is loaded, and before the web framework, which takes a while to import."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any, cast

from gnomon.config import HTTPConfig
from gnomon.serve.keys import KeyFileError, KeyRing

PROBE_SECONDS = 1.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def is_loopback(host: str) -> bool:
    """Whether binding `host` is reachable from this machine only. Names other than localhost count as reachable from elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class StartupError(Exception):
    """The server can't start where it was told to."""


def bind(config: HTTPConfig) -> socket.socket:
    """The bound socket, not yet listening, so that it can be had before a model is loaded.

    Raises StartupError when the address is reachable from elsewhere and no key protects it, when something already answers there,
    when the file of keys can't be used, or when it can't be bound.
    """
    try:
        keys = KeyRing.of(config)
    except KeyFileError as error:
        raise StartupError(f"--api-key-file: {error}") from error
    if config.unix is not None:
        return _bind_unix(config.unix)
    host = config.host.strip("[]")
    if not is_loopback(host) and not keys.required:
        raise StartupError(
            f"--host {config.host} is reachable from other machines: "
            "set --api-key (or GNOMON_API_KEY) or --api-key-file, or bind 127.0.0.1"
        )
    if config.port:
        there = answering(WILDCARDS.get(host, host), config.port)
        if there is not None:
            raise StartupError(f"port {config.port} is taken: {there}; stop it or choose another --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"can't listen on {config.host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise StartupError(f"can't listen on {config.host} port {config.port}: {error}") from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartupError(f"--unix {path} exists and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_SECONDS)
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
            else:
                raise StartupError(f"--unix {path} is taken: something listens there")
    bound = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise StartupError(f"can't listen on --unix {path}: {error}") from error
    finally:
        os.umask(before)
    return bound


def answering(host: str, port: int) -> str | None:
    """What answers `GET /v1` at an address, in words; None if nothing does."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/v1")
        response = connection.getresponse()
        status, body = response.status, response.read(65_536)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    with contextlib.suppress(ValueError):
        about: Any = json.loads(body)
        if isinstance(about, dict) and "name" in about:
            about = cast("dict[str, Any]", about)
            return f"{about['name']} {about.get('version', '')} already serves {about.get('model')} there"
    return f"something there answers /v1 with status {status}"


def address_of(bound: socket.socket) -> str:
    """Where clients find it: `http://127.0.0.1:8080`, or `unix:PATH`."""
    name: Any = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[0], name[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
