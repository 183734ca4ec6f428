"""Which requests are the same: equal in everything that bears on the answer."""

from __future__ import annotations

import hashlib
from array import array

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
