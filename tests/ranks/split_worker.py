"""One of two processes: the logits of every model it is told to load, split over both."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from gnomon.models.bindings import UnsupportedModel
from gnomon.models.load import load
from gnomon.models.split import splitter

if __name__ == "__main__":
    group = mx.distributed.init(strict=True, backend="ring")
    prompt = mx.array([[5, 6, 7, 8, 9, 10, 11]])
    made: dict[str, mx.array] = {}
    for directory in sys.argv[2:]:
        path = Path(directory)
        try:
            loaded = load(path, splitter(group))
        except UnsupportedModel as error:
            print(f"{path.name}: {error}", flush=True)
            continue
        cache = make_prompt_cache(loaded.model)
        # A prompt, and a step behind it.
        first = loaded.model(prompt, cache=cache)
        made[path.name] = mx.concatenate([first, loaded.model(mx.array([[12]]), cache=cache)], axis=1)
        mx.eval(made[path.name])
        print(f"{path.name} holds {loaded.weight_bytes}", flush=True)
    if group.rank() == 0:
        mx.savez(sys.argv[1], **made)
