"""How fetched files become model directories: what `gnomon.hub` is handed, since it imports nothing of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnomon.models.gguf import convert
from gnomon.models.gguf.convert import Progress, Widened


class Converter:
    """Converts a GGUF file; `progress(done, total)` counts bytes written, `widen` is where K-quants go."""

    def __init__(self, progress: Progress | None = None, widen: Widened = "bfloat16") -> None:
        self.progress = progress
        self.widen: Widened = widen

    def __call__(self, source: Path, destination: Path, provenance: dict[str, Any]) -> None:
        """Make `destination` of `source`. Raises what `gnomon.models.gguf.convert` does."""
        convert(source, destination, self.progress, widen=self.widen, provenance=provenance)
