"""Results on disk, the rebuilt index, provenance, preflight and environment."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from gnomon.bench import preflight as machine_state
from gnomon.bench import provenance as origins
from gnomon.bench.environment import child_environment, neutralised, thread_variables
from gnomon.bench.schema import schema_text
from gnomon.bench.session import Session
from gnomon.bench.store import Store, load

from . import records
from .records import RATE, pairs, run

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_in_docs_is_current() -> None:
    assert (DOCS / "bench-result.schema.json").read_text() == schema_text()


def test_a_run_comes_back_as_it_went(tmp_path: Path) -> None:
    saved = run(pairs([(100.0, 110.0)]))
    assert load(Store(tmp_path).save(saved)) == saved


def test_the_index_holds_what_the_files_hold(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(run(pairs([(100.0, 110.0), (101.0, 111.0)]), id="aaaaaaaa"))
    store.save(run(pairs([(50.0, 55.0)]), id="bbbbbbbb", kind="native"))
    (tmp_path / "20200101T000000Z-ab-old.json").write_text('{"format": 99}')
    (tmp_path / "20200101T000000Z-ab-cut.json").write_text('{"format": 1, "kind"')
    for _ in range(2):
        rebuilt = store.rebuild()
        assert rebuilt.runs == 2
        reasons = {bad.path.name: bad.reason for bad in rebuilt.unreadable}
        assert "format 99, this version reads 1" in reasons["20200101T000000Z-ab-old.json"]
        assert "cut.json" in reasons["20200101T000000Z-ab-cut.json"]
        database = sqlite3.connect(store.index)
        assert database.execute("SELECT id, kind FROM runs ORDER BY id").fetchall() == [
            ("aaaaaaaa", "ab"),
            ("bbbbbbbb", "native"),
        ]
        rates = database.execute("SELECT value, unit FROM metrics WHERE metric = ? ORDER BY value", (RATE,)).fetchall()
        assert rates == [(v, "token/s") for v in (50.0, 55.0, 100.0, 101.0, 110.0, 111.0)]
        database.close()
        store.index.write_bytes(b"not a database")  # the index is only a copy: it may be ruined at any time


def test_every_sample_is_on_disk_before_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path)
    session = Session(store, "ab", "t", origin=records.provenance(), state=records.preflight())
    for count, sample in enumerate(pairs([(100.0, 110.0), (100.0, 110.0)]), 1):
        session.record(sample)
        (path,) = store.files()
        stored = load(path)
        assert len(stored.samples) == count
        assert not stored.complete
    assert not list(tmp_path.glob("*.partial*"))


def test_a_busy_machine_makes_a_run_diagnostic(tmp_path: Path) -> None:
    busy = records.preflight(verdict="busy", problems=("other processes use 50% of the processors",))
    session = Session(Store(tmp_path), "ab", "t", origin=records.provenance(), state=busy)
    assert session.run.diagnostic
    with pytest.raises(machine_state.BusyMachine, match="50%"):
        machine_state.require_quiet(busy)
    machine_state.require_quiet(records.preflight())


class Used:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_preflight_names_every_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_state.CPUWatch, "read", lambda self: 0.25)
    monkeypatch.setattr(psutil, "swap_memory", lambda: Used(used=2 << 30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Used(total=100, available=5))
    monkeypatch.setattr(psutil, "sensors_battery", lambda: Used(power_plugged=False), raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"cpu": [Used(current=95.0)]}, raising=False)
    governor = tmp_path / "governor"
    governor.write_text("powersave\n")
    monkeypatch.setattr(machine_state, "GOVERNOR", governor)
    found = machine_state.preflight(0)
    assert found.verdict == "busy"
    for word in ("25%", "2.0 GiB of swap", "5% of memory", "battery", "powersave", "95 °C"):
        assert any(word in problem for problem in found.problems), word


def test_cpu_watch_counts_others_but_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds passed on the machine, three busy, one of them ours: half of the machine is others'."""
    watch = machine_state.CPUWatch([1])
    monkeypatch.setattr(watch, "_before", (10.0, 20.0))
    monkeypatch.setattr(watch, "_times", lambda: (11.0, 23.0))
    monkeypatch.setattr(watch, "_own_seconds", lambda: 1.0)
    assert watch.read() == pytest.approx(0.5)


def test_swap_growth_voids_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    level = iter([1 << 30, 2 << 30, 6 << 30, 6 << 30])
    monkeypatch.setattr(psutil, "swap_memory", lambda: Used(used=next(level)))
    guard = machine_state.SwapGuard()
    assert guard.disturbance() is None
    assert guard.disturbance() == "swap grew by 4.0 GiB during the sample"
    assert guard.disturbance() is None


def test_thread_variables() -> None:
    found = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "4", "HOME": "/h", "GOTO_NUM_THREADS": "2"}
    assert thread_variables(found) == {"GOTO_NUM_THREADS": "2", "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}
    assert neutralised(found) == ("GOTO_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    assert child_environment({"X": "1"}, found) == {
        "OMP_NUM_THREADS": "4", "HOME": "/h", "PYTHONUNBUFFERED": "1", "X": "1",
    }  # fmt: skip
    assert child_environment({"OPENBLAS_NUM_THREADS": "8"}, found)["OPENBLAS_NUM_THREADS"] == "8"


def _git(root: Path, *arguments: str) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", "-C", str(root), *name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_revision_and_difference(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("one\n")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-qm", "x")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert origins.revision(tmp_path) == (head, False, None)
    (tmp_path / "a").write_text("two\n")
    _, dirty, changed = origins.revision(tmp_path)
    assert dirty
    (tmp_path / "b").write_text("new\n")
    _, _, more = origins.revision(tmp_path)
    assert len({changed, more, None}) == 3
    (tmp_path / "b").unlink()
    assert origins.revision(tmp_path)[2] == changed


def test_revision_outside_git(tmp_path: Path) -> None:
    assert origins.revision(tmp_path) == (None, None, None)


def test_model_content_is_content(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    first, files = origins.model_content(tmp_path / "x")
    assert origins.model_content(tmp_path / "y")[0] == first
    assert files["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    (tmp_path / "y" / "model.safetensors").write_bytes(b"Weights")
    assert origins.model_content(tmp_path / "y")[0] != first
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        origins.model_content(tmp_path)


def test_hashes_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, store = tmp_path / "f", tmp_path / "cache" / "hashes.json"
    file.write_bytes(b"a")
    expected = hashlib.sha256(b"a").hexdigest()
    assert origins.HashCache(store).sha256(file) == expected
    with monkeypatch.context() as patched:
        patched.setattr(origins, "sha256_file", lambda path: pytest.fail("read again"))
        assert origins.HashCache(store).sha256(file) == expected
    file.write_bytes(b"bb")
    assert origins.HashCache(store).sha256(file) == hashlib.sha256(b"bb").hexdigest()
    store.write_text(json.dumps({"format": 99, "hashes": {"x": 1}}))
    assert origins.HashCache(store).sha256(file) == hashlib.sha256(b"bb").hexdigest()
