"""The files: a block or a checkpoint each, in safetensors' format, with what it is and the sums of its bytes in the header."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from gnomon.state.keys import chain

FORMAT = "gnomon-prefix-1"
"""Part of every name and header: files of another format are never taken for one's own."""
SUFFIX = ".safetensors"
MAX_HEADER = 64 << 20
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of a number, by safetensors' name of its type."""

EntryKind = Literal["block", "checkpoint"]


class BadFile(ValueError):
    """A file that is cut short, altered, or not what its name says."""


@dataclass(frozen=True)
class Entry:
    """What a file is of.

    `tokens` are those from `start` on: a block's own, or those up to a checkpoint's position. `parent` is the key of the block
    before them, which stands for all tokens before and for the namespace. `layers` are the numbers of the layers, of `count`, whose
    state is in the file. `identity` and `namespace` are hex digests.
    """

    identity: str
    namespace: str
    kind: EntryKind
    parent: bytes
    start: int
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    count: int

    @cached_property
    def name(self) -> str:
        """The file's name without its ending: a hash over all that the content depends on."""
        about = [FORMAT, self.identity, self.kind, self.parent.hex(), self.start, self.tokens, self.layers, self.count]
        return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()

    @cached_property
    def key(self) -> bytes:
        """The key that blocks after these tokens name as their parent."""
        return chain(self.parent, self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as bytes. `dtype` is safetensors' name of the type."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's state, as `LayerSnapshot` with bytes for arrays."""

    kind: str
    numbers: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Packed:
    """An entry with its content: as many layers as it names, in that order."""

    entry: Entry
    layers: Sequence[Layer]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(tensor.data) for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, layer in zip(self.entry.layers, self.layers, strict=True):
            for name, tensor in layer.tensors.items():
                yield f"{number}.{name}", tensor


def encode(packed: Packed) -> Iterator[bytes | memoryview]:
    """A file's content, piece by piece: the header first."""
    entry, table, end, crc = packed.entry, dict[str, Any](), 0, 0
    hashes: dict[str, str] = {}
    for name, tensor in packed.tensors():
        table[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(tensor.data)],
        }
        end += len(tensor.data)
        crc = zlib.crc32(tensor.data, crc)
        hashes[name] = hashlib.blake2b(tensor.data, digest_size=16).hexdigest()
    about = {
        "identity": entry.identity,
        "namespace": entry.namespace,
        "kind": entry.kind,
        "parent": entry.parent.hex(),
        "start": entry.start,
        "tokens": entry.tokens,
        "count": entry.count,
        "layers": [
            {"layer": number, "kind": layer.kind, "numbers": dict(layer.numbers), "arrays": list(layer.tensors)}
            for number, layer in zip(entry.layers, packed.layers, strict=True)
        ],
        "crc32": crc,
        "hashes": hashes,
    }
    text = json.dumps(about, separators=(",", ":"))
    header = {"__metadata__": {"format": FORMAT, "entry": text, "digest": _digest(text, table)}, **table}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    yield len(data).to_bytes(8, "little") + data
    for _, tensor in packed.tensors():
        yield tensor.data


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, checked against its own digest and its size."""

    entry: Entry
    layers: Sequence[Mapping[str, Any]]
    table: Mapping[str, Mapping[str, Any]]
    crc32: int
    hashes: Mapping[str, str]
    size: int
    begin: int


def read_header(path: Path) -> Header:
    """Read a file's header. Raises `BadFile` for anything but a whole file of this format under its own name, and OSError."""
    with path.open("rb") as stream:
        size = path.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER):
            raise BadFile(f"{path} is cut short: no header fits into its {size} bytes")
        data = stream.read(length)
    return _header(path, data, size)


def _header(path: Path, data: bytes | memoryview, size: int) -> Header:
    try:
        header = json.loads(bytes(data))
        meta = header.pop("__metadata__")
        if meta["format"] != FORMAT:
            raise BadFile(f"{path} is of the format {meta['format']!r}, not {FORMAT}")
        if meta["digest"] != _digest(meta["entry"], header):
            raise BadFile(f"{path} is damaged: its header doesn't have its own digest")
        about = json.loads(meta["entry"])
        layers = cast("list[dict[str, Any]]", about["layers"])
        entry = Entry(
            about["identity"],
            about["namespace"],
            about["kind"],
            bytes.fromhex(about["parent"]),
            about["start"],
            tuple(about["tokens"]),
            tuple(layer["layer"] for layer in layers),
            about["count"],
        )
        end = max((one["data_offsets"][1] for one in header.values()), default=0)
        found = Header(entry, layers, header, about["crc32"], about["hashes"], size, 8 + len(data))
    except BadFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"{path} is damaged: its header can't be read ({error})") from error
    if size != found.begin + end:
        raise BadFile(f"{path} is cut short or damaged: it has {size} bytes, its header says {found.begin + end}")
    if path.name != entry.name + SUFFIX or path.parent.name != entry.identity:
        raise BadFile(f"{path} holds something else than its name says")
    return found


def read(path: Path, *, verify: bool = False) -> Packed:
    """Read a whole file. Its bytes always have to give the stored CRC-32; with `verify` every tensor its stored BLAKE2b hash too.

    Raises `BadFile` and OSError.
    """
    data = memoryview(path.read_bytes())
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER):
        raise BadFile(f"{path} is cut short: no header fits into its {size} bytes")
    header = _header(path, data[8 : 8 + length], size)
    body = data[header.begin :]
    if zlib.crc32(body) != header.crc32:
        raise BadFile(f"{path} is damaged: its bytes don't give the sum they were stored with")
    layers: list[Layer] = []
    try:
        for layer in header.layers:
            tensors: dict[str, Tensor] = {}
            for name in layer["arrays"]:
                full = f"{layer['layer']}.{name}"
                tensors[name] = _tensor(path, full, header.table[full], body)
                if verify and hashlib.blake2b(tensors[name].data, digest_size=16).hexdigest() != header.hashes[full]:
                    raise BadFile(f"{path} is damaged: {full} doesn't have the hash it was stored with")
            layers.append(Layer(layer["kind"], layer["numbers"], tensors))
    except (KeyError, TypeError) as error:
        raise BadFile(f"{path} is damaged: its header lacks {error}") from error
    return Packed(header.entry, layers)


def _tensor(path: Path, name: str, about: Mapping[str, Any], body: memoryview) -> Tensor:
    start, end = about["data_offsets"]
    shape = tuple(about["shape"])
    if about["dtype"] not in ITEM_BYTES or end - start != math.prod(shape) * ITEM_BYTES[about["dtype"]]:
        raise BadFile(f"{path} is damaged: {name} of {about['dtype']} {shape} doesn't fit {end - start} bytes")
    return Tensor(about["dtype"], shape, body[start:end])


def _digest(text: str, table: Mapping[str, Any]) -> str:
    return hashlib.blake2b((text + json.dumps(table, sort_keys=True)).encode(), digest_size=16).hexdigest()
