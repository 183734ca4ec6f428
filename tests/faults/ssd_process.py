"""A process that serves a mixed run from a shared directory, for tests that kill it.

`ssd_process.py DISK CAPTURES MODEL_TYPE SEED TURNS CAP`

The hash of every state that goes to disk is appended to CAPTURES before; every state that comes back is compared with those.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_fixtures import Rig, tiny_loaded
from gnomon.config import CacheConfig, EngineConfig
from gnomon.engine import fetch
from gnomon.engine.api import Finished, Request
from gnomon.state.ssd import tier
from prefix_walk import hash_of, tokens_of

PER_TOKEN = 2 * 2 * 2 * 16 * 4


def main(disk: Path, captures: Path, model_type: str, seed: int, turns: int, cap: int) -> int:
    log = os.open(captures, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    stock_pack, stock_unpack = tier.pack, fetch.unpack

    def pack(held: Any, entry: Any) -> Any:
        parts = held.layers if hasattr(held, "layers") else dict(enumerate(held.parts))
        os.write(log, f"{entry.name} {hash_of({i: parts[i] for i in entry.layers})}\n".encode())
        return stock_pack(held, entry)

    def unpack(packed: Any) -> Any:
        layers = stock_unpack(packed)
        if f"{packed.entry.name} {hash_of(layers)}" not in captures.read_text().splitlines():
            print("WRONG", packed.entry, flush=True)
            os._exit(3)
        return layers

    tier.pack, fetch.unpack = pack, unpack
    model = disk.parent / "model"
    model.mkdir(exist_ok=True)
    if not (model / "model.safetensors").exists():
        (model / "model.safetensors").write_bytes(b"weights")
    rig = Rig(
        replace(tiny_loaded(model_type), path=model),
        EngineConfig(prefill_chunk=64, prompt_cache=900 * PER_TOKEN, checkpoint_every=100),
        cache=CacheConfig(ssd_cache=disk, ssd_cache_max=cap, ssd_cache_min_free=0),
    )
    chance, texts = random.Random(seed), [tokens_of(600, seed=i) for i in range(4)]
    print("ready", flush=True)
    for turn in range(turns):
        for one in range(chance.randint(1, 3)):
            text = chance.choice(texts)
            kept = chance.randint(1, len(text)) if chance.random() < 0.5 else len(text)
            prompt = (*text[:kept], *tokens_of(chance.randint(1, 60), seed=chance.randint(0, 3)))[-1500:]
            rig.submit(Request(f"{turn}.{one}", prompt, max_tokens=chance.randint(1, 8), ignore_eos=True))
            texts[chance.randrange(len(texts))] = prompt if len(prompt) < 1200 else prompt[:500]
        rig.finish()
    for events in rig.events.values():
        assert isinstance(events[-1], Finished)
    rig.core.check_integrity()
    disk_tier = rig.core.reuse.disk
    assert disk_tier is not None
    report = disk_tier.flush(300, lambda work, _: work())
    told = disk_tier.stats()
    rig.core.close()
    rig.core.reuse.close()
    print("end", told["restores"], told["reads"]["corrupt"], report.durable, flush=True)
    return 0


if __name__ == "__main__":
    _, disk_at, captures_at, kind, number, count, most = sys.argv
    sys.exit(main(Path(disk_at), Path(captures_at), kind, int(number), int(count), int(most)))
