"""Loading an MLX model directory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from gnomon.models import plain
from gnomon.models.bindings import Binding, UnsupportedModel, bind, refuse
from gnomon.models.supported import code_of

__all__ = ["Binding", "LoadedModel", "ModelError", "UnsupportedModel", "load"]

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


OPEN_FILES = 2048


class ModelError(ValueError):
    """A model directory that is incomplete, damaged or inconsistent; the message names the file."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in memory, on the thread that loaded it.

    `config` is `config.json` as mlx-lm understood it. `context_length` is in tokens, None if the configuration sets none. `vocab_size` is
    the width of the logits. `eos_token_ids` joins those of `generation_config.json` and `config.json`. `weight_bytes` is what the
    parameters take in memory.
    """

    model: nn.Module
    config: dict[str, Any]
    path: Path
    model_type: str
    context_length: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    generation_config: dict[str, Any]
    binding: Binding


def load(path: str | Path, split: Callable[[nn.Module, Mapping[str, Any]], None] | None = None) -> LoadedModel:
    """Load the model directory at `path` on the calling thread and evaluate its weights. `split` takes away what other processes hold.

    Raises `ModelError` for a missing, damaged or inconsistent file and `UnsupportedModel` for a model that can't run here. Whatever
    can be found out without reading weights is checked first.
    """
    path = Path(path)
    config = read_config(path)
    generation_config = _read_json(path / "generation_config.json") or {}
    name = _module_name(path, config)
    refuse(name)
    _check_weights(path)
    _allow_files()
    try:
        model, understood = plain.build(path, name, config, generation_config) or _converted(path)
        if split is not None:
            split(model, understood)
        mx.eval(model.parameters())
    except UnsupportedModel:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        # mlx-lm raises these for weights that don't fit the configuration and for configurations its model can't be built from.
        reason = " ".join(str(error).split())
        raise ModelError(f"{path} can't be loaded as a {config['model_type']} model: {reason}") from error
    binding = bind(model)
    return LoadedModel(
        model=model,
        config=understood,
        path=path,
        model_type=config["model_type"],
        context_length=_context_length(config),
        vocab_size=_vocab_size(model, config["model_type"]),
        eos_token_ids=_eos_token_ids(generation_config, config),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)),
        generation_config=generation_config,
        binding=binding,
    )


def _allow_files() -> None:
    """Raise the limit of open files to what mlx-lm sets: weights that aren't read yet hold their files open, and macOS allows 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _converted(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The same from mlx-lm's own loader, weights not evaluated."""
    # As mlx-lm's package does before transformers is imported. The package isn't, as it makes a stream, which may not end with this thread.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from mlx_lm.utils import load_model

    return load_model(path, lazy=True)


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of the model directory at `path`. Raises `ModelError` when there is no such directory, or no such file in it."""
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory" if path.exists() else f"there is no model directory {path}")
    config = _read_json(path / "config.json")
    if config is None:
        raise ModelError(f"{path / 'config.json'} is missing: this is no MLX model directory")
    return config


def _read_json(file: Path) -> dict[str, Any] | None:
    """An object from a JSON file, None if there is no such file."""
    if not file.exists():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _module_name(path: Path, config: Mapping[str, Any]) -> str:
    """The mlx-lm model file that runs a configuration."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{path / 'config.json'} has no model_type")
    if config.get("model_file") is not None:
        raise UnsupportedModel(f"{path} brings its own code ({config['model_file']}), which is never run")
    named = config.get("architectures") or ()
    name = code_of(model_type, [named] if isinstance(named, str) else named)
    if name is None:
        raise UnsupportedModel(
            f"model type {model_type} is not known to the installed mlx-lm; `gnomon models --supported` lists those that are"
        )
    return name


def _check_weights(path: Path) -> None:
    """Raise `ModelError` unless all weight files are there and whole."""
    files = sorted(path.glob("model*.safetensors"))
    index = _read_json(path / "model.safetensors.index.json")
    if index is not None:
        missing = sorted(file for file in set(index.get("weight_map", {}).values()) if not (path / file).exists())
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} weight files named in its index, the first is {missing[0]}")
    if not files:
        others = sorted(
            file.name for file in path.iterdir() if file.suffix in (".gguf", ".bin", ".pth", ".npz", ".safetensors")
        )
        found = f"; it has {', '.join(others[:3])}, which must be converted first" if others else ""
        raise ModelError(f"{path} has no weights: no file matches model*.safetensors{found}")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Raise `ModelError` for a file that is cut short or not in the format: an 8-byte length, a JSON header, tensors back to back."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{file} is damaged or incomplete: its header doesn't fit its {size} bytes")
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is damaged: its header is not that of a safetensors file") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file} is damaged or incomplete: it has {size} bytes, its header says {expected}")


def _text_configs(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Configurations that may speak of the language model, the most specific first."""
    for key in _TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            yield config[key]
    yield config


def _context_length(config: Mapping[str, Any]) -> int | None:
    for part in _text_configs(config):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return part[key]
    return None


def _eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids in the order found, each once."""
    found: dict[int, None] = {}
    for part in (generation_config, config, *_text_configs(config)):
        value = part.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def _vocab_size(model: nn.Module, model_type: str) -> int:
    """The width of the logits, from the graph of a forward that is never evaluated."""
    try:
        logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"a {model_type} model's forward can't be built here: {error}") from error
    return logits.shape[-1]
