"""What the GGUF reader refuses, and why."""

from __future__ import annotations


class UnsupportedGGUF(ValueError):
    """The file is well formed or not, but can't become an MLX model here; the message names the field, the value and what is supported."""
