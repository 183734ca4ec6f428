"""`gnomon serve --model-pool`: real models in real processes, switched, killed and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_lm
import openai
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from cli_process import serving as served_by
from tiny_directory import make

NAMES = ("alpha", "beta", "gamma")
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `gnomon` finds three models, each with a text of its own."""
    root = tmp_path_factory.mktemp("cache")
    for seed, name in enumerate(NAMES):
        made = make(root / "models" / name, seed=seed)
        (made / "gnomon.json").write_text(json.dumps({"format": 1}))
    return root


@contextmanager
def serving(cache: Path, *argv: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI, str]]:
    variables = {"GNOMON_CACHE": str(cache), "HF_HUB_CACHE": str(cache / "hub")}
    with (
        (cache / "log").open("w") as log,
        served_by("serve", "alpha", *argv, "--l1", "--no-open", log=log, **variables) as (process, url),
    ):
        yield process, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), url


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def states(url: str) -> dict[str, str]:
    return {one["id"]: one["state"] for one in get(f"{url}/v1/models")["data"]}


def eventually(condition: Any) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def generated(cache: Path, name: str, tokens: int) -> str:
    """mlx-lm's own greedy answer."""
    model, tokenizer, *_ = mlx_lm.load(str(cache / "models" / name))
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=tokens)


def endless(client: openai.OpenAI, model: str) -> Any:
    return client.chat.completions.create(
        model=model,
        messages=CHAT,  # pyright: ignore[reportArgumentType]
        stream=True,
        max_tokens=50_000,
        extra_body={"ignore_eos": True},
    )


def cached_tokens(client: openai.OpenAI, model: str) -> int:
    """How much of a prompt of some 400 tokens was known."""
    usage = client.completions.create(model=model, prompt="a long one " * 36, max_tokens=2).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def streamed(client: openai.OpenAI, model: str, tokens: int) -> str:
    chunks = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        max_tokens=tokens,
        stream=True,  # pyright: ignore[reportArgumentType]
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.slow
def test_a_switch_and_the_end(cache: Path) -> None:
    with serving(cache, "--model-pool", "1") as (process, client, url):
        assert states(url) == {"alpha": "resident", "beta": "cold", "gamma": "cold"}
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libmlx" not in maps
        first = endless(client, "alpha")
        chunks = iter(first)
        next(chunks)
        assert streamed(client, "beta", 12) == generated(cache, "beta", 12)
        # The first one's answer goes on all the while.
        assert states(url)["alpha"] == "draining"
        next(chunks)
        first.close()
        with pytest.raises(openai.NotFoundError, match="there are alpha, beta, gamma"):
            streamed(client, "delta", 1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_killing_one_of_two_ends_its_own_streams(cache: Path) -> None:
    with serving(cache, "--model-pool", "2") as (_, client, url):
        streamed(client, "beta", 1)
        streams = {name: iter(endless(client, name)) for name in ("alpha", "beta")}
        for stream in streams.values():
            next(stream)
        os.kill(get(f"{url}/stats?model=alpha")["isolation"]["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="was killed by SIGKILL during the answer"):
            list(streams["alpha"])
        for _ in range(50):
            next(streams["beta"])
        assert streamed(client, "alpha", 12) == generated(cache, "alpha", 12)
        assert next(streams["beta"]).model == "beta"
        rows = {one["id"]: one["restarts"] for one in get(f"{url}/stats")["pool"]["models"]}
        assert rows == {"alpha": 1, "beta": 0, "gamma": 0}


@pytest.mark.slow
def test_ten_switches_under_load(cache: Path, tmp_path: Path) -> None:
    """No stream is lost, each model answers as itself, and what the switches took is given back."""
    want = {name: generated(cache, name, 200) for name in NAMES}
    assert len(set(want.values())) == 3
    with serving(cache, "--model-pool", "1", "--ssd-cache", str(tmp_path), "--ssd-cache-min-free", "0") as served:
        process, client, url = served
        server = psutil.Process(process.pid)
        for name in NAMES:
            streamed(client, name, 200)
        eventually(lambda: list(states(url).values()).count("cold") == 2)
        before = server.memory_info().rss, server.num_fds(), len(server.children(recursive=True))
        enough = get(f"{url}/stats")["pool"]["loads"] + 10
        got: list[tuple[str, str]] = []
        broken: list[BaseException] = []

        def load(number: int) -> None:
            # Each asks for another model than before and than the others, until there were ten switches.
            try:
                turn = number
                while get(f"{url}/stats")["pool"]["loads"] < enough:
                    name = NAMES[turn % 3]
                    got.append((name, streamed(client, name, 200)))
                    turn += 1
            except BaseException as error:  # noqa: BLE001  (told by the test)
                broken.append(error)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(900)
        assert not broken
        assert len(got) >= 10
        assert all(text == want[name] for name, text in got)
        pool = get(f"{url}/stats")["pool"]
        assert pool["waiting"] == 0
        eventually(lambda: list(states(url).values()).count("cold") == 2)
        after = server.memory_info().rss, server.num_fds(), len(server.children(recursive=True))
        assert after[0] < before[0] + (16 << 20)
        assert after[1] <= before[1] + 2
        assert after[2] == before[2] == 1
        # A state that a model left on disk is found by its next process.
        assert cached_tokens(client, "alpha") == 0
        streamed(client, "beta", 1)
        eventually(lambda: states(url)["alpha"] == "cold")
        assert cached_tokens(client, "alpha") > 300
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
