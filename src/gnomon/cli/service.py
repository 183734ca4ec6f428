"""`gnomon service install|uninstall|status`: the server as a service of the user's, under systemd or launchd."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gnomon.cli._unit import FLUSH_SECONDS, LABEL, MODULE, UNIT, Service, agent, unit
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, resolve

NAME = "service"
HELP = "run the server at login and again after a fault: gnomon service install MODEL --port 9000"
ACTIONS = ("install", "uninstall", "status")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be written and run")
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="ARGUMENT ...", help="install: what gnomon serve is to be given"
    )


def run(args: argparse.Namespace) -> int:
    words, dry = list(args.words), args.dry_run
    # All that follows the action is the rest to argparse, which keeps or drops `--` as its version likes.
    while words[:1] in (["--dry-run"], ["--"]):
        dry |= words.pop(0) == "--dry-run"
    if words and args.action != "install":
        raise CommandError(f"{args.action} takes no {words[0]!r}", 2)
    manager = Launchd() if platform.system() == "Darwin" else Systemd()
    if args.action == "install":
        return _install(manager, _service(args, tuple(words)), dry)
    if args.action == "uninstall":
        return _uninstall(manager, dry)
    if dry:
        _show(manager.status())
        return 0
    if not manager.path.exists():
        print(f"not installed: there is no {manager.path}")
        return 3
    return _call(manager.status()).returncode


class Systemd:
    """The user's own manager."""

    program = "systemctl"

    @property
    def path(self) -> Path:
        import platformdirs

        return Path(platformdirs.user_config_dir("systemd", appauthor=False)) / "user" / UNIT

    def text(self, service: Service) -> str:
        return unit(service)

    def start(self) -> list[list[str]]:
        return [self._run("daemon-reload"), self._run("enable", UNIT), self._run("restart", UNIT)]

    def stop(self) -> list[list[str]]:
        return [self._run("disable", "--now", UNIT)]

    def forget(self) -> list[list[str]]:
        return [self._run("daemon-reload")]

    def status(self) -> list[str]:
        return self._run("status", "--no-pager", UNIT)

    def hint(self) -> str:
        return "it runs while you are logged in; to keep it running: loginctl enable-linger. Log: journalctl --user -u gnomon"

    def _run(self, *words: str) -> list[str]:
        return [self.program, "--user", *words]


class Launchd:
    """The agents of the user's session."""

    program = "launchctl"

    @property
    def path(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    @property
    def log(self) -> Path:
        return Path.home() / "Library" / "Logs" / "gnomon.log"

    def text(self, service: Service) -> str:
        return agent(service, self.log)

    def start(self) -> list[list[str]]:
        return [*self.stop(), [self.program, "bootstrap", self._domain, str(self.path)]]

    def stop(self) -> list[list[str]]:
        # One that isn't loaded is an error to launchctl, and what was wanted.
        return [["sh", "-c", 'launchctl bootout "$1" 2>/dev/null || true', "sh", f"{self._domain}/{LABEL}"]]

    def forget(self) -> list[list[str]]:
        return []

    def status(self) -> list[str]:
        return [self.program, "print", f"{self._domain}/{LABEL}"]

    def hint(self) -> str:
        return f"log: {self.log}"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


def _service(args: argparse.Namespace, arguments: tuple[str, ...]) -> Service:
    """The service of these arguments.

    Raises CommandError or ConfigError for what `gnomon serve` wouldn't take, and for keys in the open.
    """
    parser: argparse.ArgumentParser = args.parsers["serve"]
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise CommandError(f"gnomon serve takes no {unknown[0]!r}", 2)
    config = resolve(parsed, {})
    if config.http.api_keys:
        raise CommandError("--api-key would stand in the service's file for all to read: use --api-key-file", 2)
    surroundings: Config = args.config
    here = [origin.name for origin in surroundings.origins.values() if origin.kind == "environment"]
    if here:
        print(
            f"gnomon: the service won't see {', '.join(sorted(here))}: give the flags in their place", file=sys.stderr
        )
    try:
        return Service(
            sys.executable,
            arguments,
            Path.cwd(),
            int(config.http.shutdown_timeout) + FLUSH_SECONDS,
            reloads=config.http.api_key_file is not None,
        )
    except ValueError as error:
        raise CommandError(str(error), 2) from error


def _install(manager: Systemd | Launchd, service: Service, dry: bool) -> int:
    from gnomon.cli._settings_file import SettingsError, put

    text = manager.text(service)
    if dry:
        print(f"# {manager.path}\n{text}")
        for command in manager.start():
            _show(command)
        return 0
    _require(manager)
    _check_ours(manager.path)
    try:
        put(manager.path, text, keep=False)
    except SettingsError as error:
        raise CommandError(f"{manager.path}: {error}") from error
    _all(manager.start())
    print(f"installed: {manager.path}\n{manager.hint()}")
    return 0


def _uninstall(manager: Systemd | Launchd, dry: bool) -> int:
    if dry:
        for command in manager.stop():
            _show(command)
        _show(["rm", str(manager.path)])
        for command in manager.forget():
            _show(command)
        return 0
    if not manager.path.exists():
        print(f"not installed: there is no {manager.path}")
        return 0
    _require(manager)
    _check_ours(manager.path)
    _all(manager.stop())
    manager.path.unlink(missing_ok=True)
    _all(manager.forget())
    print(f"removed: {manager.path}")
    return 0


def _require(manager: Systemd | Launchd) -> None:
    if shutil.which(manager.program) is None:
        raise CommandError(f"there is no {manager.program} here; --dry-run prints the file for another supervisor")


def _check_ours(path: Path) -> None:
    try:
        if path.exists() and MODULE.encode() not in path.read_bytes():
            raise CommandError(f"{path} was not made by gnomon and is left as it is; move it away first")
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error}") from error


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, check=False)
    except OSError as error:
        raise CommandError(f"{command[0]} can't be run: {error}") from error


def _all(commands: Sequence[Sequence[str]]) -> None:
    for command in commands:
        done = _call(command)
        if done.returncode:
            raise CommandError(f"{' '.join(command)} failed with status {done.returncode}")


def _show(command: Sequence[str]) -> None:
    import shlex

    print("$", shlex.join(command))
