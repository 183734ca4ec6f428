"""What a model directory holds, read from the headers of its shards: tensors, roles, shapes, bits and bytes. Loads no weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

Role = Literal["embedding", "head", "attention", "recurrent", "mlp", "expert", "router", "norm", "other"]

MAX_HEADER = 100 << 20
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("norm", re.compile(r"norm|\bln_|layernorm", re.I)),
    ("embedding", re.compile(r"embed_tokens|\bwte\b|word_embeddings|tok_embeddings|\bembeddings?\b")),
    ("head", re.compile(r"lm_head|\boutput\b$")),
    ("recurrent", re.compile(r"linear_attn|mamba|mixer|\bssm|conv1d|\brglru|recurrent|time_mix")),
    ("router", re.compile(r"router|\bmlp\.gate$|block_sparse_moe\.gate$|\bffn\.gate$")),
    ("expert", re.compile(r"(?<!shared_)experts\b|switch_mlp|block_sparse_moe")),
    ("attention", re.compile(r"attn|attention|[qkvo]_proj|qkv")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|gate_proj|up_proj|down_proj|shared_experts?")),
)
_LAYER = re.compile(r"\blayers?\.(\d+)\.|\bblocks?\.(\d+)\.|\bh\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as a shard's header describes it; `size` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    file: str


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model: a tensor, or packed weights together with their scales and biases.

    `shape` is the logical shape, `bits` those of a stored element without scales, `size` everything in bytes. `group` is 0 if the weight
    isn't quantised.
    """

    name: str
    role: Role
    layer: int | None
    shape: tuple[int, ...]
    bits: int
    group: int
    dtype: str
    size: int

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) >= 2 and self.role != "norm" and not self.name.endswith("conv1d")


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that are alike in role, shape, bits, group size and dtype. `bpw` counts scales and biases."""

    role: Role
    shape: tuple[int, ...]
    bits: int
    group: int
    dtype: str
    count: int
    parameters: int
    size: int

    @property
    def bpw(self) -> float:
        return self.size * 8 / self.parameters


@dataclass(frozen=True, slots=True)
class Inventory:
    """All of a model. `matrix_bpw` is bits per weight over matrices only, scales and biases included."""

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Weight, ...]
    num_tensors: int
    size: int

    @property
    def matrix_bpw(self) -> float:
        matrices = [weight for weight in self.weights if weight.is_matrix]
        parameters = sum(weight.parameters for weight in matrices)
        return sum(weight.size for weight in matrices) * 8 / parameters if parameters else 0.0

    @property
    def parameters(self) -> int:
        return sum(weight.parameters for weight in self.weights)

    @property
    def tied(self) -> bool:
        """No head of its own: the embedding is read as one."""
        return not any(weight.role == "head" for weight in self.weights)

    def groups(self) -> list[Group]:
        """Alike weights counted together, largest first."""
        found: dict[tuple[Any, ...], list[Weight]] = {}
        for w in self.weights:
            found.setdefault((w.role, w.shape, w.bits, w.group, w.dtype), []).append(w)
        groups: list[Group] = []
        for alike in found.values():
            w, size = alike[0], sum(one.size for one in alike)
            groups.append(Group(w.role, w.shape, w.bits, w.group, w.dtype, len(alike), w.parameters * len(alike), size))
        return sorted(groups, key=lambda group: -group.size)


def read_header(path: Path) -> list[Tensor]:
    """The tensors of one safetensors file. Raises `ValueError` naming the file and what is wrong with its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{path.name}: a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path.name}: the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path.name}: the header is not an object")
    return [
        _tensor(path, name, entry, size - 8 - length)
        for name, entry in cast("dict[str, Any]", header).items()
        if name != "__metadata__"
    ]


def _tensor(path: Path, name: str, entry: Any, room: int) -> Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: tensor {name!r} has a malformed entry") from error
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{path.name}: tensor {name!r} has the unknown dtype {dtype!r}")
    expected = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if not 0 <= begin <= end <= room or end - begin != expected:
        raise ValueError(
            f"{path.name}: tensor {name!r} holds bytes {begin}..{end} of {room}, its shape needs {expected}"
        )
    return Tensor(name, dtype, shape, end - begin, path.name)


def role_of(name: str) -> Role:
    """The role a parameter's name tells."""
    for role, pattern in _ROLES:
        if pattern.search(name):
            return role
    return "other"


def layer_of(name: str) -> int | None:
    """The layer number in a parameter's name."""
    match = _LAYER.search(name)
    return int(next(group for group in match.groups() if group is not None)) if match else None


def _quantization(config: Mapping[str, Any], module: str) -> tuple[int, int] | None:
    """Bits and group size of a module: its own entry if the config has one, else the general one."""
    table = config.get("quantization") or config.get("quantization_config")
    if not isinstance(table, dict):
        return None
    settings = cast("dict[str, Any]", table)
    own = settings.get(module)
    found = {**settings, **cast("dict[str, Any]", own)} if isinstance(own, dict) else settings
    bits, group = found.get("bits"), found.get("group_size")
    return (int(bits), int(group)) if isinstance(bits, int) and isinstance(group, int) else None


def weights_of(tensors: Sequence[Tensor], config: Mapping[str, Any]) -> list[Weight]:
    """Put packed weights together with their scales and biases. Raises `ValueError` where shapes and config disagree."""
    by_name = {tensor.name: tensor for tensor in tensors}
    found: list[Weight] = []
    parts: set[str] = set()
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        scales = by_name.get(f"{module}.scales")
        if not tensor.name.endswith(".weight") or scales is None or tensor.dtype != "U32":
            continue
        biases = by_name.get(f"{module}.biases")
        stated = _quantization(config, module)
        if stated is None:
            raise ValueError(f"{tensor.name} is packed, but config.json states no bits and group size")
        bits, group = stated
        width = tensor.shape[-1] * 32 // bits
        if width != scales.shape[-1] * group:
            raise ValueError(
                f"{tensor.name}: {tensor.shape[-1]} words of {bits} bits are {width} wide, "
                f"{scales.shape[-1]} scales of groups of {group} are {scales.shape[-1] * group}"
            )
        size = tensor.size + scales.size + (biases.size if biases else 0)
        parts |= {tensor.name, scales.name, *([biases.name] if biases else [])}
        shape = (*tensor.shape[:-1], width)
        found.append(Weight(module, role_of(module), layer_of(module), shape, bits, group, scales.dtype, size))
    for tensor in tensors:
        if tensor.name not in parts:
            module = tensor.name.removesuffix(".weight")
            bits = DTYPE_BITS[tensor.dtype]
            layer = layer_of(module)
            found.append(Weight(module, role_of(module), layer, tensor.shape, bits, 0, tensor.dtype, tensor.size))
    return found


def inventory(directory: Path) -> Inventory:
    """Read the headers of every shard in a model directory.

    Raises `FileNotFoundError` without shards or config.json, `ValueError` for a tensor that two shards hold or a header that is wrong.
    """
    config = json.loads((directory / "config.json").read_text())
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{directory} holds no safetensors file")
    tensors = [tensor for shard in shards for tensor in read_header(shard)]
    seen: dict[str, str] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"tensor {tensor.name!r} is in {seen[tensor.name]} and in {tensor.file}")
        seen[tensor.name] = tensor.file
    weights = weights_of(tensors, config)
    return Inventory(directory, config, tuple(weights), len(tensors), sum(tensor.size for tensor in tensors))
