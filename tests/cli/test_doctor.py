"""`gnomon doctor` on machines that lack one thing after the other."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

import pytest
from caches import converted

from gnomon.cli import _model, doctor
from gnomon.cli._verbs import CommandError
from gnomon.cli.main import main
from gnomon.kernels import build, native

Look = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Look:
    """Run doctor in this process with empty directories of its own: its status, and its findings by subject."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def run(*words: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
        places = {"GNOMON_CACHE": str(tmp_path / "cache"), "GNOMON_KERNEL_CACHE": str(tmp_path / "kernels")}
        status = main(["doctor", "--json", "--port", "0", *words], {**places, **environ})
        said = json.loads(capsys.readouterr().out)
        assert said["works"] == (status == 0)
        return status, {finding["subject"]: finding for finding in said["findings"]}

    return run


def test_a_sound_machine(look: Look, tmp_path: Path) -> None:
    status, found = look("--kernels", "stock")
    assert status == 0
    assert "mlx 0." in found["versions"]["found"]
    assert (found["backend"]["state"], found["backend"]["found"]) == ("ok", "MLX computes on cpu")
    assert "asked for" in found["kernels"]["found"]
    assert found["cache"]["found"].startswith(f"{tmp_path / 'cache'}, ")
    assert not (tmp_path / "cache").exists(), "looking makes nothing"
    assert found["model"]["state"] == "note"
    assert "SmolLM2" in found["model"]["remedy"]


def test_what_kernels_are_on_an_nvidia_gpu(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_cuda", lambda: True)
    monkeypatch.setattr("gnomon.models.backend.backend", lambda: "cuda")

    def kernels(*words: str) -> str:
        status, found = look(*words)
        assert (status, found["kernels"]["state"]) == (0, "ok")
        return found["kernels"]["found"]

    monkeypatch.setattr("gnomon.kernels.cuda.sources.capability", lambda: 89)
    assert kernels() == "stock operations (what auto means on this GPU)"
    monkeypatch.setattr("gnomon.kernels.cuda.sources.capability", lambda: 90)
    assert kernels().startswith("native for CUDA, compiled when first used: quantized_matmul")
    assert kernels("--kernels", "native").startswith("native for CUDA, compiled when first used: quantized_matmul")
    assert kernels("--l1") == "stock operations (asked for)"
    assert kernels("--kernels", "int8") == "stock operations (int8 ones are for CPUs, this is cuda)"


def test_models_that_are_here_and_one_that_is_not(look: Look, tmp_path: Path) -> None:
    converted(tmp_path / "cache", "little")
    assert look("--kernels", "stock")[1]["model"]["found"] == "1 here: little"
    status, found = look("--kernels", "stock", "--model", "nope")
    assert (status, found["model"]["state"]) == (1, "broken")
    assert "'nope'" in found["model"]["found"]


def test_no_compiler_is_told_with_what_to_install(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    status, found = look("--kernels", "native")
    assert (status, found["kernels"]["state"]) == (0, "note")
    assert "no C++ compiler" in found["kernels"]["found"]
    assert "apt install g++" in found["kernels"]["remedy"]


def test_kernels_not_built_and_tampered_with(look: Look, tmp_path: Path) -> None:
    try:
        tools = build.toolchain()
    except build.BuildError as error:
        pytest.skip(f"no toolchain: {error}")
    assert "not built yet" in look("--kernels", "native")[1]["kernels"]["found"]
    home = tmp_path / "kernels" / tools.key
    home.mkdir(parents=True, mode=0o700)
    for name in (f"{build.MODULE}.so", "build.json"):
        (home / name).write_text("{}")
        (home / name).chmod(0o600)
    status, found = look("--kernels", "native")
    assert (status, found["kernels"]["state"]) == (1, "broken")
    assert "is not the one that was made there" in found["kernels"]["found"]
    assert "--rebuild" in found["kernels"]["remedy"]


def test_how_decode_steps_on_cuda_are_launched(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "is_cuda", lambda: True)
    monkeypatch.setattr("gnomon.models.backend.backend", lambda: "cuda")
    _, found = look("--kernels", "native", "--no-cuda-graph")
    assert found["kernels"]["found"].startswith("native for CUDA")
    assert (found["launches"]["state"], "asked for" in found["launches"]["found"]) == ("ok", True)
    try:
        tools = build.toolchain(extension=build.CUDA)
    except build.BuildError as error:
        pytest.skip(f"no toolchain: {error}")
    assert "not built yet" in look("--kernels", "native")[1]["launches"]["found"]
    home = tmp_path / "kernels" / tools.key
    home.mkdir(parents=True, mode=0o700)
    for name in (f"{build.CUDA.module}.so", "build.json"):
        (home / name).write_text("{}")
        (home / name).chmod(0o600)
    status, found = look("--kernels", "native")
    assert (status, found["launches"]["state"]) == (1, "broken")
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    _, found = look("--kernels", "native")
    assert found["launches"]["state"] == "note"
    assert "kernel by kernel" in found["launches"]["found"]
    assert "--no-cuda-graph" in found["launches"]["remedy"]


def test_directories_that_cant_be_used(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    status, found = look("--kernels", "stock", GNOMON_CACHE=str(tmp_path / "file"))
    assert (status, found["cache"]["state"]) == (1, "broken")
    assert "--cache" in found["cache"]["remedy"]
    assert found["kernel cache"]["state"] == "ok"
    monkeypatch.setattr(doctor, "_free", lambda _: 100 << 20)
    status, found = look("--kernels", "stock")
    assert (status, found["cache"]["state"]) == (1, "broken")
    assert "104.9 MB free" in found["cache"]["found"]


def test_a_taken_port(look: Look) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, found = look("--kernels", "stock", "--port", str(port))
    assert (status, found["port"]["state"]) == (0, "note")
    assert f"127.0.0.1:{port} can't be bound" in found["port"]["found"]


@pytest.mark.parametrize(
    ("compiled", "writes", "state"), [(True, False, "ok"), (False, True, "ok"), (False, False, "note")]
)
def test_bytecode(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool, writes: bool, state: str
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    spec = find_spec("fastapi")
    assert spec is not None
    assert spec.origin is not None
    if compiled:
        cached = Path(cache_from_source(spec.origin))
        cached.parent.mkdir(parents=True)
        cached.touch()
    _, found = look("--kernels", "stock")
    assert found["bytecode"]["state"] == state
    assert ("--compile-bytecode" in (found["bytecode"]["remedy"] or "")) is (state == "note")


def test_a_missing_backend(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CommandError("MLX has no backend here (libmlx.so): install one with pip install 'gnomon[cpu]'")

    monkeypatch.setattr(_model, "check_backend", missing)
    status, found = look("--kernels", "stock")
    assert (status, found["backend"]["state"]) == (1, "broken")
    assert found["backend"]["found"] == "MLX has no backend here (libmlx.so)"
    assert found["backend"]["remedy"] == "install one with pip install 'gnomon[cpu]'"


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "0", "--kernels", "stock"], {}) in (0, 1)
    said = capsys.readouterr().out
    assert "ok      backend: MLX computes on cpu\n" in said
