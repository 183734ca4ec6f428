"""The program that looks for the models of a pool: not a verb, and started by the server alone, which loads no MLX itself.

Reads a pickled `Config` from its input and writes a JSON object: `room` in bytes, `entries`, the default first, and `pins`; or
`error`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon import logs
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, ModelConfig
from gnomon.isolate.plan import Entry

log = logging.getLogger(__name__)


def catalogue(config: Config) -> dict[str, Any]:
    """The models that a pool may load: the default, then those named, or every one that is here. Raises CommandError."""
    from gnomon.cli._library import find, runs, store_of
    from gnomon.hub.errors import HubError
    from gnomon.hub.registry import scan
    from gnomon.models.fit import usable
    from gnomon.models.machine import memory

    found = [find(config)]
    wanted = (*config.pool.models, *config.pool.pins)
    found += [find(replace(config, model=ModelConfig(model=name))) for name in wanted]
    pins = [one.id for one in found[1 + len(config.pool.models) :]]
    places = [(one.id, one.path) for one in found]
    if not config.pool.models:
        try:
            places += [(one.id, one.path) for one in scan(store_of(config)).servable() if runs(one)]
        except HubError as error:
            raise CommandError(str(error)) from error
    entries: dict[str, Entry] = {}
    for id, path in places:
        known = entries.get(id)
        if known is not None:
            if Path(known.path).resolve() != path.resolve():
                log.warning("%s is also in %s, which is left out: one id stands for one model", id, path)
            continue
        try:
            entries[id] = _entry(id, path, config)
        except (OSError, ValueError) as error:
            log.warning("%s is left out: %s", id, error)
    if found[0].id not in entries:
        raise CommandError(f"{found[0].id} can't be measured")
    return {
        "room": int(usable(memory(), config.engine.memory_budget)),
        "entries": [dataclasses.asdict(one) for one in entries.values()],
        "pins": [id for id in pins if id in entries],
    }


def _entry(id: str, path: Path, config: Config) -> Entry:
    """Raises OSError or ValueError for a model that can't be measured."""
    from gnomon.hub.registry import describe
    from gnomon.models.fit import CONTEXT, measure_needs

    about, needs = describe(path, id, "hub"), measure_needs(path, config.kv.scheme)
    limits = [one for one in (needs.max_positions, config.engine.context_limit) if one is not None]
    context = min(limits, default=None)
    ordinary = config.engine.context_limit or CONTEXT
    return Entry(
        id=id,
        path=str(path),
        model_type=about.model_type,
        size_bytes=about.weight_bytes,
        need=int(needs.total(min(ordinary, needs.max_positions or ordinary))),
        created=int(about.modified),
        context=context,
    )


def main() -> int:
    config: Config = pickle.load(sys.stdin.buffer)
    logs.setup(config.log)
    try:
        said = catalogue(config)
    except CommandError as error:
        said = {"error": str(error)}
    json.dump(said, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
