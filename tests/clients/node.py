"""Node packages from the npm registry, installed into a cache directory, and scripts run with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from filelock import FileLock


def installed(name: str, version: str) -> Path:
    """A directory where the package can be imported; skips when node or the registry is out of reach."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    plain = name.strip("@").replace("/", "-")
    home = Path(platformdirs.user_cache_dir("gnomon", appauthor=False)) / "tests" / f"{plain}-node-{version}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(str(home) + ".lock"):
        begun = home / "begun"
        if begun.exists() or not (home / "node_modules" / name / "package.json").is_file():
            begun.touch()
            (home / "package.json").write_text("{}")
            try:
                ran = _npm(home, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"{name}@{version}")
                reached = ran.returncode == 0 or _npm(home, "ping").returncode == 0
            except subprocess.TimeoutExpired:
                pytest.skip("the npm registry does not answer in time")
            if not reached:
                pytest.skip("the npm registry is not reachable")
            if ran.returncode:
                pytest.fail(ran.stderr)
            begun.unlink()
    return home


def _npm(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["npm", *argv], cwd=home, capture_output=True, text=True, timeout=200)


def report(home: Path, name: str, timeout: float = 400, **environment: str) -> dict[str, Any]:
    """What the script `name` beside this file prints, as JSON."""
    script = home / name
    shutil.copyfile(Path(__file__).with_name(name), script)
    ran = subprocess.run(
        ["node", str(script)], env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
