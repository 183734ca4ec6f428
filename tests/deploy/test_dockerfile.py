"""The Dockerfile says what pyproject and the command line say. No engine runs here: it is read, and its parts are tried one by one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_engine import FakeEngine, live_server
from packaging.specifiers import SpecifierSet

from gnomon.cli._verbs import verbs
from gnomon.cli.main import build_parser
from gnomon.config import HTTPConfig, resolve
from gnomon.engine.api import Health
from gnomon.kernels.build import COMPILERS
from gnomon.serve.listen import StartupError, bind

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@dataclass
class Stage:
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, name: str) -> list[str]:
        return [value for step, value in self.steps if step == name]


def stages(text: str) -> dict[str, Stage]:
    """The stages by name; a line ends where no backslash stands, and comment lines are none."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            base, _, called = value.partition(" AS ")
            current = found[called] = Stage(base)
        else:
            assert current is not None
            current.steps.append((name, value.strip()))
    return found


STAGES = stages((ROOT / "deploy" / "Dockerfile").read_text("utf-8"))
BASE = STAGES["base"]


def variables(stage: Stage) -> dict[str, str]:
    return dict(pair.split("=", 1) for value in stage.of("ENV") for pair in shlex.split(value))


def test_the_targets_install_the_extras() -> None:
    assert set(STAGES) == {"base", "cpu", "cuda"}
    for target in ("cpu", "cuda"):
        assert STAGES[target].base == "base"
        (command,) = STAGES[target].of("RUN")
        assert shlex.split(command) == [
            "uv",
            "pip",
            "install",
            "--system",
            "--no-cache",
            "--compile-bytecode",
            f".[{target}]",
        ]
        (extra,) = PROJECT["optional-dependencies"][target]
        # The backend is that of the same release.
        assert extra.split(";")[0].split("==")[1].strip() in {
            one.removeprefix("mlx==") for one in PROJECT["dependencies"]
        }
    # Constraints count where uv finds the project's own settings.
    assert BASE.of("WORKDIR") == ["/src"]


def test_python_and_the_compiler() -> None:
    python = re.fullmatch(r"python:(\d+\.\d+)-slim-bookworm", BASE.base)
    assert python is not None
    assert SpecifierSet(PROJECT["requires-python"]).contains(python[1])
    assert any(name in shlex.split(BASE.of("RUN")[0]) for name in COMPILERS)


def test_every_run_step_is_shell() -> None:
    for stage in STAGES.values():
        for command in stage.of("RUN"):
            subprocess.run(["sh", "-n", "-c", command], check=True)


def test_the_build_gets_all_that_the_package_needs() -> None:
    copied = {name for value in BASE.of("COPY") for name in shlex.split(value)[:-1]}
    assert copied >= {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert ignored[0] == "*"
    assert copied == {line[1:] for line in ignored if line.startswith("!")}


def test_it_runs_as_nobody_s_root() -> None:
    assert "--uid 1000 gnomon" in BASE.of("RUN")[2]
    for target in ("cpu", "cuda"):
        assert STAGES[target].of("USER") == ["gnomon"]
        steps = [name for name, _ in STAGES[target].steps]
        assert steps.index("USER") > steps.index("RUN")


def test_what_it_starts_is_a_server_that_wants_a_key() -> None:
    (entry,), (command,) = BASE.of("ENTRYPOINT"), BASE.of("CMD")
    assert json.loads(entry) == list(PROJECT["scripts"])
    _, parsers = build_parser(verbs())
    verb, *rest = json.loads(command)
    given = variables(BASE)
    config = resolve(parsers[verb].parse_args(rest), given)
    assert config.notes == ()
    assert (config.http.host, config.http.no_open) == ("0.0.0.0", True)
    assert BASE.of("EXPOSE") == [str(config.http.port)]
    assert all(given[name].startswith(BASE.of("VOLUME")[0] + "/") for name in ("GNOMON_CACHE", "HF_HOME"))
    with pytest.raises(StartupError, match="--api-key"):
        bind(config.http)


def test_the_health_check_tells_a_ready_server_from_another() -> None:
    (check,) = BASE.of("HEALTHCHECK")
    program, flag, code = json.loads(check[check.index("CMD ") + 4 :])
    assert (program, flag) == ("python", "-c")
    engine = FakeEngine()
    with live_server(engine, http=HTTPConfig(api_keys=("k",))) as live:
        code = code.replace("http://127.0.0.1:8080", live.url)

        def status() -> int:
            return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode

        assert status() == 0
        engine.state = Health("stalled", 100.0, "prefill for 100 s")
        assert status() != 0
        engine.state = Health("ok")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("uv") is None, reason="needs Linux and uv")
def test_the_install_step_gives_a_command_that_runs(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for value in BASE.of("COPY"):
        *names, _ = shlex.split(value)
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / name)
    home = tmp_path / "venv"
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
    (step,) = STAGES["cpu"].of("RUN")
    # Into an environment of its own in place of the image's Python, from the machine's cache.
    step = step.replace("--system --no-cache --compile-bytecode", f"--quiet --python {shlex.quote(str(home))}")
    subprocess.run(["sh", "-ec", step], cwd=source, check=True)
    (entry,) = BASE.of("ENTRYPOINT")
    program = home / "bin" / json.loads(entry)[0]
    said = subprocess.run([str(program), "version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert PROJECT["version"] in said.stdout
    array = "import mlx.core as mx; print((mx.ones(3) * 2).sum().item())"
    done = subprocess.run([str(home / "bin" / "python"), "-c", array], capture_output=True, text=True, check=True)
    assert done.stdout == "6.0\n"
