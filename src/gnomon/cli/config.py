"""`gnomon config`: every setting, its value and where it came from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gnomon.cli._library import stdout
from gnomon.cli._model import generation_config
from gnomon.config import SERVE, Config, settings, with_model_defaults

NAME = "config"
HELP = "print every setting with its value and origin; takes the flags of serve"
GROUPS = SERVE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    config: Config = _with_model(args.config)
    rows = [(s, getattr(getattr(config, s.group), s.name)) for s in settings(SERVE)]
    if args.json:
        shown: dict[str, Any] = {}
        for s, value in rows:
            plain = s.show(value) if s.option.secret or s.kind == "path" else value
            shown[s.dest] = {
                "value": plain,
                "origin": str(config.origin(s.group, s.name)),
                "flag": s.flag,
                "variable": s.env,
            }
        print(json.dumps(shown, indent=2))
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("flag", "value", "origin", "variable"):
        table.add_column(title, overflow="fold")
    for s, value in rows:
        origin = config.origin(s.group, s.name)
        style = "" if origin.kind == "default" else "bold"
        table.add_row(s.flag, s.show(value), str(origin), s.env, style=style)
    stdout().print(table)
    return 0


def _with_model(config: Config) -> Config:
    """The model's defaults too, where the model is a directory given by path (a name would have to be looked up)."""
    path = Path(config.model.wanted or "").expanduser()
    if config.model.wanted is None or not path.is_dir():
        return config
    return with_model_defaults(config, generation_config(path), config.model.wanted)
