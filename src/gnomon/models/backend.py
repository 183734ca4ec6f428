"""Which backend of MLX this process computes on."""

from __future__ import annotations

import mlx.core as mx

from gnomon.models.traits import Backend


def backend() -> Backend:
    """Where this process computes by default."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
