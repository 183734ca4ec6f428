"""Which requests are the same: equal in everything that bears on the answer."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

from gnomon.engine.api import Request

VERSION = 1
"""Raised when rows draw other tokens than before for the same request."""


def request_key(request: Request, identity: str) -> str:
    """The name of a request's answer, 64 hexadecimal digits. `identity` says what its tokens depend on beside the request.

    A prompt that was made of text counts by its text: the ids behind it depend on which answers the server remembers.
    """
    thinking = request.thinking
    how = (
        VERSION,
        identity,
        request.namespace,
        request.sampling,
        request.max_tokens,
        request.stop,
        request.ignore_eos,
        request.n,
        request.constraint,
        None
        if thinking is None
        else (thinking.format.name, thinking.format.markers, thinking.generation_prompt, thinking.may_open),
    )
    named = hashlib.sha256(repr(how).encode(errors="surrogatepass"))
    if request.text is not None:
        named.update(b"\0text\0" + request.text.encode(errors="surrogatepass"))
    else:
        named.update(b"\0ids\0" + array("q", request.prompt).tobytes())
    return named.hexdigest()


def files_of(path: Path) -> str:
    """Names, sizes and times of a model's files: another model at the same path is told from this one."""
    found: list[tuple[str, int, int]] = []
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file():
                about = file.stat()
                found.append((file.name, about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(found).encode(errors="surrogatepass")).hexdigest()
