"""Reuse that outlives the process: what a state on disk depends on, and how it is made durable."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from gnomon.config import CacheConfig
from gnomon.engine.disk import Disk, DiskUnusable
from gnomon.engine.reuse import Reuse
from gnomon.engine.runner import Runner
from gnomon.state.fingerprint import fingerprint
from gnomon.state.prefix import PrefixCache

log = logging.getLogger(__name__)


def new_reuse(
    runner: Runner,
    cache: PrefixCache | None,
    decode: Callable[[Sequence[int]], str],
    config: CacheConfig,
    operations: str,
    wake: Callable[[], None],
) -> Reuse:
    """What the engine reuses, on disk too if a directory is set. `operations` says whose kernels run.

    Raises `DiskUnusable` for a directory, or a model, that this can't be done with.
    """
    reuse = _new_reuse(runner, cache, decode, config, operations, wake)
    if not config.session_cache:
        reuse.sessions = None
    return reuse


def _new_reuse(
    runner: Runner,
    cache: PrefixCache | None,
    decode: Callable[[Sequence[int]], str],
    config: CacheConfig,
    operations: str,
    wake: Callable[[], None],
) -> Reuse:
    directory = config.ssd_cache
    if directory is None:
        return Reuse(runner, cache, decode)
    if cache is None:
        raise DiskUnusable(f"--ssd-cache {directory} needs the cache in memory: --prompt-cache is 0")
    begun, path = time.monotonic(), runner.loaded.path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        content = fingerprint(path, directory)
    except (OSError, ValueError) as error:
        raise DiskUnusable(f"--ssd-cache {directory} can't be used with {path}: {error}") from error
    log.info("the model's files were told apart in %.1f s", time.monotonic() - begun)
    about = dict(surroundings(operations))
    reuse = Reuse(runner, cache, decode, "\n".join((content, *map(str, about.values()))))
    if reuse.cache is not None:
        model = {"model": str(path), "model_type": runner.loaded.model_type, "content": content}
        about = {**model, **about, "identity": reuse.identity}
        reuse.disk = Disk(config, reuse.cache, reuse.identity, about, reuse.namespace, wake)
    return reuse


def surroundings(operations: str) -> Mapping[str, Any]:
    """What the bits of a state depend on beside model and tokens, on this machine."""
    device = mx.device_info()
    return {
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "device": str(mx.default_device()),
        "architecture": device.get("architecture", platform.machine()),
        "device_name": device.get("device_name", ""),
        "operations": operations,
    }
