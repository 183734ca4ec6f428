"""A server that is killed in the middle of its answers, and the one that is started after it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from cli_process import serving

ARRAY = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
CHAT = {"messages": [{"role": "user", "content": "the cat sat on the mat"}], "temperature": 1.0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "penalties": (
        "/v1/completions",
        {
            "prompt": "the old captain ",
            "temperature": 1.1,
            "seed": 7,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.1,
            "frequency_penalty_context_size": 0,
            "logprobs": 3,
            "stop": ["no such text", "nor this"],
            "max_tokens": 250,
            "ignore_eos": True,
        },
    ),
    "grammar": (
        "/v1/chat/completions",
        {
            **CHAT,
            "seed": 3,
            "logprobs": True,
            "max_tokens": 800,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ARRAY}},
        },
    ),
    "unseeded": ("/v1/chat/completions", {**CHAT, "max_tokens": 250, "ignore_eos": True}),
}
SEEDED = ("penalties", "grammar")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    heard: dict[str, str] = field(default_factory=dict[str, str])

    def answer(self, name: str) -> dict[str, Any]:
        path, body = REQUESTS[name]
        response = httpx.post(self.url + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def listen(self, name: str) -> None:
        """Read a streamed answer for as long as it comes."""
        path, body = REQUESTS[name]
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=120) as lines,
        ):
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.heard[name] = self.heard.get(name, "") + (
                            choice.get("text") or choice.get("delta", {}).get("content") or ""
                        )

    def checkpoints(self) -> dict[str, Any]:
        return httpx.get(self.url + "/stats", timeout=300).json()["generation_checkpoints"]


@contextmanager
def server(model: Path, cache: Path) -> Iterator[Server]:
    argv = ("serve", str(model), "--l1", "--generation-checkpoint", "4")
    with serving(*argv, log=subprocess.DEVNULL, GNOMON_CACHE=str(cache), COLUMNS="300", PYTHONUNBUFFERED="1") as found:
        yield Server(found.process, found.url)


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """What of an answer doesn't depend on when it was made."""
    choice, usage = answer["choices"][0], answer["usage"]
    counts = {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"text": text(answer), "finish": choice["finish_reason"], **counts}


def text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def logprobs(answer: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """Tokens and rivals, and their values."""
    found = answer["choices"][0]["logprobs"]
    if "content" in found:
        return [one["token"] for one in found["content"]], [one["logprob"] for one in found["content"]]
    tops = [value for top in found["top_logprobs"] for value in top.values()]
    return found["tokens"], [*found["token_logprobs"], *tops]


def cut_off(model: Path, cache: Path) -> tuple[dict[str, dict[str, Any]], Server]:
    """Whole answers, and a killed server's with the beginnings that were heard of all.

    On a busy machine one may have ended before the last began: then the others are cut.
    """
    with server(model, cache) as first:
        whole = {name: first.answer(name) for name in SEEDED}
        assert first.checkpoints()["kept"] == 0
        listeners = [threading.Thread(target=first.listen, args=(name,)) for name in REQUESTS]
        for one in listeners:
            one.start()
        deadline = time.monotonic() + 300
        while first.checkpoints()["open"] < len(REQUESTS) and time.monotonic() < deadline:
            if not all(one.is_alive() for one in listeners):
                break
            time.sleep(0.01)
        first.process.send_signal(signal.SIGKILL)
        for one in listeners:
            one.join(300)
    return whole, first


def test_answers_of_a_killed_server_go_on_in_the_next(tmp_path: Path) -> None:
    """Streams are cut by SIGKILL. Asked again, not streamed, they are whole, and the seeded ones are what they would have been."""
    model, cache = tiny_models.save("llama", tmp_path / "model"), tmp_path / "cache"
    # All may have ended before the kill, where this process got no turn.
    assert any(check(model, cache) for _ in range(5))


def check(model: Path, cache: Path) -> bool:
    """Whether any answer was cut."""
    whole, first = cut_off(model, cache)
    for name in SEEDED:
        assert text(whole[name]).startswith(first.heard.get(name, ""))
    with server(model, cache) as second:
        cut = second.checkpoints()["adopted"]
        if cut == 0:
            return False
        assert 1 <= cut == second.checkpoints()["kept"] <= len(REQUESTS)
        again = {name: second.answer(name) for name in REQUESTS}
        for name in SEEDED:
            assert essence(again[name]) == essence(whole[name])
        for name in SEEDED:
            ours, theirs = logprobs(again[name]), logprobs(whole[name])
            assert ours[0] == theirs[0]
            assert ours[1] == pytest.approx(theirs[1], abs=1e-4)
        saved = second.checkpoints()
        assert (saved["resumed"], saved["corrupt"], saved["rejected"]) == (cut, 0, 0)
        assert saved["resumed_tokens"] >= 4 * cut
        if cut == len(REQUESTS):
            # The one without a seed goes on with the seed that it had.
            assert text(again["unseeded"]).startswith(first.heard.get("unseeded", ""))
        # Once answered, they are forgotten.
        deadline = time.monotonic() + 300
        while (saved := second.checkpoints())["due"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert saved["kept"] == 0
        assert list(cache.rglob("*.gen")) == []
    return True
