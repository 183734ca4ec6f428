"""What a model's files contain, in one short digest, so that another model at the same path is another model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

log = logging.getLogger(__name__)

CHUNK = 16 << 20
THREADS = 4
PARTS = (
    "*.safetensors",
    "config.json",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges*",
    "special_tokens*",
    "added_tokens*",
)
"""Files of a model directory that a forward or its tokens may depend on."""
MEMORY = "fingerprints.json"


def fingerprint(model: Path, memory: Path | None = None) -> str:
    """A digest of the content of all files in a model directory that matter, and of their names.

    Files are read whole. `memory` is a directory in which the digests of files are remembered by device, inode, size and both times of
    change, which together don't stay the same when a file is written to. Raises OSError, and ValueError where there are no files.
    """
    files = sorted({file for part in PARTS for file in model.glob(part) if file.is_file()})
    if not files:
        raise ValueError(f"{model} has no files to tell the model by")
    known = _remembered(memory)
    said = {file.name: known.get(_stamp(file)) or _hash(file) for file in files}
    _remember(memory, {_stamp(file): said[file.name] for file in files}, known)
    return hashlib.blake2b(json.dumps(sorted(said.items())).encode(), digest_size=16).hexdigest()


def _hash(file: Path) -> str:
    """A hash over the hashes of a file's chunks."""
    size = file.stat().st_size

    def one(start: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(start)
            return hashlib.blake2b(stream.read(CHUNK), digest_size=16).digest()

    with ThreadPoolExecutor(THREADS) as pool:
        digests = b"".join(pool.map(one, range(0, size, CHUNK)))
    return hashlib.blake2b(size.to_bytes(8, "little") + digests, digest_size=16).hexdigest()


def _stamp(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _remembered(memory: Path | None) -> Mapping[str, str]:
    if memory is None:
        return {}
    try:
        said: Any = json.loads((memory / MEMORY).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {stamp: digest for stamp, digest in cast("dict[str, Any]", said).items() if isinstance(digest, str)}


def _remember(memory: Path | None, now: Mapping[str, str], known: Mapping[str, str]) -> None:
    if memory is None or all(known.get(stamp) == digest for stamp, digest in now.items()):
        return
    temporary = memory / f".{MEMORY}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps({**dict(list(known.items())[-1000:]), **now}), "utf-8")
        temporary.replace(memory / MEMORY)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        log.warning("the digests of the model's files can't be remembered in %s: %s", memory, error)


def digest(parts: Iterable[str]) -> str:
    """One name for several."""
    return hashlib.blake2b(json.dumps(list(parts)).encode(), digest_size=16).hexdigest()
