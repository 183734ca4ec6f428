"""What several processes need to be the same, and what they can't do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import psutil

if TYPE_CHECKING:
    from gnomon.engine.settings import Settings

_TOLD = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def check_ranks(settings: Settings) -> None:
    """Raise ValueError for a setting that doesn't compose with a model split over processes, saying why."""
    engine, reasons = settings.engine, dict[str, str]()
    if settings.speculation.enabled:
        reasons["--draft-model, --draft-kind and --fill"] = (
            "how much is guessed follows times, which differ between processes"
        )
    if settings.cache.ssd_cache is not None:
        reasons["--ssd-cache"] = "a state on disk would be a part of one process's"
    if engine.memory_budget is not None:
        reasons["--memory-budget"] = "it reckons with the whole model in one process"
    if engine.kv_budget is not None:
        reasons["--kv-budget"] = "it reckons with the whole model in one process"
    if settings.kv.mode != "off":
        reasons["--kv-quant"] = "codes of keys and values are not tried with a part of the heads"
    if settings.kv.paged:
        reasons["--paged-kv"] = "pages are not tried with a part of the heads"
    if settings.kernels.kernels == "native":
        reasons["--kernels native"] = "the kernels don't know layers that are split"
    if reasons:
        raise ValueError(
            "; ".join(f"{flags} can't be used with --distributed: {why}" for flags, why in reasons.items())
        )


def about(path: Path, settings: Settings) -> tuple[Mapping[str, Any], int]:
    """What has to be the same in every process that holds the model at `path`, and this one's memory in bytes."""
    files = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()[:16] for name in _TOLD if (path / name).is_file()
    }
    weights = sorted((file.name, file.stat().st_size) for file in path.glob("model*.safetensors"))
    said = {
        **{name: _version(name) for name in ("mlx", "mlx-lm", "gnomon")},
        **files,
        "weights": weights,
        "device": mx.default_device(),
        **asdict(settings.engine),
        "session_cache": settings.cache.session_cache,
    }
    return said, int(mx.device_info().get("memory_size") or psutil.virtual_memory().total)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from its sources
        return "not installed"
