"""The headers of safetensors files: what tensors there are and how large, without reading a weight."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

_LARGEST: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a safetensors file. `nbytes` is its size on disk."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Tensors by name. Raises ValueError for a file that isn't safetensors or is shorter than its header says, OSError if unreadable."""
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise ValueError(f"{path.name}: {len(head)} bytes are no safetensors file")
        (length,) = struct.unpack("<Q", head)
        if length > _LARGEST:
            raise ValueError(f"{path.name}: a header of {length} bytes is over the limit of {_LARGEST}")
        text = file.read(length)
        size = file.seek(0, 2)
    try:
        entries: Any = json.loads(text)
        tensors = {name: _tensor(entry) for name, entry in entries.items() if name != "__metadata__"}
        end = max(
            (int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"), default=0
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path.name}: the safetensors header can't be read: {error}") from error
    if size < 8 + length + end:
        raise ValueError(f"{path.name}: {size} bytes where its header needs {8 + length + end}")
    return tensors


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(end) - int(begin))


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is none."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def weight_files(directory: Path) -> list[Path]:
    """The weight files mlx-lm would load from a model directory, by name."""
    return sorted(directory.glob("model*.safetensors"))


def missing_files(directory: Path) -> list[str]:
    """What keeps a model directory from loading: config.json, weights, or shards its index names; empty when it is whole."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    index = read_json(directory / "model.safetensors.index.json")
    if index is not None:
        shards = {str(name) for name in cast("dict[str, Any]", index.get("weight_map") or {}).values()}
        return missing + sorted(name for name in shards if not (directory / name).is_file())
    if not any(path.is_file() for path in weight_files(directory)):
        missing.append("model.safetensors")
    return missing
