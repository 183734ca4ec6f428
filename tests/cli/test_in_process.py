"""The command with a real (tiny, random) model: in its own process, and serving."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import mlx_lm
import pytest
from cli_process import clean_environment, gnomon, serving
from tiny_directory import make

from gnomon.cli._model import check_backend
from gnomon.cli._verbs import CommandError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def oracle(model):
    """What mlx-lm makes of a prompt, greedily."""
    loaded, tokenizer = mlx_lm.load(str(model))

    def answer(prompt: str | list[int], tokens: int) -> str:
        return mlx_lm.generate(loaded, tokenizer, prompt, max_tokens=tokens)

    answer.tokenizer = tokenizer
    return answer


def test_generate_raw_equals_mlx_lm(model, oracle):
    done = gnomon(
        "generate", "--model", str(model), "--raw", "--prompt", "abc", "--temp", "0", "--max-tokens", "12", "--l1"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == oracle("abc", 12) + "\n"


def test_generate_through_the_template_equals_mlx_lm(model, oracle):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "abc"}]
    ids = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    done = gnomon(
        "generate", str(model), "--system", "s", "--prompt", "abc", "--temp", "0", "--max-tokens", "12", "--l1"
    )
    assert done.stdout == oracle(ids, 12) + "\n"


def test_a_seed_gives_the_same_again(model):
    def said(seed: str) -> list[str]:
        done = gnomon(
            "chat", str(model), "--temp", "1", "--max-tokens", "16", "--seed", seed, stdin="abc\n/reset\nabc\n"
        )
        assert done.returncode == 0
        half = len(done.stdout) // 2
        return [done.stdout[:half], done.stdout[half:]]

    first, again = said("3")
    assert first == again
    assert said("4")[0] != first


def test_chat_in_process(model, oracle):
    done = gnomon("chat", str(model), "--temp", "0", "--max-tokens", "8", "--l1", stdin="a\n/reset\na\n")
    assert (done.returncode, done.stdout.count("\n")) == (0, 2)
    ids = oracle.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    first, second = done.stdout.split("\n")[:2]
    assert first == second == oracle(ids, 8)


def test_a_base_model_is_told_of_raw(tmp_path):
    base = make(tmp_path / "base", template=None)
    done = gnomon("generate", str(base), "--prompt", "a")
    assert done.returncode == 1
    assert "no chat template" in done.stderr
    assert "--raw" in done.stderr
    assert gnomon("generate", str(base), "--raw", "--prompt", "a", "--max-tokens", "2").returncode == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--context-limit", "3"], "maximum context length is 3 tokens"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_failures_are_told_without_a_traceback(model, argv, says):
    done = gnomon("generate", str(model), "--prompt", "hello", *argv)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_model_is_told_without_a_traceback(tmp_path):
    broken = make(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"junk")
    for verb in (["generate", "--prompt", "x"], ["serve", "--port", "0"]):
        done = gnomon(*verb, "--model", str(broken))
        assert done.returncode == 1
        assert "broken can't be loaded" in done.stderr
        assert "Traceback" not in done.stderr


def test_interrupting_generate(model):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gnomon.cli.main",
            "gen",
            str(model),
            "--prompt",
            "a",
            "--temp",
            "0",
            "--max-tokens",
            "90000",
            "--kernels",
            "stock",  # building native ones would be told on stderr
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == b""


def test_serve_answers_and_drains(model, oracle):
    with serving("serve", str(model), "--max-tokens", "5", "--l1") as (process, url):
        with urllib.request.urlopen(f"{url}/health") as response:
            assert response.read() == b'{"status": "ok"}'
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            assert json.load(response)["data"][0]["id"] == "tiny"
        done = gnomon("generate", "--server", url, "--raw", "--prompt", "abc", "--temp", "0", "--max-tokens", "12")
        assert done.stdout == oracle("abc", 12) + "\n"
        capped = gnomon("chat", "--server", url, "--temp", "0", stdin="abc\n")
        ids = oracle.tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], add_generation_prompt=True)
        assert capped.stdout == oracle(ids, 5) + "\n"
        # Refused before the model is even looked for.
        port = url.rsplit(":", 1)[1]
        taken = gnomon("serve", "/nowhere", "--port", port)
        assert taken.returncode == 1
        assert f"port {port} is taken" in taken.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        # Prompts are not logged unasked. (As a word: the hex of a request's id may hold these letters too.)
        assert process.stderr is not None
        assert not re.search(r"\babc\b", process.stderr.read())


def test_a_bare_command_serves(model):
    # Without a verb, flags and a path are those of serve.
    with serving(str(model), "--log-prompts", "--log-format", "json") as (process, url):
        said = gnomon(
            "generate", "--server", url, "--raw", "--prompt", "abc", "--max-tokens", "4", "--temp", "0"
        ).stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr]
    prompt, answer = (line for line in lines if line["logger"] == "gnomon.prompts")
    assert prompt["message"] == "prompt of 3 tokens: abc"
    assert answer["message"] == f"answer 0 (length): {said[:-1]}"
    assert prompt["request_id"] == answer["request_id"]


def test_a_missing_backend_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(CommandError, match=r"gnomon\[cpu\].*gnomon\[cuda\]"):
        check_backend()
