"""`gnomon gc`: free what no model needs any more."""

from __future__ import annotations

import argparse

from gnomon.cli._library import size, stdout, store_of
from gnomon.cli._verbs import CommandError
from gnomon.config import Config

NAME = "gc"
HELP = "list what the model caches hold in vain; with --yes, remove it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")
    parser.add_argument("--dry-run", action="store_true", help="only list, even with --yes")
    parser.add_argument(
        "--force", action="store_true", help="also remove older revisions that hold files no other revision has"
    )


def run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from gnomon.hub import gc
    from gnomon.hub.errors import HubError

    config: Config = args.config
    plan = gc.plan(store_of(config), force=args.force)
    console = stdout()
    if plan.items:
        table = Table("what", "why", "size", box=None, pad_edge=False)
        for item in plan.items:
            table.add_row(item.label, item.why, size(item.nbytes))
        console.print(table)
    for line in plan.tripped:
        console.print(f"kept: {line} (--force removes it)", markup=False, soft_wrap=True)
    if not plan.items:
        console.print("nothing to remove")
        return 0
    if args.dry_run or not args.yes:
        console.print(f"{size(plan.nbytes)} could be freed; nothing was touched. To remove: gnomon gc --yes")
        return 0
    try:
        outcome = gc.carry_out(plan)
    except (HubError, OSError) as error:
        raise CommandError(str(error)) from error
    freed = sum(item.nbytes for item in outcome.removed)
    busy = f"; {len(outcome.busy)} left, in use by another process" if outcome.busy else ""
    console.print(f"removed {len(outcome.removed)} items, {size(freed)}{busy}")
    return 0
