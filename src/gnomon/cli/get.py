"""`gnomon get`: a model from the hub, or from a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli._library import conversion_progress, size, stderr, store_of
from gnomon.cli._verbs import CommandError
from gnomon.config import Config

if TYPE_CHECKING:
    from gnomon.hub.get import Hub

NAME = "get"
HELP = "download a model from the hub (resumable, verified), or convert a GGUF file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="REPO[@REV]|FILE.gguf", help="a repository on the hub, or a local GGUF file")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")
    parser.add_argument("--file", metavar="NAME.gguf", help="convert this GGUF file of the repository")
    parser.add_argument("--name", metavar="NAME", help="what to call a converted model (default: the file's name)")
    parser.add_argument(
        "--widen",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what K-quants of a GGUF file become (default: bfloat16; float32 keeps their values)",
    )


def run(args: argparse.Namespace) -> int:
    from gnomon.hub.errors import HubError

    config: Config = args.config
    try:
        path = _get(args, config)
    except HubError as error:
        raise CommandError(str(error)) from error
    print(path)
    return 0


def _get(args: argparse.Namespace, config: Config) -> Path:
    source: str = args.source
    local = Path(source).expanduser()
    if local.is_file():
        if args.revision or args.file:
            raise CommandError("--revision and --file go with a repository, not with a local file", 2)
        return _convert(args, config, local, {"id": args.name or local.stem})
    if source.endswith(".gguf"):
        raise CommandError(f"there is no file {source}")
    from gnomon.hub.get import Hub

    repo, _, revision = source.partition("@")
    if revision and args.revision and revision != args.revision:
        raise CommandError(f"two revisions are named: {revision!r} and {args.revision!r}", 2)
    return _from_hub(args, config, Hub(), repo, revision or args.revision)


def _from_hub(args: argparse.Namespace, config: Config, hub: Hub, repo: str, revision: str | None) -> Path:
    from gnomon.hub.get import MODEL_FILES
    from gnomon.hub.headers import missing_files

    names = [file.name for file in hub.list_files(repo, revision)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if args.file:
        if args.file not in ggufs:
            raise CommandError(f"{repo} has no {args.file}; its GGUF files: {', '.join(ggufs) or 'none'}")
        snapshot = _download(hub, repo, revision, (args.file,))
        return _convert(args, config, snapshot / args.file, {"id": f"{repo}/{Path(args.file).stem}", "repo": repo})
    if not any(name.endswith(".safetensors") for name in names):
        hint = f"; pick one of its GGUF files with --file: {', '.join(ggufs)}" if ggufs else ""
        raise CommandError(f"{repo} has no safetensors weights{hint}")
    snapshot = _download(hub, repo, revision, MODEL_FILES)
    if missing := missing_files(snapshot):
        raise CommandError(
            f"{repo} was downloaded to {snapshot}, but lacks {', '.join(missing)}: it is no model mlx-lm can load"
        )
    return snapshot


def _download(hub: Hub, repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub.utils import disable_progress_bars
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    disable_progress_bars()
    console = stderr()
    tasks: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console,
        disable=not console.is_terminal,
    ) as bars:  # fmt: skip

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
                if not console.is_terminal:
                    console.print(f"gnomon: {name} ({size(total)})", markup=False)
            bars.update(tasks[name], completed=done)

        return hub.get(repo, revision, progress, patterns)


def _convert(args: argparse.Namespace, config: Config, source: Path, origin: dict[str, Any]) -> Path:
    from gnomon.hub.package import sha256
    from gnomon.models.gguf import UnsupportedGGUF
    from gnomon.models.starter import Converter

    store, console = store_of(config), stderr()
    name = args.name or source.stem
    path = store.path(name)
    with store.lock(name, lambda text: console.print(f"gnomon: {text}", markup=False)):
        if path.exists():
            raise CommandError(f"{path} exists already: choose another --name, or remove it")
        with conversion_progress(console, name) as progress:
            try:
                return store.make(name, source, Converter(progress, args.widen), {**origin, "sha256": sha256(source)})
            except (UnsupportedGGUF, OSError) as error:
                raise CommandError(f"{source.name} can't be converted: {error}") from error
