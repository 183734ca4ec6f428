"""The JSON Schema project's own test cases, as the source package of `jsonschema` carries them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from filelock import FileLock

VERSION = "4.26.0"
FILE = f"jsonschema-{VERSION}.tar.gz"


@dataclass(frozen=True)
class Group:
    """A schema with instances of known validity: (what it shows, instance, whether it is valid)."""

    file: str
    about: str
    schema: Any
    cases: tuple[tuple[str, Any, bool], ...]


def fetched() -> Path:
    """The package, from the registry into a cache; skips when no registry answers."""
    home = Path(platformdirs.user_cache_dir("gnomon", appauthor=False)) / "tests" / "json-schema-suite"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(str(home) + ".lock"):
        if not (home / FILE).is_file():
            pip = ["uvx", "pip"] if shutil.which("uvx") else [sys.executable, "-m", "pip"]
            wanted = ["--no-deps", "--no-binary", "jsonschema", "--dest", str(home), f"jsonschema=={VERSION}"]
            try:
                ran = subprocess.run([*pip, "download", *wanted], capture_output=True, text=True, timeout=300)
            except subprocess.TimeoutExpired:
                pytest.skip("the package registry does not answer in time")
            if ran.returncode:
                pytest.skip(f"the package registry can't be reached: {ran.stderr.strip().splitlines()[-1:]}")
    return home / FILE


def groups(draft: str) -> Iterator[Group]:
    """The mandatory cases of a draft."""
    with tarfile.open(fetched()) as archive:
        for member in archive.getmembers():
            _, _, name = member.name.partition(f"/json/tests/{draft}/")
            content = archive.extractfile(member) if name.endswith(".json") and "/" not in name else None
            if content is None:
                continue
            for group in json.load(content):
                cases = tuple((case["description"], case["data"], case["valid"]) for case in group["tests"])
                yield Group(name, group["description"], group["schema"], cases)
