"""`gnomon ls`: the models that are here and can be served."""

from __future__ import annotations

import argparse
import json

from gnomon.cli._library import runs, size, stdout, store_of
from gnomon.config import Config

NAME = "ls"
HELP = "list the models on this machine that can be served"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vision", action="store_true", help="only models with a vision tower")
    parser.add_argument("--max-size", type=float, metavar="GB", help="only models of at most so many GB of weights")
    parser.add_argument("--all-revisions", action="store_true", help="older revisions too")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from gnomon.hub.registry import scan

    config: Config = args.config
    registry = scan(store_of(config))
    models = [*registry.models, *(registry.older if args.all_revisions else ())]
    shown = [
        model
        for model in models
        if model.complete
        and runs(model)
        and (not args.vision or model.vision)
        and (args.max_size is None or model.weight_bytes <= args.max_size * 1e9)
    ]
    if args.json:
        rows = [
            {
                "id": model.id,
                "path": str(model.path),
                "source": model.source,
                "revision": model.revision,
                "refs": model.refs,
                "model_type": model.model_type,
                "bits": model.bits,
                "weight_bytes": model.weight_bytes,
                "vision": model.vision,
            }
            for model in shown
        ]
        print(json.dumps(rows, indent=2))
        return 0
    console = stdout()
    if not shown:
        console.print("no models here; gnomon serve fetches the starter, gnomon get OWNER/NAME another")
        return 0
    table = Table("model", "type", "bits", "weights", "from", box=None, pad_edge=False)
    for model in shown:
        at = f"@{model.revision[:12]}" if args.all_revisions and model.revision else ""
        table.add_row(model.id + at, model.model_type, str(model.bits or ""), size(model.weight_bytes), model.source)
    console.print(table)
    return 0
