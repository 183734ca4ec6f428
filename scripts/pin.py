"""Write the exact version of every package this project resolves to into pyproject.toml.

A lock file would carry the addresses its packages came from; constraints carry names and versions only.
Run `uv run python scripts/pin.py` after changing a dependency.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "# pins: begin (scripts/pin.py)", "# pins: end"


def resolved(lock: Path) -> dict[str, set[str]]:
    """Names and versions in a uv lock file; a package has several versions where platforms differ."""
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads(lock.read_text())["package"]:
        if "registry" in package["source"]:
            versions.setdefault(package["name"], set()).add(package["version"])
    return versions


def main() -> None:
    """Resolve without the present pins, then write them anew."""
    project = ROOT / "pyproject.toml"
    text = re.sub(rf"\n{re.escape(BEGIN)}.*?{re.escape(END)}\n", "\n", project.read_text(), flags=re.S)
    project.write_text(text)
    subprocess.run(["uv", "lock", "--upgrade", "--quiet"], cwd=ROOT, check=True)
    pins = resolved(ROOT / "uv.lock")
    lines = "".join(f'    "{n}=={next(iter(v))}",\n' for n, v in sorted(pins.items()) if len(v) == 1)
    block = f"\n{BEGIN}\nconstraint-dependencies = [\n{lines}]\n{END}\n"
    project.write_text(
        text.replace('[tool.uv]\ndefault-groups = ["dev"]\n', f'[tool.uv]\ndefault-groups = ["dev"]\n{block}')
    )


if __name__ == "__main__":
    main()
