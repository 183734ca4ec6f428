"""Text documents by URL: what is asked for, how far redirects lead, and how much is read."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final

import httpcore2
import httpx2

from gnomon.fetch.addresses import own_networks
from gnomon.fetch.pinned import NotPublic, PinnedBackend, Resolve, resolve

KINDS: Final = ("text/plain", "text/markdown", "text/html", "application/json")
"""Content types that are text as they stand."""
CHARSETS: Final = ("utf-8", "us-ascii", "iso-8859-1", "windows-1252")
"""What Python knows as an encoding may also unpack or run away; these read a byte as a character or nearly."""
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
MOST_CHARACTERS: Final = 2048
"""Of a URL."""
AT_ONCE: Final = 8
"""Documents fetched at the same time; others wait, within their time."""
CONNECT_SECONDS: Final = 5.0
"""For one of a host's addresses."""


class FetchError(Exception):
    """A document that can't be had; the message goes on after its name and says nothing of networks within."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of a document, seconds that it may take in all, and redirects followed."""

    size: int = 4 << 20
    seconds: float = 10.0
    redirects: int = 3


@dataclass(frozen=True, slots=True)
class Document:
    url: str
    kind: str
    """Its content type."""
    text: str
    size: int
    """In bytes."""


class Fetcher:
    """Reads text documents from public addresses: http and https, ports 80 and 443, no credentials, no proxy, no compression.

    `anywhere` lets it reach private addresses and any port. Every redirect is checked like the first URL, and none leads from https
    to http. Everything runs on the event loop.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        anywhere: bool = False,
        resolve: Resolve = resolve,
        network: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.anywhere = anywhere
        self._resolve = resolve
        self._network = network
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tls = httpx2.create_ssl_context(trust_env=False)
        self.fetched = self.failed = self.bytes = 0

    async def fetch(self, url: str) -> Document:
        """Raises FetchError."""
        try:
            async with asyncio.timeout(self.limits.seconds), self._slots:
                document = await self._follow(url)
        except TimeoutError:
            self.failed += 1
            raise FetchError(f"was not there within {self.limits.seconds:g} s") from None
        except FetchError:
            self.failed += 1
            raise
        self.fetched += 1
        self.bytes += document.size
        return document

    def stats(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "anywhere": self.anywhere,
            "max_bytes": self.limits.size,
            "timeout_seconds": self.limits.seconds,
            "fetched": self.fetched,
            "failed": self.failed,
            "bytes": self.bytes,
        }

    def checked(self, url: str) -> httpx2.URL:
        """The URL, read once: its parts are what is asked for. Raises FetchError."""
        if len(url) > MOST_CHARACTERS:
            raise FetchError(f"has {len(url)} characters; the limit is {MOST_CHARACTERS}")
        # Others read a backslash as a slash, and drop line breaks: two readings, one of which was checked.
        if "\\" in url or any(ord(one) <= 0x20 or ord(one) == 0x7F for one in url):
            raise FetchError("is no URL: it has a backslash, a blank or a control character")
        try:
            parts = httpx2.URL(url)
        except (httpx2.InvalidURL, ValueError):
            raise FetchError("is no URL that can be read") from None
        if parts.scheme not in ("http", "https"):
            raise FetchError("is neither http nor https")
        if parts.userinfo or "@" in parts.netloc.decode():
            raise FetchError("has credentials, which are not sent")
        if not parts.host or "%" in parts.host:
            raise FetchError("names no host")
        if not self.anywhere and parts.port not in (None, 80, 443):
            raise FetchError(f"has port {parts.port}; only 80 and 443 are allowed")
        return parts

    async def _follow(self, url: str) -> Document:
        at = self.checked(url)
        backend = PinnedBackend(own_networks(), anywhere=self.anywhere, resolve=self._resolve, network=self._network)
        for _ in range(self.limits.redirects + 1):
            try:
                async with httpcore2.AsyncConnectionPool(ssl_context=self._tls, network_backend=backend) as pool:
                    answer = await self._ask(pool, at)
            except NotPublic:
                raise FetchError(f"has a host without public address: {at.host}") from None
            except (
                httpcore2.NetworkError,
                httpcore2.ProtocolError,
                httpcore2.TimeoutException,
                httpcore2.UnsupportedProtocol,
            ) as error:
                raise FetchError(f"could not be had from {at.host}: {type(error).__name__}") from error
            if isinstance(answer, Document):
                return answer
            try:
                onward = self.checked(str(at.join(answer)))
            except (httpx2.InvalidURL, ValueError):
                raise FetchError("leads to what is no URL") from None
            except FetchError as error:
                raise FetchError(f"leads to a URL that {error}") from None
            if at.scheme == "https" and onward.scheme == "http":
                raise FetchError("leads from https to http")
            at = onward
        raise FetchError(f"leads on more than {self.limits.redirects} times")

    async def _ask(self, pool: httpcore2.AsyncConnectionPool, at: httpx2.URL) -> Document | str:
        """The document, or where it is said to be."""
        default = 443 if at.scheme == "https" else 80
        asked = httpcore2.URL(scheme=at.raw_scheme, host=at.raw_host, port=at.port or default, target=at.raw_path)
        headers: list[tuple[bytes | str, bytes | str]] = [
            ("host", at.netloc),
            ("user-agent", "gnomon"),
            ("accept", ", ".join(KINDS)),
            ("accept-encoding", "identity"),
            ("connection", "close"),
        ]
        wait = {"connect": CONNECT_SECONDS}
        async with pool.stream("GET", asked, headers=headers, extensions={"timeout": wait}) as response:
            fields = _fields(response)
            if response.status in REDIRECTS:
                if "location" not in fields:
                    raise FetchError(f"was answered {response.status} without a location")
                return fields["location"]
            if response.status != 200:
                raise FetchError(f"was answered {response.status}")
            if (coding := fields.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
                raise FetchError(f"came with content-encoding {coding[:40]}, which was not asked for")
            kind, charset = _content_type(fields.get("content-type", ""))
            declared = fields.get("content-length", "")
            if declared.isdecimal() and (len(declared) > 18 or int(declared) > self.limits.size):
                raise FetchError(f"has {declared[:20]} bytes; the limit is {self.limits.size}")
            body = bytearray()
            async for part in response.aiter_stream():
                body += part
                if len(body) > self.limits.size:
                    raise FetchError(f"has {len(body)} bytes and more; the limit is {self.limits.size}")
        try:
            return Document(str(at), kind, body.decode(charset), len(body))
        except UnicodeDecodeError as error:
            raise FetchError(f"is no {charset.removesuffix('-sig')} at byte {error.start}") from None


def _fields(response: httpcore2.Response) -> Mapping[str, str]:
    """Headers by lower-case name; of those that come twice the first."""
    fields: dict[str, str] = {}
    for name, value in response.headers:
        fields.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return fields


def _content_type(header: str) -> tuple[str, str]:
    """Content type and charset. Raises FetchError where it is none that is text."""
    message = Message()
    message["content-type"] = header
    kind = message.get_content_type() if header.strip() else ""
    if kind not in KINDS:
        named = header.partition(";")[0].strip()[:80] or "no content type"
        raise FetchError(f"is {named}; what can be read is {', '.join(KINDS)}")
    charset = message.get_content_charset("utf-8")
    # As the web reads it (WHATWG Encoding), UTF-8 with or without a mark at its beginning.
    if charset in ("utf-8", "utf8"):
        return kind, "utf-8-sig"
    try:
        known = codecs.lookup(charset).name in {codecs.lookup(one).name for one in CHARSETS}
    except (LookupError, ValueError):
        known = False
    if not known:
        raise FetchError(f"is in charset {charset[:40]!r}; what can be read is {', '.join(CHARSETS)}")
    return kind, charset
