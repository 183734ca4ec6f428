"""`gnomon serve --distributed ring`: two processes on loopback hold one model, and one of them answers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from cli_process import clean_environment, gnomon
from tiny_directory import make

from gnomon.bench.http import free_port
from gnomon.config import EngineConfig, KernelConfig
from gnomon.engine.api import SamplingParams
from gnomon.engine.engine import load
from gnomon.engine.settings import Settings

GREEDY = {"temperature": 0, "max_tokens": 24}
PROMPTS = ("abc", "the same words again and again", "x" * 300)


def free_ports(number: int) -> list[int]:
    ports = set[int]()
    while len(ports) < number:
        ports.add(free_port())
    return list(ports)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, str]:
    """What one process answers."""
    settings = Settings(EngineConfig(prefill_chunk=64), kernels=KernelConfig(kernels="stock"))
    with load(model, settings) as engine:
        greedy = SamplingParams(temperature=0)
        return {text: engine.generate(text, max_tokens=24, sampling=greedy).text for text in PROMPTS}


def launch(model: Path, directory: Path, *argv: str, others: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    """Both processes as mlx.launch starts them; `others` go to rank 1 alone."""
    hosts = directory / "hosts.json"
    hosts.write_text(json.dumps([f"127.0.0.1:{port}" for port in free_ports(2)]))
    command = [
        sys.executable,
        "-m",
        "gnomon.cli.main",
        "serve",
        str(model),
        "--port",
        "0",
        "--no-open",
        "--distributed",
        "ring",
    ]
    return [
        subprocess.Popen(
            [*command, *argv, *(others if rank else ())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean_environment(), "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]


@contextmanager
def serving(model: Path, directory: Path, *argv: str) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    processes = launch(model, directory, *argv)
    try:
        lead = processes[0]
        assert lead.stdout is not None
        line = lead.stdout.readline()
        found = re.search(r"serves \S+ at (http://\S+)", line)
        assert found, lead.communicate(timeout=300)
        yield processes, found[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=300) as response:
        return json.load(response)


def complete(url: str, prompt: str, **fields: Any) -> str:
    return post(url, "/v1/completions", {"prompt": prompt, **GREEDY, **fields})["choices"][0]["text"]


def leave(url: str) -> None:
    """Ask for a long answer and go when it begins."""
    port = int(url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": "abc", "max_tokens": 90_000, "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while b"data:" not in found:
            found += client.recv(65536)


def test_two_processes_answer_as_one_does(model: Path, alone: dict[str, str], tmp_path: Path) -> None:
    with serving(model, tmp_path, "--prefill-chunk", "64") as (processes, url):
        assert get(f"{url}/stats")["distributed"] == {"rank": 0, "size": 2}
        assert {prompt: complete(url, prompt) for prompt in PROMPTS} == alone
        # All at once, the long one a second time from the cache.
        texts: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda prompt=prompt: texts.update({prompt: complete(url, prompt)}))
            for prompt in PROMPTS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == alone
        assert get(f"{url}/stats")["prompt_cache"]["hits"] > 0
        drawn = [complete(url, "abc", temperature=1, seed=7, n=1) for _ in range(2)]
        assert drawn[0] == drawn[1]
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        answer = post(
            url,
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 40,
                "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            },
        )
        assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (1, 2)
        for body, path in (({"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}, "/v1/completions"),):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(url, path, body)
            assert refused.value.code == 400
            assert "split over processes" in json.load(refused.value)["error"]["message"]
        # One who leaves in the middle leaves in both, and the others go on.
        leave(url)
        assert complete(url, "abc") == alone["abc"]
        deadline = time.monotonic() + 300
        while get(f"{url}/stats")["requests"]["cancelled"] != 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGTERM)
        assert [process.wait(300) for process in processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, "idle"])
def test_the_end_of_one_process_is_the_end_of_all(model: Path, tmp_path: Path, how: Any) -> None:
    with serving(model, tmp_path) as (processes, url):
        if how == "idle":
            processes[1].kill()
        else:
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps({"prompt": "abc", "max_tokens": 90_000, "stream": True, "ignore_eos": True}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                assert response.readline().startswith(b"data:")
                os.kill(processes[1].pid, how)
                told = response.read().decode()
            assert "engine_failed" in told
            assert "rank 1 has ended" in told
        assert processes[0].wait(300) == 1
        assert processes[0].stderr is not None
        assert "rank 1" in processes[0].stderr.read()


@pytest.mark.slow
def test_the_others_end_with_rank_0(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (processes, _):
        processes[0].kill()
        begun = time.monotonic()
        assert processes[1].wait(300) == 1
        assert time.monotonic() - begun < 30
        assert processes[1].stderr is not None
        assert "rank 0 has ended" in processes[1].stderr.read()


@pytest.mark.slow
def test_settings_that_differ_are_refused_before_a_weight_is_read(model: Path, tmp_path: Path) -> None:
    processes = launch(model, tmp_path, others=("--prefill-chunk", "128"))
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode for process in processes)
    assert all("prefill_chunk is 128 there and 2048 here" in " ".join(text.split()) for text in said), said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--isolate",), "--isolate can't be used with --distributed"),
        (("--generation-checkpoint", "8"), "--generation-checkpoint can't be used with --distributed"),
        (("--draft-kind", "ngram"), "--draft-kind and --fill can't be used with --distributed"),
        (("--kv-quant", "8"), "--kv-quant can't be used with --distributed"),
        (("--kernels", "native"), "--kernels native can't be used with --distributed"),
        (("--memory-budget", "1"), "--memory-budget can't be used with --distributed"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
)
@pytest.mark.slow
def test_what_does_not_compose_is_refused(model: Path, tmp_path: Path, flags: tuple[str, ...], why: str) -> None:
    processes = launch(model, tmp_path, *flags)
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode for process in processes)
    assert why in " ".join(said[0].split())


@pytest.mark.slow
def test_one_process_alone_is_told_how_to_start_several(model: Path) -> None:
    done = gnomon("serve", str(model), "--distributed", "ring", "--port", "0")
    assert done.returncode
    assert "--distributed ring" in done.stderr
