"""The real command, as a process."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import gnomon

from gnomon import logs
from gnomon.cli._verbs import CommandError, verbs
from gnomon.cli.main import check_platform, main
from gnomon.config import LogConfig


def test_config_prints_value_and_origin():
    done = gnomon("config", "--port=9000", "--api-key", "sesame", "--json", GNOMON_BATCH="2")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["http.port"] == {"value": 9000, "origin": "--port", "flag": "--port", "variable": "GNOMON_PORT"}
    assert (shown["engine.batch"]["value"], shown["engine.batch"]["origin"]) == (2, "GNOMON_BATCH")
    assert shown["engine.queue"]["origin"] == "built-in"
    assert "sesame" not in done.stdout


def test_config_as_a_table(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}')
    done = gnomon("config", str(tmp_path), "--temp", "0.25", COLUMNS="40")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    # A pipe has no width: nothing may be folded or cut, or it can't be searched.
    assert lines["--generation-checkpoint"].split()[1:] == ["unset", "built-in", "GNOMON_GENERATION_CHECKPOINT"]
    assert lines["--temperature"].split()[:3] == ["--temperature", "0.25", "--temp"]
    assert f"generation_config of {tmp_path}" in lines["--top-k"]
    assert lines["--port"].split()[1:] == ["8080", "built-in", "GNOMON_PORT"]


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["config", "--prot", "1"], {}, "unknown flag --prot; did you mean --port?"),
        (["serve", "--tempreature=1"], {}, "unknown flag --tempreature; did you mean --temperature?"),
        (["--prot", "1"], {}, "unknown flag --prot; did you mean --port?"),
        (["config", "--por", "1"], {}, "unknown flag --por; did you mean --port?"),
        (["config", "--zzz"], {}, "unknown flag --zzz (see gnomon config --help)"),
        (["config", "one", "two"], {}, "unexpected argument 'two'"),
        (["genrate"], {}, "no verb is called 'genrate'; did you mean generate?"),
        (["config", "--port", "70000"], {}, "--port: 70000 is out of range: [0, 65535]"),
        (["config"], {"GNOMON_PORT": "x"}, "GNOMON_PORT: 'x' is not a whole number"),
        (["help", "nothing"], {}, "no verb is called 'nothing'"),
        (["generate"], {}, "the prompt is empty"),
        (["generate", "--raw", "--system", "s", "--prompt", "p"], {}, "--system needs the chat template"),
    ],
)
def test_wrong_usage_says_what_and_exits_2(argv, environ, says):
    done = gnomon(*argv, **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_verb_and_every_flag():
    root = gnomon("help").stdout
    assert all(verb.name in root for verb in verbs())
    assert gnomon("--help").stdout == root
    serve = gnomon("help", "serve").stdout
    assert gnomon("serve", "--help").stdout == serve
    assert "--prefill-chunk" in serve
    assert "GNOMON_SHUTDOWN_TIMEOUT_MS" in serve


def test_version():
    assert gnomon("--version").stdout == gnomon("version").stdout
    assert gnomon("version").stdout.startswith("gnomon ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    done = gnomon("completion", shell)
    assert done.returncode == 0
    assert "--prefill-chunk" in done.stdout.replace("prefill-chunk", "--prefill-chunk")
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_unknown_variables_are_warned_of():
    done = gnomon("config", GNOMON_PROT="1")
    assert done.returncode == 0
    assert "GNOMON_PROT is no variable of Gnomon" in done.stderr


def test_a_reader_that_goes_away_is_no_error():
    code = "from gnomon.cli.main import main; import sys; sys.exit(main(['help', 'serve']))"
    piped = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" | head -c 10'], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in piped.stderr
    assert "Exception" not in piped.stderr


@pytest.mark.parametrize(
    ("system", "machine", "says"), [("Windows", "AMD64", "WSL2"), ("Darwin", "x86_64", "Apple silicon")]
)
def test_platforms_that_are_refused(system, machine, says):
    with pytest.raises(CommandError, match=says):
        check_platform(system, machine)


@pytest.mark.parametrize(("system", "machine"), [("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")])
def test_platforms_that_are_not(system, machine):
    check_platform(system, machine)


def test_windows_through_the_command(monkeypatch, capsys):
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert main(["version"], {}) == 1
    assert "WSL2" in capsys.readouterr().err


def test_the_command_line_needs_no_device():
    """What answers `config`, `help` and `--server` must start fast and without MLX."""
    code = (
        "import sys; from gnomon.cli.main import main; main(['config', '--json'])\n"
        "heavy = [m for m in ('mlx', 'mlx_lm', 'transformers', 'fastapi', 'numpy') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def restore_logging():
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("gnomon").level)
    yield
    root.handlers[:], level, own = before
    root.setLevel(level)
    logging.getLogger("gnomon").setLevel(own)


def test_log_lines(capsys, restore_logging):
    logs.setup(LogConfig(log_format="json"))
    token = logs.request_id.set("chatcmpl-1")
    logging.getLogger("gnomon.x").info("took %d ms", 5, extra={"rows": 2})
    logs.request_id.reset(token)
    logging.getLogger("other").info("chatter")
    logging.getLogger("other").warning("heard")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "gnomon.x", "took 5 ms")
    assert (first["request_id"], first["rows"]) == ("chatcmpl-1", 2)
    assert second["message"] == "heard"
    assert "request_id" not in second
    logs.setup(LogConfig())
    logging.getLogger("gnomon").warning("plain", extra={"request_id": "r7"})
    assert capsys.readouterr().err.endswith("warning gnomon [r7] plain\n")
    logging.getLogger("gnomon").warning("model %s", "x\n12:00:00 error gnomon forged\x1b[2J\u2028")
    assert capsys.readouterr().err.endswith("warning gnomon model x\\n12:00:00 error gnomon forged\\x1b[2J\\u2028\n")


def test_supported_model_types_are_those_of_mlx_lm():
    """Every model file mlx-lm ships has a verdict."""
    done = gnomon("models", "--supported", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["model_type"]: row for row in json.loads(done.stdout)}
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None
    folder = Path((package.submodule_search_locations or [""])[0]) / "models"
    shipped = {path.stem for path in folder.glob("*.py") if "class Model(" in path.read_text("utf-8")}
    assert shipped <= set(rows)
    assert rows["llama"]["runs"] is True
    assert rows["mistral"]["same_as"] == "llama"


def test_models_lists_what_is_in_the_cache(tmp_path):
    empty = gnomon(
        "models", "--json", "--cache", str(tmp_path), HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hub")
    )
    assert (empty.returncode, json.loads(empty.stdout)) == (0, [])
