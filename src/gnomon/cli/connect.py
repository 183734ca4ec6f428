"""`gnomon connect AGENT`: the configuration that points a coding agent at a running server."""

from __future__ import annotations

import argparse
import unicodedata
from pathlib import Path
from typing import Any

from gnomon.cli._agents import AGENTS, Served, Setup
from gnomon.cli._verbs import CommandError
from gnomon.config import ClientConfig, Config

NAME = "connect"
HELP = "print what points a coding agent at the server; with --write, put it into the agent's settings"
GROUPS = (ClientConfig,)
DEFAULT_SERVER = "http://127.0.0.1:8080"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", choices=sorted(AGENTS))
    parser.add_argument(
        "--write", action="store_true", help="merge it into the agent's file; the old one is kept beside"
    )
    parser.add_argument("--file", metavar="PATH", help="the agent's file, where it isn't the usual one")


def run(args: argparse.Namespace) -> int:
    config: Config = args.config
    setup = AGENTS[args.agent](ask(config.client))
    path = Path(args.file).expanduser() if args.file else setup.file(Path.home())
    if args.write:
        _write(args.agent, setup, path)
    else:
        if path is not None:
            print(f"# {path}")
        print(setup.shown)
        print()
    print(f"# then\n{setup.start}")
    return 0


def _write(agent: str, setup: Setup, path: Path | None) -> None:
    from gnomon.cli._settings_file import SettingsError, merged_json, merged_toml, new_file, put

    if path is None or setup.kind == "steps":
        raise CommandError(f"{agent} keeps its settings where only it writes; without --write they are shown to enter")
    try:
        old = path.read_text("utf-8") if path.exists() else ""
        if setup.value is not None:
            text = merged_json(old, setup.value)
        else:
            text = (merged_toml if setup.kind == "toml" else new_file)(old, setup.text)
        kept = put(path, text)
    except (OSError, UnicodeDecodeError, SettingsError) as error:
        raise CommandError(
            f"{path} was left as it is: {error}. Without --write the lines are shown to paste"
        ) from error
    print(f"# {path} written" + (f"; what it held is in {kept}" if kept is not None else ""))


def ask(client: ClientConfig) -> Served:
    """What the server says of itself. Raises CommandError when none answers, refuses the key, or says what no file can hold."""
    import httpx

    url = (client.server or DEFAULT_SERVER).rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--server: agents need an http:// or https:// URL, got {url!r}", 2)
    key = client.api_keys[0] if client.api_keys else None
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no server answers at {url} ({error}); start one, or name it with --server") from error
    if response.status_code == 401:
        raise CommandError(f"{url} wants a key: set GNOMON_API_KEY or --api-key")
    try:
        model: Any = response.json()["data"][0]
        name, context = model["id"], model["context_window"]
    except (ValueError, LookupError, TypeError) as error:
        raise CommandError(f"{url} answers /v1/models with status {response.status_code} and is no Gnomon") from error
    if not isinstance(name, str) or not isinstance(context, int):
        raise CommandError(f"{url} serves a model without a name or a context")
    for what, text in (("the model's id", name), ("the key", key or ""), ("--server", url)):
        # Settings and shells are made of lines: what a server says must not begin one.
        if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text):
            raise CommandError(f"{what} holds control characters")
    return Served(url, name, context, key)
