"""`gnomon service`: systemd's own parser reads back what was written, and no unit of somebody else's is touched."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.cli._unit import Service, agent, escaped, unit
from gnomon.cli.main import main

ANALYZE = shutil.which("systemd-analyze")
NASTY = (
    "a b", 'q"q', "it's", "back\\slash\\n", "100%h", "$HOME", "${PATH}", "$$", ";", "", "é🙂", "#x", "a\\", "-", "@x", "`x`", "*",
    "--system=x y", "%%", "{}", "!", " ",
)  # fmt: skip


def made(*arguments: str, directory: Path = Path("/tmp"), reloads: bool = False) -> Service:
    return Service("/bin/true", arguments, directory, 150, reloads)


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
def test_systemd_reads_the_arguments_back(tmp_path: Path) -> None:
    directory = tmp_path / "100%h a $b"
    directory.mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    path = tmp_path / "gnomon.service"
    service = made(*NASTY, directory=directory, reloads=True)
    path.write_text(unit(service))
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", "--user", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "SYSTEMD_LOG_LEVEL": "debug"},
        check=False,
    )
    dump = done.stdout + done.stderr
    if "Command Line:" not in dump:
        pytest.skip(f"systemd-analyze tells no commands here: {dump[-200:]}")
    assert not re.search(rf"{re.escape(str(path))}:\d+:", dump), dump
    told = re.search(r"Command Line: (/bin/true .*)", dump)
    assert told is not None
    # The dump puts words into double quotes where they need it.
    words = [
        re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word
        for word in re.findall(r'"(?:[^"\\]|\\.)*"|\S+', told[1])
    ]
    # systemd.service(5): of variables it looks at later, `$$` is one dollar sign.
    assert [word.replace("$$", "$") for word in words] == list(service.command)
    assert f"WorkingDirectory: {directory}\n" in dump
    assert "Restart: on-failure" in dump


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))))
def test_no_word_leaves_its_quotes(text: str) -> None:
    inside = escaped(text)[1:-1]
    # systemd.syntax(7): inside double quotes only a backslash escapes.
    assert re.fullmatch(r'(?:[^"\\]|\\["\\])*', inside)
    assert re.fullmatch(r"(?:[^%]|%%)*", inside)
    assert re.fullmatch(r"(?:[^$]|\$\$)*", inside)
    assert inside.replace('\\"', '"').replace("\\\\", "\\").count('"') == text.count('"')


def test_modules_lying_about_are_not_run(tmp_path: Path) -> None:
    for name in ("gnomon", "json", "platformdirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('evil ran')")
    command = Service(sys.executable, (), tmp_path, 1).command
    start = [*command[: command.index("serve")], "version"]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_no_unit_can_hold() -> None:
    for bad in ("a\nExecStartPre=/bin/evil", "a\0", "\x1b[2J"):
        with pytest.raises(ValueError, match="control characters"):
            made(bad)
        with pytest.raises(ValueError, match="control characters"):
            made(directory=Path("/tmp") / bad)
    with pytest.raises(ValueError, match="final backslash"):
        made(directory=Path("/tmp/a\\"))


def test_launchd_reads_the_arguments_back() -> None:
    service = made(*NASTY)
    told = plistlib.loads(agent(service, Path("/l/g.log")).encode())
    assert told["ProgramArguments"] == list(service.command)
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert (told["ExitTimeOut"], told["Umask"], told["StandardErrorPath"]) == (150, 0o077, "/l/g.log")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with programs that write down how they are called; `fail` makes them fail."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemctl", "launchctl"):
        script = programs / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >>"{tmp_path}/calls"\n! test -e "{tmp_path}/fail"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def calls(home: Path) -> list[str]:
    path = home / "calls"
    said = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return said


def service(*argv: str, **environ: str) -> int:
    return main(["service", *argv], environ)


def test_a_life_under_systemd(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / ".config" / "systemd" / "user" / "gnomon.service"
    assert service("status") == 3
    assert service("uninstall") == 0
    assert calls(home) == []
    assert service("install", "org/model", "--port", "9000", "--shutdown-timeout-ms", "10000") == 0
    text = path.read_text()
    assert '"serve" "--no-open" "org/model" "--port" "9000"' in text
    assert "\nTimeoutStopSec=40\n" in text
    assert "ExecReload" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert calls(home) == [
        "systemctl --user daemon-reload",
        "systemctl --user enable gnomon.service",
        "systemctl --user restart gnomon.service",
    ]
    assert "loginctl enable-linger" in capsys.readouterr().out
    assert service("install", "--api-key-file", "/k") == 0
    assert "ExecReload=/bin/kill -HUP $MAINPID" in path.read_text()
    assert list(path.parent.iterdir()) == [path]
    calls(home)
    assert service("status") == 0
    assert calls(home) == ["systemctl --user status --no-pager gnomon.service"]
    assert service("uninstall") == 0
    assert calls(home) == ["systemctl --user disable --now gnomon.service", "systemctl --user daemon-reload"]
    assert not path.exists()


def test_a_life_under_launchd(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    path = home / "Library" / "LaunchAgents" / "local.gnomon.plist"
    assert service("install", "org/model") == 0
    assert plistlib.loads(path.read_bytes())["ProgramArguments"][-1] == "org/model"
    domain = f"gui/{os.getuid()}"
    assert calls(home) == [f"launchctl bootout {domain}/local.gnomon", f"launchctl bootstrap {domain} {path}"]
    assert service("status") == 0
    assert calls(home) == [f"launchctl print {domain}/local.gnomon"]
    (home / "fail").touch()
    assert service("uninstall") == 0
    assert not path.exists()


def test_a_dry_run_touches_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("install", "uninstall", "status"):
        assert service("--dry-run", action) == service(action, "--dry-run") == service(action, "--dry-run", "--") == 0
    shown = capsys.readouterr().out
    assert "WantedBy=default.target" in shown
    assert "$ systemctl --user enable gnomon.service" in shown
    assert calls(home) == []
    assert sorted(path.name for path in home.iterdir()) == ["bin"]


def test_other_peoples_units_stay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / ".config" / "systemd" / "user" / "gnomon.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/usr/bin/gnomon-the-sundial\n")
    for action in ("install", "uninstall"):
        assert service(action) == 1
        assert "was not made by gnomon" in capsys.readouterr().err
    assert "sundial" in path.read_text()
    assert calls(home) == []


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["status", "x"], 2, "status takes no 'x'"),
        (["uninstall", "--port", "1"], 2, "uninstall takes no '--port'"),
        (["install", "--prot", "1"], 2, "--prot"),
        (["install", "--port", "70000"], 2, "--port"),
        (["install", "model", "other"], 2, "other"),
        (["install", "--api-key", "open-secret"], 2, "use --api-key-file"),
        (["install", "a\nExecStartPre=/bin/evil"], 2, "control characters"),
    ],
)
def test_what_is_not_installed(
    argv: list[str], status: int, says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service(*argv) == status
    told = capsys.readouterr().err
    assert says in told
    assert "open-secret" not in told
    assert calls(home) == []


def test_a_manager_that_fails_or_is_missing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "fail").touch()
    assert service("install", GNOMON_PORT="9") == 1
    told = capsys.readouterr().err
    assert "systemctl --user daemon-reload failed with status 1" in told
    assert "won't see GNOMON_PORT" in told
    monkeypatch.setenv("PATH", "/nowhere")
    assert service("install") == 1
    assert "there is no systemctl here" in capsys.readouterr().err
