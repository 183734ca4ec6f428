"""One GGUF file into one MLX model directory, a tensor at a time, visible only when complete."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.gguf_reader import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from gnomon.models.gguf.architectures import Architecture, Fields, architecture_of, config_of, unpermute
from gnomon.models.gguf.blocks import AFFINE_BITS, GROUP, affine, to_bfloat16
from gnomon.models.gguf.errors import UnsupportedGGUF
from gnomon.models.gguf.vocabulary import Vocabulary, write, write_json

Progress = Callable[[int, int], None]
Widened = Literal["bfloat16", "float32"]
_PLAIN: Final = {Kind.F32: "F32", Kind.F16: "F16", Kind.BF16: "BF16"}
_WIDTH: Final = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROWS_AT_ONCE: Final = 4096


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion made: the directory, its bytes of weights, and how many tensors kept or changed their encoding."""

    path: Path
    weight_bytes: int
    affine: int
    widened: int


@dataclass(frozen=True, slots=True)
class _Output:
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _WIDTH[self.dtype]


@dataclass(slots=True)
class _Plan:
    dtype: str
    outputs: list[_Output] = field(default_factory=list)
    quantization: dict[str, dict[str, int | str]] = field(default_factory=dict)
    affine: int = 0
    widened: int = 0


def convert(
    source: str | Path,
    destination: str | Path,
    progress: Progress | None = None,
    *,
    widen: Widened = "bfloat16",
    provenance: Mapping[str, Any] | None = None,
) -> Converted:
    """Convert the GGUF file `source` into the model directory `destination`, which must not exist.

    Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 matrices keep their values as MLX affine groups of 32; every other quantised kind is dequantised and
    stored as `widen` (float32 keeps its values too); f32, f16 and bf16 stay. Vectors (norms, biases) take the type in which the layers
    compute: float32 beside affine groups, whose values no narrower type holds, else the matrices' own. `progress(done, total)` counts
    bytes. `provenance` becomes the directory's gnomon.json. A failed run leaves nothing, a killed one only a directory beside the
    destination, which the next run replaces. Raises `UnsupportedGGUF` for what can't be expressed, `FileExistsError` when the
    destination exists, `OSError` when it can't be written.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists already")
    reader = _open(source)
    metadata: dict[str, Any] = {name: value.contents() for name, value in reader.fields.items()}
    name, architecture = architecture_of(metadata)
    if int(metadata.get("split.count", 1)) > 1:
        raise UnsupportedGGUF(
            f"{source.name} is one of {metadata['split.count']} parts (split.count): join them first, with llama.cpp's gguf-split --merge"
        )
    plan = _plan(reader.tensors, architecture, Fields(metadata, name), "F32" if widen == "float32" else "BF16")
    config = _config(reader.tensors, metadata, plan)
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    total = sum(output.nbytes for output in plan.outputs)
    try:
        write(Vocabulary.read(metadata), partial)
        write_json(partial / "config.json", config)
        if provenance is not None:
            write_json(partial / "gnomon.json", {**provenance, "source": source.name, "widen": widen})
        with (partial / "model.safetensors").open("wb") as file:
            _write_safetensors(file, plan.outputs, total, progress)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(destination)
    except BaseException:
        # A full disk, above all, must not be left full.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Converted(destination, total, plan.affine, plan.widened)


def _open(source: Path) -> GGUFReader:
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    try:
        return GGUFReader(source)
    except (
        ValueError,
        IndexError,
        KeyError,
    ) as error:  # what the reader raises on bytes that aren't GGUF, and on truncated files
        raise UnsupportedGGUF(f"{source.name} is not a whole GGUF file: {error}") from error


def _compute_dtype(tensors: list[ReaderTensor], widened: str) -> str:
    kinds = {tensor.tensor_type for tensor in tensors if len(tensor.shape) > 1}
    stored = {_PLAIN.get(kind, widened) for kind in kinds}
    if kinds & AFFINE_BITS.keys() or len(stored) != 1:
        return "F32"
    return stored.pop()


def _plan(tensors: list[ReaderTensor], architecture: Architecture, fields: Fields, widened: str) -> _Plan:
    plan = _Plan(_compute_dtype(tensors, widened))
    for tensor in tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        name = architecture.rename(tensor.name)
        if name is None:
            raise UnsupportedGGUF(f"tensor {tensor.name} is unknown to {architecture.model_type}")
        if len(tensor.shape) == 1:
            offset = architecture.norm_offset if "norm" in tensor.name else 0.0
            plan.outputs.append(_vector(tensor, name, plan.dtype, offset, _order(tensor.name, architecture, fields)))
        elif len(tensor.shape) == 2:
            _matrix(plan, tensor, name, widened, _order(tensor.name, architecture, fields))
        else:
            raise UnsupportedGGUF(f"tensor {tensor.name} has {len(tensor.shape)} axes; at most 2 are supported")
    plan.outputs.sort(key=lambda output: output.name)
    return plan


def _order(name: str, architecture: Architecture, fields: Fields) -> NDArray[np.intp] | None:
    if not architecture.permuted:
        return None
    if ".attn_q." in name:
        return unpermute(fields.heads, fields.head_dim)
    if ".attn_k." in name:
        return unpermute(fields.kv_heads, fields.head_dim)
    return None


def _cast(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return to_bfloat16(values)
    return values.astype(np.float16 if dtype == "F16" else np.float32, copy=False)


def _vector(tensor: ReaderTensor, name: str, dtype: str, offset: float, order: NDArray[np.intp] | None) -> _Output:
    def chunks() -> Iterator[NDArray[Any]]:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        yield _cast((values if order is None else values[order]) - np.float32(offset), dtype)

    return _Output(name, dtype, (int(tensor.shape[0]),), chunks)


def _matrix(plan: _Plan, tensor: ReaderTensor, name: str, widened: str, order: NDArray[np.intp] | None) -> None:
    kind, data = tensor.tensor_type, tensor.data
    cols, rows = (int(size) for size in tensor.shape)

    def blocks(at: int) -> NDArray[Any]:
        stop = min(at + _ROWS_AT_ONCE, rows)
        return data[at:stop] if order is None else data[order[at:stop]]

    starts = range(0, rows, _ROWS_AT_ONCE)
    if kind in AFFINE_BITS:
        bits = AFFINE_BITS[kind]
        module = name.removesuffix(".weight")
        plan.outputs += [
            _Output(name, "U32", (rows, cols * bits // 32), lambda: (affine(blocks(at), kind).weight for at in starts)),
            _Output(
                f"{module}.scales",
                "F32",
                (rows, cols // GROUP),
                lambda: (affine(blocks(at), kind).scales for at in starts),
            ),
            _Output(
                f"{module}.biases",
                "F32",
                (rows, cols // GROUP),
                lambda: (affine(blocks(at), kind).biases for at in starts),
            ),
        ]
        plan.quantization[module] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
        plan.affine += 1
    elif kind in _PLAIN:
        plan.outputs.append(_Output(name, _PLAIN[kind], (rows, cols), lambda: (blocks(at) for at in starts)))
    else:
        _check_known(tensor)
        plan.outputs.append(
            _Output(
                name, widened, (rows, cols), lambda: (_cast(dequantize(blocks(at), kind), widened) for at in starts)
            )
        )
        plan.widened += 1


def _check_known(tensor: ReaderTensor) -> None:
    try:
        dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedGGUF(
            f"tensor {tensor.name} is {tensor.tensor_type.name}, which the gguf package can't dequantise"
        ) from error


def _config(tensors: list[ReaderTensor], metadata: dict[str, Any], plan: _Plan) -> dict[str, Any]:
    named = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" not in named:
        raise UnsupportedGGUF("the file has no token_embd.weight")
    factors = dequantize(named["rope_freqs.weight"].data, Kind.F32) if "rope_freqs.weight" in named else None
    vocab_size = int(named["token_embd.weight"].shape[1])
    config = config_of(metadata, "output.weight" not in named, vocab_size, factors)
    vocabulary = Vocabulary.read(metadata)
    if (bos := vocabulary.get("bos_token_id")) is not None:
        config["bos_token_id"] = int(bos)
    if ids := vocabulary.eos_ids:
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    config["torch_dtype"] = _NAMES[plan.dtype]
    if plan.quantization:
        bits = [int(entry["bits"]) for entry in plan.quantization.values()]
        default = {"group_size": GROUP, "bits": max(set(bits), key=bits.count), "mode": "affine"}
        config["quantization"] = default | plan.quantization
    return config


def _write_safetensors(file: BinaryIO, outputs: list[_Output], total: int, progress: Progress | None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for output in outputs:
        header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [at, at + output.nbytes]}
        at += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    done = 0
    for output in outputs:
        before = file.tell()
        for chunk in output.chunks():
            file.write(np.ascontiguousarray(chunk).data)
        if file.tell() - before != output.nbytes:
            raise UnsupportedGGUF(
                f"tensor {output.name} has {file.tell() - before} bytes where its shape needs {output.nbytes}"
            )
        done += output.nbytes
        if progress is not None:
            progress(done, total)
