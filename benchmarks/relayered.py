"""A small model with more layers that do nothing, or with fewer: targets and drafts that agree, where no pair of real ones is at hand.

uv run python benchmarks/relayered.py MODEL OUT --times 6       each layer six times, five of which add nothing
uv run python benchmarks/relayered.py MODEL OUT --without 12 20 without these layers: a draft that is often, not always, of MODEL's opinion
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
WRITING = ("self_attn.o_proj.", "mlp.down_proj.")
"""What a layer adds to the residual stream comes out of these."""


def relayer(path: Path, like: Path, *, times: int = 1, without: frozenset[int] = frozenset()) -> None:
    """Write a model of the Llama family, quantised or not, with layers repeated or left out. Copies but the first write zeros."""
    weights = cast("dict[str, mx.array]", mx.load(str(like / "model.safetensors")))
    settings: dict[str, Any] = json.loads((like / "config.json").read_text("utf-8"))
    kept = [layer for layer in range(settings["num_hidden_layers"]) if layer not in without]
    first = {layer: times * place for place, layer in enumerate(kept)}

    def names(name: str) -> list[str]:
        """What becomes of a name: one for each copy of its layer."""
        match = LAYER.fullmatch(name)
        if match is None:
            return [name]
        start = first.get(int(match[1]))
        return [] if start is None else [f"model.layers.{start + copy}.{match[2]}" for copy in range(times)]

    made: dict[str, mx.array] = {}
    for name, array in weights.items():
        # Codes of zero scale and bias stand for zeros.
        idle = any(part in name for part in WRITING) and array.dtype != mx.uint32
        for copy, new in enumerate(names(name)):
            made[new] = mx.zeros_like(array) if idle and copy else array
    path.mkdir(parents=True, exist_ok=True)
    for file in like.glob("*.json"):
        shutil.copy(file, path / file.name)
    settings["num_hidden_layers"] = times * len(kept)
    if (bits := settings.get("quantization")) is not None:
        bits = {new: how for name, how in bits.items() for new in names(name)}
        settings["quantization"] = settings["quantization_config"] = bits
    mx.save_safetensors(str(path / "model.safetensors"), made, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--without", type=int, nargs="+", default=[])
    args = parser.parse_args()
    relayer(args.out, args.model, times=args.times, without=frozenset(args.without))


if __name__ == "__main__":
    main()
