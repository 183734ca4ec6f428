"""Building a model as mlx-lm's loader does, for directories that need none of its conversions: floats, or MLX's own affine quantization.

That loader's module imports transformers, which takes longer than reading a small model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn

_CONVERTED: Final = ("model_file", "quantize_activations")
_FOREIGN: Final = "quantization_config"
_TAGGED_FLOAT: Final = '"__float__"'
"""How mlx-lm writes numbers that JSON doesn't have."""


def build(
    path: Path, module: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]] | None:
    """The model of a directory, its weights not evaluated, and its configuration as mlx-lm understands it; None where mlx-lm's loader has
    to convert something. `module` is the model's file in mlx-lm. Raises what mlx-lm's model raises for weights or settings that don't fit.
    """
    quantization = config.get("quantization")
    if not _is_plain(path, config):
        return None
    weights = _weights(path)
    if any(_converts(name, array) for name, array in weights.items()):
        return None
    understood = dict(config)
    if generation_config.get("eos_token_id"):
        understood["eos_token_id"] = generation_config["eos_token_id"]
    code = importlib.import_module(f"mlx_lm.models.{module}")
    model = cast("nn.Module", code.Model(code.ModelArgs.from_dict(understood)))
    if hasattr(model, "sanitize"):
        weights = cast("dict[str, mx.array]", cast("Any", model).sanitize(weights))
    if quantization is not None:
        _quantize(model, quantization, weights)
    model.eval()
    model.load_weights(list(weights.items()))
    return model, understood


def _is_plain(path: Path, config: Mapping[str, Any]) -> bool:
    quantization, text = config.get("quantization"), config.get("text_config")
    if any(config.get(name) for name in _CONVERTED) or (path / "hf_quant_config.json").exists():
        return False
    if _TAGGED_FLOAT in (path / "config.json").read_text(encoding="utf-8"):
        return False
    if quantization is None:
        # Other quantizers' settings; beside MLX's own they repeat it.
        return not config.get(_FOREIGN) and not (isinstance(text, Mapping) and _FOREIGN in text)
    return isinstance(quantization, Mapping) and quantization.get("mode", "affine") == "affine"


def _weights(path: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found.update(cast("dict[str, mx.array]", mx.load(str(file))))
    return found


def _converts(name: str, array: mx.array) -> bool:
    """Whether a weight is quantized in another mode than affine, whose scales are floats."""
    return name.endswith(".global_scale") or (name.endswith(".scales") and array.dtype == mx.uint8)


def _quantize(model: nn.Module, settings: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Turn the layers whose weights are packed into quantized ones: as the settings name them, else by the shapes of what is packed."""

    def layer(path: str, module: nn.Module) -> Any:
        if path in settings:
            return settings[path]
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        width = cast("mx.array", module.weight).shape[-1]
        packed = weights[f"{path}.weight"].shape[-1]
        return {"group_size": width // scales.shape[-1], "bits": 32 * packed // width, "mode": "affine"}

    nn.quantize(model, group_size=settings["group_size"], bits=settings["bits"], mode="affine", class_predicate=layer)
