"""A server as a service of the user's: a unit of systemd, an agent of launchd."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

UNIT = "gnomon.service"
LABEL = "local.gnomon"
MODULE = "gnomon.cli.main"
"""Stands in every file written here, and tells them from others."""
FLUSH_SECONDS = 30
"""What is left to write after the drain before the server is killed."""


@dataclass(frozen=True, slots=True)
class Service:
    """What is run: the interpreter, the arguments of `gnomon serve`, where, and how long it may take to end (seconds)."""

    python: str
    arguments: tuple[str, ...]
    directory: Path
    stop_seconds: int
    reloads: bool = False
    """Whether SIGHUP reads something again, and doesn't end it."""

    def __post_init__(self) -> None:
        for text in (*self.command, str(self.directory)):
            if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
                raise ValueError(f"{text!r} holds control characters, which a service's file can't")
        if "$" in self.python or self.directory.name.endswith("\\"):
            raise ValueError(f"{self.python} in {self.directory} can't be written into a unit: $ or a final backslash")

    @property
    def command(self) -> tuple[str, ...]:
        # -P: modules come from the installation alone, and not from the directory where the service starts.
        return (self.python, "-P", "-m", MODULE, "serve", "--no-open", *self.arguments)


def escaped(argument: str) -> str:
    """One word of systemd's ExecStart: quoted, without specifiers (%) and variables ($). systemd.service(5), "Command lines"."""
    for special, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        argument = argument.replace(special, written)
    return f'"{argument}"'


def unit(service: Service) -> str:
    """The text of a systemd user unit."""
    reload = ["ExecReload=/bin/kill -HUP $MAINPID"] if service.reloads else []
    return "\n".join(
        [
            "# Made by gnomon service install",
            "[Unit]",
            "Description=Gnomon, a local language-model server",
            "StartLimitIntervalSec=300",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(map(escaped, service.command))}",
            *reload,
            # Taken as it stands to the line's end, apart from specifiers.
            f"WorkingDirectory={str(service.directory).replace('%', '%%')}",
            "Restart=on-failure",
            "RestartSec=5",
            "# Wrong usage doesn't become right by another try.",
            "RestartPreventExitStatus=2",
            f"TimeoutStopSec={service.stop_seconds}",
            "UMask=0077",
            "NoNewPrivileges=yes",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def agent(service: Service, log: Path) -> str:
    """The text of a launchd agent that writes its log to a file. launchd.plist(5)."""
    import plistlib

    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.directory),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": service.stop_seconds,
            "Umask": 0o077,
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    ).decode()
