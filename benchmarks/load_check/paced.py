"""Gnomon's server whose forwards begin at most so often: as fast as the clock says, however busy the processor is.

    uv run python benchmarks/load_check/paced.py MODEL --port PORT --pace SECONDS [--batch 8] [--chunk 16]

All of the server is real: scheduler, batch, sampling, HTTP. Only a forward, of a step or of a chunk of a prompt, waits until the pace has
passed since the one before. Chunks are short, so that an answer takes many forwards: a request waits for the next one to begin.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, HTTPConfig, KernelConfig, SamplingDefaults
from gnomon.engine.engine import Engine
from gnomon.engine.settings import Settings
from gnomon.models.load import LoadedModel, load
from gnomon.serve.app import create_app
from gnomon.serve.listen import bind
from gnomon.serve.server import serve


def shallow(path: Path, directory: Path) -> Path:
    """The model of a directory without its layers but the first, so that a forward is far shorter than any pace; made once."""
    made = directory / path.name
    if made.is_dir():
        return made
    partial = directory / f"{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights: dict[str, mx.array] = {}
    for file in path.glob("*.safetensors"):
        weights |= mx.load(str(file))
    first = {name: array for name, array in weights.items() if not re.search(r"\.layers\.[1-9]", name)}
    mx.save_safetensors(str(partial / "model.safetensors"), first, {"format": "mlx"})
    for file in path.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, partial)
    config = json.loads((path / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return partial.rename(made)


def paced(path: Path, seconds: float) -> LoadedModel:
    """The model of a directory, whose forwards begin at least `seconds` apart."""
    loaded = load(path)
    plain = type(loaded.model)
    due = 0.0

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic()) + seconds
        return plain.__call__(self, *args, **kwargs)

    loaded.model.__class__ = type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__})
    return loaded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a prompt in one forward")
    args = parser.parse_args()
    http = HTTPConfig(port=args.port)
    tokenizer = Tokenizer.load(args.model)
    config = EngineConfig(batch=args.batch, prefill_chunk=args.chunk)
    settings = Settings(engine=config, kernels=KernelConfig(), model_id=args.model.name)
    with bind(http) as bound, Engine(lambda: paced(args.model, args.pace), tokenizer, settings) as engine:
        engine.wait()
        return serve(
            create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults()), engine, bound, http
        )


if __name__ == "__main__":
    sys.exit(main())
