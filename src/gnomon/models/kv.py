"""What a scheme of keys and values means for one model: the bits of each layer, and the bytes they take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from gnomon.config.kv import KvScheme

KV_CONFIG: Final = "kv_config.json"
LAYER_BITS: Final = (2, 3, 4, 5, 6, 8)
LAYER_GROUPS: Final = (32, 64, 128)
TURBO_GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class LayerBits:
    """Codes of `bits` with a scale and a bias per `group` elements."""

    bits: int
    group: int = 64


def read_kv_config(directory: Path) -> dict[int, LayerBits]:
    """What a model's kv_config.json says, by number of the cache. Layers it doesn't name, or gives 0 bits, stay plain.

    The format is mlx-optiq's: a list of `{"layer_idx", "bits", "group_size"}`. Raises ValueError naming the file and what is wrong.
    """
    file = directory / KV_CONFIG
    try:
        entries = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"--kv-quant config needs {file}, which is not there: gnomon kv-config writes one") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{file} holds no JSON list")
    found: dict[int, LayerBits] = {}
    for place, entry in enumerate(cast("list[Any]", entries)):
        where = f"{file}: entry {place}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is no object")
        said = cast("dict[str, Any]", entry)
        index, bits, group = said.get("layer_idx"), said.get("bits"), said.get("group_size", 64)
        if not isinstance(index, int) or index < 0 or index in found:
            raise ValueError(f"{where} has layer_idx {index!r}, but must have a number that no other entry has")
        if bits == 0:
            continue
        if bits not in LAYER_BITS or group not in LAYER_GROUPS:
            raise ValueError(
                f"{where} asks for {bits!r} bits in groups of {group!r}, but bits go from {LAYER_BITS} and groups from {LAYER_GROUPS}"
            )
        found[index] = LayerBits(bits, group)
    return found


def element_bytes(
    scheme: KvScheme | None, index: int, is_full: bool, element: int, layers: Mapping[int, LayerBits] | None = None
) -> float:
    """Bytes of one element of keys and values (their mean) in layer `index`, which takes `element` bytes plain."""
    if scheme is None or scheme.mode == "off":
        return element
    if scheme.mode == "turbo":
        # A scale and a zero per group of keys, a scale per group of values, two bytes each.
        return (scheme.key_bits + scheme.value_bits) / 16 + 3 / TURBO_GROUP if is_full else element
    bits = LayerBits(scheme.bits, scheme.group) if scheme.mode == "affine" and is_full else None
    if scheme.mode == "config":
        bits = (layers or {}).get(index)
    return bits.bits / 8 + 2 * element / bits.group if bits is not None else element
