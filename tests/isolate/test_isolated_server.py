"""`gnomon serve --isolate`: a real server whose engine's process is killed, frozen and refused a model."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from cli_process import Served, gnomon, serving
from tiny_directory import make


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    """One server for all tests, each of which leaves it healthy. At its end it ends its engine's process too."""
    with serving("serve", str(model), "--isolate", "--l1", "--no-open") as found:
        yield found
        engine = get(f"{found.url}/engine")["pid"]
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(300) == 0
        assert not Path(f"/proc/{engine}").exists()


def get(url: str):
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def healthy(url: str) -> None:
    end = time.monotonic() + 300
    while True:
        try:
            get(f"{url}/health")
            return
        except urllib.error.HTTPError:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_the_answer_is_the_same_and_the_parent_has_no_mlx(model: Path, server: Served) -> None:
    arguments = ("--prompt", "abc", "--temp", "0", "--max-tokens", "12", "--raw")
    alone = gnomon("generate", str(model), "--l1", *arguments)
    process, url = server
    asked = gnomon("generate", "--server", url, *arguments)
    assert asked.stdout == alone.stdout
    about = get(f"{url}/engine")
    assert (about["isolated"], about["state"]) == (True, "ok")
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libmlx" not in maps
    assert "libmlx" in Path(f"/proc/{about['pid']}/maps").read_text()
    assert get(f"{url}/v1/models")["data"][0]["id"] == "tiny"


def test_killing_the_child_ends_its_streams_and_nothing_else(server: Served) -> None:
    process, url = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    kept = client.responses.create(model="tiny", input="keep me", max_output_tokens=3)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "abc"}],
        stream=True,
        max_tokens=50_000,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    before = get(f"{url}/engine")
    os.kill(before["pid"], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="was killed by SIGKILL during the answer") as broken:
        list(chunks)
    assert broken.value.code == "engine_died"
    # No wait in between: it is answered by the next child.
    again = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "abc"}], max_tokens=4)
    assert again.usage is not None
    assert again.usage.completion_tokens == 4
    # What the server itself holds outlives the engine.
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    healthy(url)
    assert get(f"{url}/engine")["restarts"] == before["restarts"] + 1
    assert process.poll() is None


def test_a_grammar_and_logprobs_come_through(server: Served) -> None:
    url = server.url
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    made = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "abc"}],
        logprobs=True,
        top_logprobs=2,
        extra_body={"guided_choice": ["yes", "no"]},
    )
    assert made.choices[0].message.content in ("yes", "no")
    assert made.choices[0].logprobs is not None
    echoed = client.completions.create(model="tiny", prompt="abc", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert echoed.text == "abc"
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs is not None
    assert all(score < 0 for score in echoed.logprobs.token_logprobs[1:])
    assert len(echoed.logprobs.token_logprobs) > 1
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt="a" * 200_000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="prompt has 200000 tokens, but must have 1 to "):
        client.completions.create(model="tiny", prompt="a" * 200_000, max_tokens=0, echo=True, logprobs=0)


def test_a_model_that_is_not_there_is_a_clear_error() -> None:
    done = gnomon("serve", "/nowhere/model", "--isolate", "--port", "0")
    assert done.returncode == 1
    assert "/nowhere/model" in done.stderr
    assert "Traceback" not in done.stderr
