"""Documents that a request names by URL, put as text into its body before anything else reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from gnomon.fetch import Document, Fetcher, FetchError
from gnomon.serve.body import parse_object
from gnomon.serve.errors import invalid, show
from gnomon.serve.services import Services, Vocabulary
from gnomon.serve.wire.messages import document_url

MOST = 16
"""Documents of one request."""
BREAK = "\u200b"
"""Put into what would be read as one of the model's own tokens: a page must not end the turn that it is quoted in."""


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a message that names a document."""

    path: str
    url: str
    part: dict[str, Any]


async def with_documents(body: bytes, services: Services) -> bytes:
    """The body with the text of every document by URL in its place; as it is where nothing is fetched.

    Raises APIError 400 naming the part whose document can't be had.
    """
    fetcher = services.fetcher
    if fetcher is None:
        return body
    fields, places = await services.preparation.run(lambda: _look(body))
    if not places:
        return body
    if len(places) > MOST:
        raise invalid(
            f"{places[MOST].path} is one of {len(places)} documents by URL; the limit is {MOST}", places[MOST].path
        )
    documents = await _all(fetcher, places)

    def put() -> bytes:
        for place in places:
            document = documents[place.url]
            text = quoted(document, place.part, services.vocabulary)
            kind = "input_text" if place.part["type"] == "input_file" else "text"
            place.part.clear()
            place.part.update({"type": kind, "text": text})
        return json.dumps(fields, ensure_ascii=False).encode()

    return await services.preparation.run(put)


def _look(body: bytes) -> tuple[dict[str, Any], list[Place]]:
    fields = parse_object(body)
    return fields, [place for name in ("system", "messages", "input") for place in _places(fields.get(name), name)]


def _places(value: Any, path: str) -> Iterator[Place]:
    """Of a list of messages or parts, and of what these hold: messages their content, results of tools theirs."""
    if not isinstance(value, list):
        return
    for index, one in enumerate(cast("list[Any]", value)):
        where = f"{path}[{index}]"
        url = document_url(one)
        if url is not None:
            yield Place(where, url, one)
        elif isinstance(one, dict):
            held = cast("dict[str, Any]", one)
            for name in ("content", "output"):
                yield from _places(held.get(name), f"{where}.{name}")


async def _all(fetcher: Fetcher, places: list[Place]) -> dict[str, Document]:
    """The documents by URL, each fetched once; the first that fails ends the others."""
    first = {place.url: place.path for place in reversed(places)}

    async def one(url: str, path: str) -> Document:
        try:
            return await fetcher.fetch(url)
        except FetchError as error:
            raise invalid(f"{path}: the document {show(url)} {error}", path, "document_unavailable") from None

    tasks = [asyncio.ensure_future(one(url, path)) for url, path in first.items()]
    try:
        return dict(zip(first, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def quoted(document: Document, part: dict[str, Any], vocabulary: Vocabulary) -> str:
    """A document as prompts of Anthropic's have it, with what the part says of it, and none of the model's own tokens in it."""
    said = "".join(
        f"<{name}>{text}</{name}>\n"
        for name in ("title", "context")
        if isinstance(text := part.get(name), str) and text
    )
    text = plain(document.text, vocabulary)
    asked = document_url(part)
    return f"<document>\n<source>{asked}</source>\n{said}<document_content>\n{text}\n</document_content>\n</document>\n"


def plain(text: str, vocabulary: Vocabulary) -> str:
    """The text with every spelling of a special token broken after its first character."""
    runs = vocabulary.split(text)
    if all(isinstance(run, str) for run in runs):
        return text
    made: list[str] = []
    for run in runs:
        if isinstance(run, str):
            made.append(run)
        else:
            piece = vocabulary.decode([run], hide=False)
            made.append(piece[:1] + BREAK + piece[1:])
    return "".join(made)
