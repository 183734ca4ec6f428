"""API keys by name: from flags and from a file of digests that is read again when it changes, and how many requests each has open."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnomon.config import HTTPConfig

logger = logging.getLogger(__name__)

PREFIX = "gn-"
KEY_BYTES = 32
FILE_LIMIT = 1 << 20
"""Bytes of a key file."""
GIVEN = "api-key-"
"""Keys of flags and variables are named by their place: api-key-1, api-key-2."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


class KeyFileError(ValueError):
    """A key file that can't be used; says which line."""


def digest_of(key: str) -> bytes:
    """SHA-256, 32 bytes.

    Enough for keys of 256 random bits, which no dictionary holds; a word that a person chose needs a longer key, not a slower hash.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key(name: str) -> tuple[str, str]:
    """A random key, and the line of a key file that lets it in. Raises ValueError for a name that a file can't hold."""
    _check_name(name)
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, f"{name}:sha256${digest_of(key).hex()}"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a key's name is 1 to 64 of A-Z a-z 0-9 . _ -, and begins with a letter or digit; got {name!r}"
        )
    if name.startswith(GIVEN):
        raise ValueError(f"names that begin with {GIVEN} are those of --api-key; got {name!r}")


def parse(text: str) -> dict[str, bytes]:
    """Digests by name, of lines `NAME:HEX` or `NAME:sha256$HEX`; empty lines and those that begin with # are left out.

    Raises KeyFileError naming the line, and never showing what stands after the colon: it may be a key that nobody hashed.
    """
    found: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, rest = line.partition(":")
        if not colon:
            raise KeyFileError(
                f"line {number} has no colon; a line is NAME:sha256$HEX, as `gnomon key new NAME` prints it"
            )
        try:
            _check_name(name)
        except ValueError as error:
            raise KeyFileError(f"line {number}: {error}") from None
        scheme, dollar, value = rest.rpartition("$")
        if dollar and scheme != "sha256":
            raise KeyFileError(f"line {number} ({name}) is hashed in a way other than sha256, which is not known here")
        if not _HEX.fullmatch(value):
            raise KeyFileError(f"line {number} ({name}) holds no SHA-256 digest of 64 hexadecimal digits")
        digest = bytes.fromhex(value)
        if name in found:
            raise KeyFileError(f"line {number}: {name} was named before")
        if digest in found.values():
            raise KeyFileError(f"line {number} ({name}) holds the same key as another line")
        found[name] = digest
    return found


def read(path: Path) -> dict[str, bytes]:
    """`parse` of a file. Raises KeyFileError when it can't be read, is too large, or when everybody may write it."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise KeyFileError(f"{path} is no regular file")
        if about.st_mode & stat.S_IWOTH:
            raise KeyFileError(f"{path} can be written by every user of this machine: chmod o-w")
        if about.st_size > FILE_LIMIT:
            raise KeyFileError(f"{path} has {about.st_size} bytes; the limit is {FILE_LIMIT}")
        text = path.read_text("utf-8")
    except OSError as error:
        raise KeyFileError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path} is not UTF-8") from error
    try:
        return parse(text)
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


@dataclass(slots=True)
class Use:
    """What one key has done since the start."""

    open: int = 0
    requests: int = 0
    refused: int = 0
    """For want of concurrency."""


@dataclass(slots=True)
class KeyRing:
    """The keys that are let in, by name.

    While `required`, a ring that has become empty lets nobody in. A file that turns bad leaves the keys that were read last in
    force; `error` says so until it is right again.
    """

    given: dict[str, bytes]
    path: Path | None = None
    limit: int | None = None
    """Requests that one key may have open."""
    error: str | None = None
    unknown: int = 0
    """Requests without a key, or with one that isn't known."""
    uses: dict[str, Use] = field(default_factory=dict[str, Use])
    _filed: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _seen: tuple[int, ...] | None = None

    @classmethod
    def of(cls, http: HTTPConfig) -> KeyRing:
        """The keys of a configuration. Raises KeyFileError when its file can't be used or holds no key."""
        ring = cls(named(http.api_keys), http.api_key_file, http.key_concurrency)
        if ring.path is not None:
            ring._seen = ring._stamp()
            ring._filed = read(ring.path)
            if not ring._filed:
                raise KeyFileError(f"{ring.path} holds no key; `gnomon key new NAME` makes one")
        return ring

    @property
    def required(self) -> bool:
        return bool(self.given) or self.path is not None

    @property
    def names(self) -> list[str]:
        return [*self.given, *self._filed]

    def name_of(self, key: str) -> str | None:
        """The name of a key that is known.

        Digests of equal length are compared, every one of them, so that the time tells nothing of any key.
        """
        digest, name = digest_of(key), None
        for other, known in (*self.given.items(), *self._filed.items()):
            if hmac.compare_digest(digest, known):
                name = other
        return name

    def refresh(self, *, force: bool = False) -> None:
        """Read the file again if it has changed, or in any case with `force`."""
        if self.path is None:
            return
        stamp = self._stamp()
        if stamp == self._seen and not force:
            return
        self._seen = stamp
        try:
            self._filed = read(self.path)
        except KeyFileError as error:
            self.error = str(error)
            logger.error("%s; the %d keys read before stay in force", error, len(self._filed))
        else:
            self.error = None
            logger.info("%d keys read from %s", len(self._filed), self.path)

    def _stamp(self) -> tuple[int, ...]:
        """What changes with a file. Empty: there is none."""
        if self.path is None:
            return ()
        try:
            about = self.path.stat()
        except OSError:
            return ()
        return about.st_mtime_ns, about.st_size, about.st_ino, about.st_ctime_ns

    def use(self, name: str) -> Use:
        return self.uses.setdefault(name, Use())

    def stats(self) -> dict[str, Any]:
        """For `/stats`: names and counts, never a key or a digest."""
        return {
            "required": self.required,
            "file": None if self.path is None else str(self.path),
            "error": self.error,
            "limit": self.limit,
            "unknown": self.unknown,
            "uses": {
                name: {"open": use.open, "requests": use.requests, "refused": use.refused}
                for name in self.names
                for use in (self.use(name),)
            },
        }


def named(keys: Iterable[str]) -> dict[str, bytes]:
    """Digests of keys given in the open, named by their place. The same key twice counts once."""
    return {f"{GIVEN}{number}": digest_of(key) for number, key in enumerate(dict.fromkeys(keys), 1)}
