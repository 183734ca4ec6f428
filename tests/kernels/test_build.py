import dataclasses
import json
import logging
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

from gnomon.kernels import build, dispatch, native

FAKE = """#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    print("fake compiler 1.0"); sys.exit(0)
with open({log!r}, "a") as log:
    log.write(("link" if "-shared" in sys.argv else "compile") + "\\n")
time.sleep({seconds})
if {fails}:
    print("kernel.cpp:1: error: out of luck", file=sys.stderr); sys.exit(1)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(b"object")
"""


def fake_compiler(folder: Path, *, fails: bool = False, seconds: float = 0.0) -> str:
    path = folder / "fake-c++"
    path.write_text(FAKE.format(python=sys.executable, log=str(folder / "calls"), fails=fails, seconds=seconds))
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().split() if path.exists() else []


def fake_build(folder: Path) -> build.Build:
    return build.ensure(folder / "cache", compiler=fake_compiler(folder), flags=("-DTEST",))


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found"):
        build.ensure(tmp_path, compiler="no-such-compiler")


def test_a_build_that_was_carried_here_serves_without_a_compiler(tmp_path: Path) -> None:
    made = fake_build(tmp_path)
    manifest = made.path.parent / "build.json"

    def carry(**changes: object) -> build.Toolchain:
        fields = {"flags": (), "machine": f"{platform.machine()} another processor", "compiler": "/gone/c++", **changes}
        tools = dataclasses.replace(made.toolchain, **fields)
        manifest.write_text(
            json.dumps({**json.loads(manifest.read_text()), "key": tools.key, **dataclasses.asdict(tools)})
        )
        return tools

    carried = carry()
    said: list[str] = []
    found = build.ensure(tmp_path / "cache", compiler="no-such-compiler", progress=said.append)
    assert (found.path, found.toolchain) == (made.path, carried)
    assert "no C++ compiler found" in said[0]
    # With a compiler, the machine's own build.
    assert build.ensure(tmp_path / "cache", compiler=made.toolchain.compiler, flags=("-DOWN",)).path != made.path
    others = {
        "mlx": "0.0.1",
        "python": "cpython-30",
        "sources": "other",
        "isas": ("vliw",),
        "machine": "vax 1",
        "flags": ("-fsanitize=thread",),
    }
    for name, value in others.items():
        carry(**{name: value})
        with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found"):
            build.ensure(tmp_path / "cache", compiler="no-such-compiler")


def test_a_build_is_for_the_best_instruction_set_unless_more_are_asked_for(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path)
    best = build.toolchain(compiler)
    assert best.isas == build.cpu_isas()[:1]
    every = build.toolchain(compiler, isas=[*build.cpu_isas(), "portable"])
    assert set(build.compile_commands(every, tmp_path)) - set(build.compile_commands(best, tmp_path)) == {
        f"isa_{name}" for name in {*build.cpu_isas(), "portable"} - set(best.isas)
    }
    assert every.key != best.key


def test_a_failing_build_names_the_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="out of luck"):
        build.ensure(tmp_path / "cache", compiler=fake_compiler(tmp_path, fails=True))
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_what_killed_builds_left_is_removed_at_the_next_one(tmp_path: Path) -> None:
    """Not what others are working in, nor what was just made."""
    cache = tmp_path / "kernels"
    for name in ("killed", "working", "old", "new"):
        (cache / f"building-{name}" / "result").mkdir(parents=True)
    cache.chmod(0o700)
    os.utime(cache / "building-old", (1, 1))
    (cache / "building-killed" / build.OWNER).touch()
    with FileLock(cache / "building-working" / build.OWNER), pytest.raises(build.BuildError):
        build.ensure(cache, compiler=fake_compiler(tmp_path, fails=True))
    assert sorted(path.name for path in cache.glob("building-*")) == ["building-new", "building-working"]


def test_a_library_that_does_not_work_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="fail their first run"):
        build.ensure(tmp_path / "cache", compiler=fake_compiler(tmp_path))
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_a_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(build.BuildError, match="can't be written"):
        build.ensure(tmp_path / "file" / "cache", compiler=fake_compiler(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(build.BuildError, match="can't be written"):
        build.ensure(tmp_path / "cache", compiler=fake_compiler(tmp_path))


@pytest.mark.parametrize("policy", ["native", "auto"])
def test_starting_falls_back_with_one_warning(
    policy: native.Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_extension", None)
    with caplog.at_level(logging.WARNING):
        kernels = native.start(policy, cache=tmp_path / "cache", compiler=fake_compiler(tmp_path, fails=True))
    assert not kernels.native
    assert not dispatch.thread.native
    assert "out of luck" in (kernels.reason or "")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert kernels.stats()["reason"] == kernels.reason


def test_a_build_is_made_once_and_kept(tmp_path: Path) -> None:
    first = fake_build(tmp_path)
    made = calls(tmp_path)
    second = build.ensure(tmp_path / "cache", compiler=first.toolchain.compiler, flags=("-DTEST",))
    assert made.count("link") == 1
    assert calls(tmp_path) == made
    assert second.path == first.path
    assert (first.seconds > 0, second.seconds) == (True, 0.0)


def test_concurrent_first_starts_build_once(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, seconds=0.1)
    code = (
        "import sys; from pathlib import Path; from gnomon.kernels import build\n"
        "print(build.ensure(Path(sys.argv[1]), compiler=sys.argv[2], flags=('-DTEST',)).path)"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "cache"), compiler]
    both = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {p.communicate(timeout=120)[0].strip() for p in both}
    assert [p.returncode for p in both] == [0, 0, 0]
    assert len(paths) == 1
    assert calls(tmp_path).count("link") == 1


def test_everything_that_must_match_is_in_the_key(tmp_path: Path) -> None:
    tools = build.toolchain(fake_compiler(tmp_path))
    for field in dataclasses.fields(tools):
        value = getattr(tools, field.name)
        other = dataclasses.replace(
            tools, **{field.name: (*value, "other") if isinstance(value, tuple) else f"{value}x"}
        )
        assert other.key != tools.key, field.name


def test_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_build(tmp_path)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(build.BuildError, match="belongs to user"):
        build.load(made)


@pytest.mark.parametrize("which", ["directory", "library", "manifest"])
def test_what_others_can_write_is_refused(tmp_path: Path, which: str) -> None:
    made = fake_build(tmp_path)
    path = {"directory": made.path.parent, "library": made.path, "manifest": made.path.parent / "build.json"}[which]
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(build.BuildError, match="can be written by others"):
        build.load(made)


def test_a_shared_cache_directory_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(build.BuildError, match="can be written by others"):
        build.ensure(cache, compiler=fake_compiler(tmp_path))


def test_a_changed_library_is_refused(tmp_path: Path) -> None:
    made = fake_build(tmp_path)
    made.path.write_bytes(b"something else")
    with pytest.raises(build.BuildError, match="is not the one that was made there"):
        build.load(made)


def test_another_mlx_is_refused_before_importing(tmp_path: Path) -> None:
    made = fake_build(tmp_path)
    tools = dataclasses.replace(made.toolchain, mlx="0.0.1")
    manifest = made.path.parent / "build.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "key": tools.key}))
    with pytest.raises(build.BuildError, match=r"built for mlx 0\.0\.1"):
        build.load(dataclasses.replace(made, toolchain=tools))


def test_a_folder_named_mlx_on_the_path_has_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx is a namespace package: a stranger's folder of that name becomes a part of it."""
    (tmp_path / "mlx").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = build.Toolchain("c++", "0", "0", "0", "0", "x86_64", ("avx2",), "0")
    includes = [flag for flag in build.compile_commands(tools, tmp_path)["all"] if flag.endswith("mlx/include")]
    assert len(includes) == 1
    assert (Path(includes[0]) / "mlx" / "allocator.h").is_file()


def test_the_sources_are_in_the_package() -> None:
    names = {p.name for p in build.SOURCES.iterdir()}
    assert {
        "bindings.cpp",
        "isa_avx2.cpp",
        "isa_avx512.cpp",
        "isa_avx512vnni.cpp",
        "integer.inl",
        "isa_neon.cpp",
        "isa_portable.cpp",
        "linear.inl",
    } <= names


def test_a_forked_child_has_its_own_pool(kernels: ModuleType) -> None:
    kernels.set_threads(2)
    pid = os.fork()
    if pid == 0:
        kernels.set_threads(3)
        os._exit(kernels.threads())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert kernels.threads() == 2


def test_wrong_settings_are_refused(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match="instruction set sse9"):
        kernels.set_isa("sse9")
    with pytest.raises(ValueError, match="threads must be 1 to 1024"):
        kernels.set_threads(0)
