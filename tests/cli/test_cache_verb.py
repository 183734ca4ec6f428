"""`gnomon cache`: a directory of states without a server, and without MLX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnomon.cli.main import main
from gnomon.state.keys import root_key
from gnomon.state.ssd.format import Entry, Layer, Packed, Tensor
from gnomon.state.ssd.store import Store

OTHER = "from token {} on the nearest stored prompt has other tokens"
IDENTITY = "ab" * 16
ROOT = root_key("a namespace")


def packed(
    parent: bytes, start: int, tokens: tuple[int, ...], kind: Any = "block", layers: tuple[int, ...] = (0, 1)
) -> Packed:
    entry = Entry(IDENTITY, ROOT.hex(), kind, parent, start, tokens, layers, 2)
    tensor = Tensor("F32", (1, 1, len(tokens), 1), bytes(4 * len(tokens)))
    return Packed(entry, [Layer("full", {"length": len(tokens)}, {"keys": tensor}) for _ in layers])


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Tokens 0 to 599 in three blocks, and a branch of 100 others after the first."""
    store = Store(tmp_path)
    store.create()
    store.describe(IDENTITY, {"model": "/models/tiny", "operations": "stock", "device_name": "cpu"})
    parent = ROOT
    for start in (0, 256, 512):
        block = packed(parent, start, tuple(range(start, min(start + 256, 600))))
        store.write(block)
        if start == 0:
            store.write(packed(block.entry.key, 256, tuple(range(1000, 1100))))
        parent = block.entry.key
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    assert main(["cache", *words, "--json"], {}) == status
    return json.loads(capsys.readouterr().out)


def files(disk: Path) -> list[Path]:
    return sorted(disk.glob("*/*/*.safetensors"))


def test_list(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = told(capsys, "list", str(disk))
    assert (row["identity"], row["about"]["model"]) == (IDENTITY, "/models/tiny")
    assert (row["blocks"], row["checkpoints"], row["namespaces"], row["longest_prefix_tokens"]) == (4, 0, 1, 600)
    assert row["bytes"] == sum(file.stat().st_size for file in files(disk))
    assert main(["cache", "list", str(disk)], {}) == 0
    assert "600 tokens" in capsys.readouterr().out


def test_verify_finds_what_is_not_whole_and_removes_it_when_told(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "verify", str(disk))["bad"] == []
    broken = files(disk)[1]
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    said = told(capsys, "verify", str(disk), status=1)
    assert (said["good"], len(said["bad"]), said["removed"]) == (3, 1, False)
    assert str(broken) in said["bad"][0]
    assert broken.exists()
    said = told(capsys, "verify", str(disk), "--yes")
    assert (len(said["bad"]), said["removed"]) == (1, True)
    assert not broken.exists()


def test_prune_takes_the_oldest_ends(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import os

    for age, file in enumerate(sorted(files(disk), key=lambda file: read_start(file))):
        os.utime(file, (1e9 - 1000 * age, 1e9 - 1000 * age))
    sizes = {file: file.stat().st_size for file in files(disk)}
    most = str((sum(sizes.values()) - 100) / (1 << 30))
    assert told(capsys, "prune", str(disk), "--max", most)["files"] == 1
    assert set(files(disk)) == set(sizes)
    assert told(capsys, "prune", str(disk), "--max", most, "--yes") == {
        "files": 1,
        "bytes": next(size for file, size in sizes.items() if not file.exists()),
        "left": 3,
        "left_bytes": sum(size for file, size in sizes.items() if file.exists()),
        "removed": True,
    }
    assert {read_start(file) for file in files(disk)} == {0, 256}
    assert told(capsys, "prune", str(disk), "--older-than", "1", "--yes")["left"] == 0
    assert files(disk) == []


def read_start(file: Path) -> int:
    from gnomon.state.ssd.format import read_header

    return read_header(file).entry.start


@pytest.mark.parametrize(
    ("prompt", "usable", "known", "stored", "why"),
    [
        (range(700), 600, 600, [], "nothing stored goes on after token 600"),
        (range(600), 599, 600, [], "all but the last token have a state"),
        (
            [*range(300), 7, 7, 7],
            300,
            300,
            list(range(300, 312)),
            OTHER.format(300),
        ),
        (
            [*range(256), *range(1000, 1050), 5, 6],
            306,
            306,
            list(range(1050, 1062)),
            OTHER.format(306),
        ),
    ],
)
def test_explain(
    disk: Path, capsys: pytest.CaptureFixture[str], prompt: Any, usable: int, known: int, stored: list[int], why: str
) -> None:
    tokens = disk / "prompt.json"
    tokens.write_text(json.dumps(list(prompt)))
    (row,) = told(capsys, "explain", str(disk), "--tokens", str(tokens))
    assert (row["usable_tokens"], row["known_tokens"], row["stored"], row["why"]) == (usable, known, stored, why)


def test_explain_knows_of_states_that_can_not_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 1 is recurrent: there is a state at 100 only."""
    store, tokens = Store(tmp_path), tmp_path / "prompt.json"
    store.write(packed(ROOT, 0, tuple(range(200)), layers=(0,)))
    store.write(packed(ROOT, 0, tuple(range(100)), "checkpoint", (1,)))
    tokens.write_text(json.dumps(list(range(150))))
    (row,) = told(capsys, "explain", str(tmp_path), "--tokens", str(tokens))
    assert (row["usable_tokens"], row["known_tokens"]) == (100, 150)
    assert row["why"] == "the tokens from 100 to 150 are known, but no file holds a state between them"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["list", "nowhere"], 1, "nowhere holds no states"),
        (["prune", "."], 2, "say what to prune"),
        (["explain", "."], 2, "explain needs the prompt"),
    ],
)
def test_wrong_usage(
    words: list[str],
    status: int,
    message: str,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(disk)
    assert main(["cache", *words], {}) == status
    assert message in capsys.readouterr().err


def test_mlx_is_not_imported(disk: Path) -> None:
    code = (
        "import sys; from gnomon.cli.main import main; "
        f"assert main(['cache', 'list', {str(disk)!r}], {{}}) == 0; "
        f"assert main(['cache', 'verify', {str(disk)!r}], {{}}) == 0; "
        "sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
