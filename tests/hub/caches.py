"""Model caches made by hand, in the hub client's layout and Gnomon's own."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any


def safetensors(nbytes: int, seed: str = "") -> bytes:
    """A file with one u8 tensor of so many bytes, whose content depends on `seed`."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    return (
        struct.pack("<Q", len(header)) + header + (hashlib.sha256(seed.encode()).digest() * (nbytes // 32 + 1))[:nbytes]
    )


def config(model_type: str = "llama", **more: Any) -> bytes:
    return json.dumps({"model_type": model_type, **more}).encode()


def hub_revision(hub: Path, repo: str, commit: str, files: dict[str, bytes], refs: tuple[str, ...] = ()) -> Path:
    """Lay out one snapshot as huggingface_hub does: blobs by hash, links by name, refs by commit."""
    folder = hub / ("models--" + repo.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        path = folder / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def converted(cache: Path, name: str, format: object = 1, id: str | None = None, nbytes: int = 64) -> Path:
    """A model directory of Gnomon's own."""
    path = cache / "models" / name
    path.mkdir(parents=True)
    (path / "config.json").write_bytes(config())
    (path / "model.safetensors").write_bytes(safetensors(nbytes, name))
    (path / "gnomon.json").write_text(json.dumps({"format": format, "id": id or name}))
    return path


def tree(*roots: Path) -> dict[str, bytes | str]:
    """Everything under some directories, to compare before and after: content of files, targets of links."""
    found: dict[str, bytes | str] = {}
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.is_symlink():
                found[str(path)] = os.readlink(path)
            elif path.is_file() and path.suffix != ".lock":
                found[str(path)] = path.read_bytes()
    return found
