"""`gnomon scan`: everything the two model caches hold, with what is wrong with it."""

from __future__ import annotations

import argparse
import json

from gnomon.cli._library import runs, size, stdout, store_of
from gnomon.config import Config

NAME = "scan"
HELP = "look through the model caches and report everything, incomplete and unsupported models included"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from gnomon.hub import gc
    from gnomon.hub.registry import Model, hub_cache, scan

    config: Config = args.config
    store = store_of(config)
    registry = scan(store)

    def state(model: Model) -> str:
        if not model.complete:
            return f"lacks {', '.join(model.missing)}"
        return "ready" if runs(model) else f"model type {model.model_type or 'unknown'} is not supported"

    models = [*registry.models, *registry.older]
    removable = gc.plan(store).nbytes
    if args.json:
        rows = [
            {
                "id": m.id,
                "path": str(m.path),
                "source": m.source,
                "revision": m.revision,
                "refs": m.refs,
                "bytes": m.nbytes,
            }
            | {"state": state(m)}
            for m in models
        ]
        report = {"models": rows, "unknown_formats": registry.unknown_formats, "removable_bytes": removable}
        print(json.dumps(report, indent=2))
        return 0
    console = stdout()
    table = Table("model", "revision", "refs", "size", "state", box=None, pad_edge=False)
    for model in models:
        table.add_row(model.id, model.revision[:12], " ".join(model.refs), size(model.nbytes), state(model))
    if models:
        console.print(table)
    console.print(
        f"{len(models)} models in {hub_cache()} and {store.models}; gc would free {size(removable)}", soft_wrap=True
    )
    if registry.unknown_formats:
        console.print(f"{registry.unknown_formats} directories of another format are ignored; only gc removes them")
    return 0
