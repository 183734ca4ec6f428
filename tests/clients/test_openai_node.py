"""The official Node client against a live server. It is installed from the npm registry into a cache directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from fake_engine import KEY, MODEL, FakeEngine, Live, eventually
from filelock import FileLock

VERSION = "7.59.0"
SCRIPT = Path(__file__).with_name("openai_client.mjs")


@pytest.fixture(scope="module")
def package() -> Path:
    """A directory where `import "openai"` works; skips when node or the registry is out of reach."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    home = Path(platformdirs.user_cache_dir("gnomon", appauthor=False)) / "tests" / f"openai-node-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(str(home) + ".lock"):
        if not (home / "node_modules" / "openai" / "package.json").is_file():
            (home / "package.json").write_text("{}")
            installed = subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"openai@{VERSION}"],
                cwd=home,
                capture_output=True,
                text=True,
                timeout=300,
            )
            if installed.returncode:
                reached = subprocess.run(["npm", "ping"], cwd=home, capture_output=True, timeout=120).returncode == 0
                if not reached:
                    pytest.skip("the npm registry is not reachable")
                pytest.fail(installed.stderr)
    return home


def test_the_node_client(live: Live[FakeEngine], package: Path) -> None:
    script = package / SCRIPT.name
    shutil.copyfile(SCRIPT, script)
    environment = {**os.environ, "BASE_URL": live.url + "/v1", "API_KEY": KEY, "MODEL": MODEL}
    ran = subprocess.run(["node", str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    request_id = report["whole"].pop("requestId")
    assert request_id.startswith("req_")
    assert report["whole"] == {"content": "Héllo", "finish": "stop", "second": "J", "usage": 5}
    assert report["stream"] == {"content": "Héllo", "usage": 5}
    assert report["accumulated"] == "Héllo"
    assert report["reasoning"] == "because"
    assert report["completion"] == "Héllo"
    assert report["models"] == [MODEL]
    assert report["bad"]["name"] == "BadRequestError"
    assert (report["bad"]["status"], report["bad"]["param"]) == (400, "n")
    assert "n must be at most 8, got 9" in report["bad"]["message"]
    assert "row 0 met a NaN" in report["midstream"]["message"]
    eventually(lambda: not live.engine.open)
