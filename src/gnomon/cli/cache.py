"""`gnomon cache`: look at a directory of states offline, check it, make it smaller, and ask it why a prompt did not match."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli._library import size, stdout
from gnomon.cli._verbs import CommandError
from gnomon.config.units import GiB

if TYPE_CHECKING:
    from rich.console import Console

    from gnomon.state.ssd.manifest import Listed
    from gnomon.state.ssd.store import Store

NAME = "cache"
HELP = "list, verify, prune or explain a directory of --ssd-cache, without a server"
ACTIONS = ("list", "verify", "prune", "explain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="list: what is there; verify: read every file and check all its sums; prune: remove the files used longest ago; "
        "explain: how far a prompt's tokens are known under each identity",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="what --ssd-cache names")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--max", metavar="GiB", type=float, help="prune: the most that may be left")
    parser.add_argument("--older-than", metavar="DAYS", type=float, help="prune: also what was not used for so long")
    parser.add_argument("--yes", action="store_true", help="prune, verify: remove; without it nothing is touched")
    parser.add_argument("--tokens", metavar="FILE", type=Path, help="explain: a JSON array of the prompt's token ids")
    parser.add_argument("--text", metavar="FILE", type=Path, help="explain: the prompt as text; needs --tokenizer")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="explain: the model directory to tokenise with")


def run(args: argparse.Namespace) -> int:
    from gnomon.state.ssd.store import Store

    store = Store(args.directory)
    if not store.home.is_dir():
        raise CommandError(f"{args.directory} holds no states: it was not made by --ssd-cache")
    console = stdout()
    act = {"list": _list, "verify": _verify, "prune": _prune, "explain": _explain}[args.action]
    try:
        return act(args, store, console)
    except OSError as error:
        raise CommandError(f"{args.directory} can't be read: {error}") from error


def _all(store: Store, console: Console | None = None) -> list[Listed]:
    """Every whole file, told by the files themselves: the index is not asked and not touched."""
    from gnomon.state.ssd.manifest import Manifest

    manifest = Manifest(None)
    try:
        found = store.reconcile(manifest, remove=False)
    finally:
        manifest.close()
    if console is not None:
        for reason in found.removed:
            console.print(f"not whole: {reason}", markup=False, soft_wrap=True)
    return found.listed


def _list(args: argparse.Namespace, store: Store, console: Console) -> int:
    from rich.table import Table

    groups: dict[str, list[Listed]] = defaultdict(list)
    for one in _all(store, None if args.json else console):
        groups[one.entry.identity].append(one)
    rows: list[dict[str, Any]] = [
        {
            "identity": identity,
            "about": store.described(identity),
            "blocks": sum(one.entry.kind == "block" for one in listed),
            "checkpoints": sum(one.entry.kind == "checkpoint" for one in listed),
            "namespaces": len({one.entry.namespace for one in listed}),
            "bytes": sum(one.size for one in listed),
            "longest_prefix_tokens": max(one.entry.end for one in listed),
            "last_used": max(one.used for one in listed),
        }
        for identity, listed in sorted(groups.items())
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table(
        "identity", "model", "blocks", "checkpoints", "longest", "size", "last used", box=None, pad_edge=False
    )
    for row in rows:
        about = row["about"]
        table.add_row(
            row["identity"][:12],
            f"{Path(about.get('model', '?')).name} ({about.get('operations', '?')}, {about.get('device_name', '?')})",
            str(row["blocks"]),
            str(row["checkpoints"]),
            f"{row['longest_prefix_tokens']} tokens",
            size(row["bytes"]),
            _when(row["last_used"]),
        )
    console.print(table if rows else "nothing is stored")
    return 0


def _verify(args: argparse.Namespace, store: Store, console: Console) -> int:
    from gnomon.state.ssd.format import BadFile, read

    bad: list[str] = []
    count = total = 0
    for file in store.files():
        try:
            packed = read(file, verify=True)
        except BadFile as error:
            bad.append(str(error))
            if args.yes:
                file.unlink(missing_ok=True)
        except OSError as error:
            bad.append(f"{file} can't be read: {error}")
        else:
            count, total = count + 1, total + packed.num_bytes
    if args.json:
        print(json.dumps({"good": count, "bytes": total, "bad": bad, "removed": bool(args.yes)}))
    else:
        for reason in bad:
            console.print(reason, markup=False, soft_wrap=True)
        hint = "" if not bad else "; removed" if args.yes else "; to remove them: --yes"
        console.print(f"{count} files of {size(total)} are whole, {len(bad)} are not{hint}")
    return 1 if bad and not args.yes else 0


def _prune(args: argparse.Namespace, store: Store, console: Console) -> int:
    import time

    from gnomon.state.ssd.manifest import Manifest

    if args.max is None and args.older_than is None:
        raise CommandError("say what to prune: --max GiB, --older-than DAYS, or both", 2)
    most = None if args.max is None else round(args.max * GiB)
    before = None if args.older_than is None else time.time() - args.older_than * 86_400
    # In memory, what would go is told without touching the index; --yes works on the index itself, which servers share.
    manifest = Manifest(store.home if args.yes else None)
    try:
        store.reconcile(manifest, remove=args.yes)
        gone, freed = 0, 0
        while (one := manifest.oldest()) is not None:
            if (most is None or manifest.total()[1] <= most) and (before is None or one.used >= before):
                break
            if args.yes:
                store.remove(one.entry)
            manifest.drop([one.entry.name])
            gone, freed = gone + 1, freed + one.size
        left = manifest.total()
    finally:
        manifest.close()
    if args.json:
        told = {"files": gone, "bytes": freed, "left": left[0], "left_bytes": left[1], "removed": bool(args.yes)}
        print(json.dumps(told))
    elif args.yes:
        console.print(f"removed {gone} files, {size(freed)}; {left[0]} of {size(left[1])} are left")
    else:
        console.print(f"{gone} files of {size(freed)} would go; nothing was touched. To remove: --yes")
    return 0


def _explain(args: argparse.Namespace, store: Store, console: Console) -> int:
    from gnomon.state.ssd.offline import explain

    tokens, decode = _prompt(args)
    told = explain(_all(store, None if args.json else console), tokens)
    rows: list[dict[str, Any]] = [
        {
            "identity": one.identity,
            "namespace": one.namespace,
            "about": store.described(one.identity),
            "usable_tokens": one.usable,
            "known_tokens": one.known,
            "prompt": list(one.ours),
            "stored": list(one.theirs),
            "why": one.why,
        }
        for one in told
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        model = Path(row["about"].get("model", "?")).name
        console.print(f"{row['identity'][:12]} {model}, namespace {row['namespace'][:12]}", markup=False)
        console.print(f"  {row['usable_tokens']} of {len(tokens)} tokens have a state, {row['known_tokens']} are known")
        console.print(f"  {row['why']}", markup=False, soft_wrap=True)
        if row["stored"]:
            console.print(
                f"  the prompt goes on {decode(row['prompt'])}, stored is {decode(row['stored'])}", markup=False
            )
    if not rows:
        console.print("nothing stored begins like this prompt")
    return 0


def _prompt(args: argparse.Namespace) -> tuple[tuple[int, ...], Callable[[Sequence[int]], str]]:
    """The prompt's tokens, and how to show tokens."""
    if args.tokens is not None:
        try:
            ids = json.loads(args.tokens.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CommandError(f"--tokens {args.tokens} can't be read: {error}") from error
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise CommandError(f"--tokens {args.tokens} has to hold a JSON array of whole numbers")
        return tuple(ids), repr
    if args.text is None or args.tokenizer is None:
        raise CommandError("explain needs the prompt: --tokens FILE, or --text FILE with --tokenizer DIR", 2)
    from gnomon.chat.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(args.tokenizer)
        text = args.text.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    return tuple(tokenizer.encode(text)), lambda ids: repr(tokenizer.decode(ids, hide=False))


def _when(seconds: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
