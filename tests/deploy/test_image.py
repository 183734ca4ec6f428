"""The Dockerfile's steps, taken in a root that debootstrap makes: Debian 12 with its own Python, which pyproject takes as well as the
image's. Needs root, apt-get and the network. Of the CUDA target the wheels, gigabytes of them, are resolved and not fetched."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_dockerfile import BASE, ROOT, STAGES, variables

MIRROR = "http://deb.debian.org/debian"
TRUSTED = Path("/etc/ssl/certs/ca-certificates.crt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    """What a container has of the kernel's."""
    with ExitStack() as stack:
        for kind, options in (("proc", ["-t", "proc", "proc"]), ("dev", ["--bind", "/dev"])):
            subprocess.run(["mount", *options, str(root / kind)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(root / kind)], check=False)
        yield


def inside(
    root: Path, command: list[str], environment: Mapping[str, str], user: str = "root", directory: str = "/"
) -> str:
    """What a command says in the root; its failure is the test's."""
    entered = [
        "chroot",
        f"--userspec={user}",
        str(root),
        "sh",
        "-c",
        f"cd {shlex.quote(directory)} && exec {shlex.join(command)}",
    ]
    done = subprocess.run(entered, env=dict(environment), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() or shutil.which("apt-get") is None:
        pytest.skip("debootstrap needs root and apt-get")
    directory = tmp_path_factory.mktemp("image")
    tool = shutil.which("debootstrap")
    environment = dict(os.environ)
    if tool is None:
        subprocess.run(["apt-get", "download", "-qq", "debootstrap"], cwd=directory, check=False, capture_output=True)
        packages = list(directory.glob("debootstrap_*.deb"))
        if not packages:
            pytest.skip("debootstrap can't be fetched")
        subprocess.run(["dpkg", "-x", str(packages[0]), str(directory / "tool")], check=True)
        tool = str(directory / "tool" / "usr" / "sbin" / "debootstrap")
        environment["DEBOOTSTRAP_DIR"] = str(directory / "tool" / "usr" / "share" / "debootstrap")
    path = directory / "root"
    wanted = "ca-certificates,python3,python3-pip,python3-venv"
    command = [tool, "--variant=minbase", f"--include={wanted}", "bookworm", str(path), MIRROR]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    # As in Docker's Python images: `python` is there, and pip may install into the system.
    (path / "usr" / "bin" / "python").symlink_to("python3")
    for marker in path.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    if TRUSTED.is_file():
        shutil.copy(TRUSTED, path / "etc" / "ssl" / "certs" / TRUSTED.name)
    with mounted(path):
        yield path
    shutil.rmtree(path, ignore_errors=True)


@dataclass
class Built:
    """What the steps of a stage leave to those that come after."""

    environment: dict[str, str]
    user: str = "root"
    directory: str = "/"


def build(root: Path, steps: Sequence[tuple[str, str]], built: Built, run: Callable[[str, Built], None]) -> Built:
    """Take the steps, each RUN by `run`."""
    environment, user, directory = dict(built.environment), built.user, built.directory
    for step, value in steps:
        match step:
            case "RUN":
                run(value, Built(environment, user, directory))
            case "ENV":
                environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
            case "COPY":
                *names, target = shlex.split(value)
                for name in names:
                    place = (
                        root / target.lstrip("/") if target.endswith("/") is False else root / target.lstrip("/") / name
                    )
                    place.parent.mkdir(parents=True, exist_ok=True)
                    if (ROOT / name).is_dir():
                        shutil.copytree(
                            ROOT / name, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                        )
                    else:
                        shutil.copy(ROOT / name, place)
            case "WORKDIR":
                directory = value
            case "USER":
                user = value
            case _:
                pass
    return Built(environment, user, directory)


@pytest.fixture(scope="module")
def base(root: Path) -> Built:
    """Both targets' common stage."""
    environment = {"PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    environment |= {name: str(TRUSTED) for name in ("SSL_CERT_FILE", "PIP_CERT") if TRUSTED.is_file()}
    return build(root, BASE.steps, Built(environment), lambda command, at: taken(root, command, at))


def taken(root: Path, command: str, at: Built) -> str:
    return inside(root, ["sh", "-c", command], at.environment, at.user, at.directory)


def test_the_cuda_image_installs_what_it_names(root: Path, base: Built) -> None:
    """All of its steps but one: of the installation every wheel is found for the image's system, and none is fetched."""
    installed: list[str] = []

    def run(command: str, at: Built) -> None:
        wanted = command.removeprefix("uv pip install --system --no-cache ")
        assert wanted != command, f"a step that is no installation has to be taken: {command}"
        # `--dry-run` would build nothing and fetch nothing but metadata; it says what it would install.
        said = subprocess.run(
            [
                "chroot",
                str(root),
                "sh",
                "-c",
                f"cd {at.directory} && uv pip install --system --no-cache --dry-run {wanted}",
            ],
            env=at.environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert said.returncode == 0, said.stderr[-2000:]
        installed.extend(re.findall(r"^ \+ (\S+)", said.stderr, flags=re.M))

    built = build(root, STAGES["cuda"].steps, base, run)
    assert (built.user, built.directory) == ("gnomon", "/home/gnomon")
    assert built.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    versions = dict(one.split("==") for one in installed if "==" in one)
    pins = dict(re.findall(r'"([a-z0-9-]+)==([^"]+)"', (ROOT / "pyproject.toml").read_text()))
    assert versions["mlx-cuda-13"] == versions["mlx"] == pins["mlx"]
    assert {"nvidia-cudnn-cu13", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13"} <= set(versions)
    assert "mlx-cpu" not in versions
    assert "torch" not in versions
    assert {name: pins[name] for name in versions if name in pins} == {n: v for n, v in versions.items() if n in pins}


def test_the_cpu_image_is_built_and_starts(root: Path, base: Built) -> None:
    built = build(root, STAGES["cpu"].steps, base, lambda command, at: taken(root, command, at))
    environment, user, directory = built.environment, built.user, built.directory
    assert (user, directory) == ("gnomon", "/home/gnomon")
    environment["HOME"] = directory
    (entry,), (command,) = BASE.of("ENTRYPOINT"), BASE.of("CMD")
    program = json.loads(entry)
    said = inside(root, [*program, "version"], environment, user, directory)
    assert "0.1.0" in said
    assert "mlx-cpu" in inside(root, [*program, "doctor"], environment, user, directory)
    computed = "import mlx.core as mx; print((mx.arange(4) + 1).sum().item())"
    assert inside(root, ["python", "-c", computed], environment, user, directory).strip() == "10"
    # It listens everywhere and wants a key.
    start = ["chroot", f"--userspec={user}", str(root), *program, *json.loads(command)]
    refused = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode != 0
    assert "--api-key" in refused.stderr
    assert variables(BASE)["GNOMON_CACHE"].startswith("/cache")
    owner = (root / "cache").stat()
    assert (owner.st_uid, owner.st_gid) == (1000, 1000)
