"""Every way not to match further, caused on purpose and told to the client, in the log and in the stats."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import tiny_models
from engine_fixtures import tiny_engine, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.api import Request
from gnomon.engine.engine import Engine
from gnomon.serve.app import create_app
from gnomon.state.prefix.block import common

STORY = "the cat sat on the mat and the dog ran after the cat " * 3
THINKS = tiny_models.CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n(thinking)\n{% endif %}")
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Of the tiny llama: keys and values, two layers, two heads of 16 float32."""


def thinking_tokenizer() -> Tokenizer:
    """Whose template opens an answer with a block that history doesn't have."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_models.tokenizer().save(f"{directory}/tokenizer.json")
        settings = {"eos_token": tiny_models.EOS, "chat_template": THINKS}
        Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer.load(directory)


@dataclass
class Site:
    client: TestClient
    engine: Engine
    tokenizer: Tokenizer
    log: pytest.LogCaptureFixture

    def ask(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Id and `usage.cache` of an answer of two tokens."""
        answer = self.client.post(path, json={"max_tokens": 2, "temperature": 0, "ignore_eos": True, **body})
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == whole["usage"]["cache"]["tokens"]
        return whole["id"], whole["usage"]["cache"]

    def complete(self, prompt: str | list[int]) -> tuple[str, dict[str, Any]]:
        return self.ask("/v1/completions", {"prompt": prompt})

    def chat(self, *texts: str) -> tuple[str, dict[str, Any]]:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return self.ask("/v1/chat/completions", {"messages": messages})

    def check(
        self,
        asked: tuple[str, dict[str, Any]],
        kind: str,
        position: int,
        reused: int,
        before: str,
        ours: str,
        theirs: str,
    ) -> None:
        """What the response says, what /stats says of the same request, and what the log says: no word of the prompt."""
        name, cache = asked
        assert cache["miss"] == {"kind": kind, "position": position}
        assert (cache["tokens"], cache["tier"]) == (reused, "ram" if reused else "none")
        told = self.client.get("/stats").json()["prompt_cache"]["recent_misses"][-1]
        assert (told["request"], told["kind"], told["position"], told["reused_tokens"]) == (
            name,
            kind,
            position,
            reused,
        )
        assert told["before"].endswith(before)
        assert told["prompt"].startswith(ours)
        assert told["stored"].startswith(theirs)
        total = told["prompt_tokens"]
        line = f"request {name}: {reused} of {total} prompt tokens reused, no further than token {position}: {kind}"
        assert line in self.log.text
        assert "captain" not in self.log.text


@contextmanager
def site(
    log: pytest.LogCaptureFixture, model_type: str = "llama", tokenizer: Tokenizer | None = None, **config: Any
) -> Iterator[Site]:
    log.set_level(logging.INFO, "gnomon")
    tokenizer = tokenizer or tiny_tokenizer()
    with tiny_engine(model_type, EngineConfig(**config)) as engine:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), HTTPConfig(), SamplingDefaults())
        with TestClient(app, base_url="http://127.0.0.1") as client:
            yield Site(client, engine, tokenizer, log)


def test_edited_text(caplog: pytest.LogCaptureFixture) -> None:
    with site(caplog) as here:
        here.chat(STORY + "where is the dog?")
        asked = here.chat(STORY + "where is the captain?")
        first, second = (
            here.tokenizer.encode(f"<|im_start|>user\n{STORY}where is the {who}?<|im_end|>\n<|im_start|>assistant\n")
            for who in ("dog", "captain")
        )
        at = common(first, second)
        assert here.tokenizer.decode(second[at:]).lstrip().startswith("captain")
        here.check(
            asked,
            "edited text",
            at,
            at,
            "",
            here.tokenizer.decode(second[at : at + 1]),
            here.tokenizer.decode(first[at : at + 1]),
        )


def test_template_tail(caplog: pytest.LogCaptureFixture) -> None:
    """The next turn renders the answer without the block that opened it: nothing is amiss but that."""
    with site(caplog, tokenizer=thinking_tokenizer()) as here:
        here.chat("who sat?")
        asked = here.chat("who sat?", "the cat", "where?")
        open_ = here.tokenizer.encode("<|im_start|>user\nwho sat?<|im_end|>\n<|im_start|>assistant\n(thinking)\n")
        next_ = here.tokenizer.encode(
            "<|im_start|>user\nwho sat?<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"
        )
        at = common(open_, next_)
        here.check(asked, "template tail", at, at, "assistant\n", "the cat", "(thinking)")


def test_namespace(caplog: pytest.LogCaptureFixture) -> None:
    """The tokens are known, but from a request under another identity."""
    with site(caplog) as here:
        ids = here.tokenizer.encode(STORY)
        list(here.engine.stream(Request("other", tuple(ids), max_tokens=1, namespace="another adapter")))
        asked = here.complete(STORY)
        here.check(asked, "namespace", 0, 0, "", "the cat sat", "the cat sat")


def test_evicted(caplog: pytest.LogCaptureFixture) -> None:
    with site(caplog, prompt_cache=80 * BYTES_PER_TOKEN) as here:
        story = here.tokenizer.encode(STORY)[:70]
        here.complete(story)
        here.complete([7, *story])
        asked = here.complete([*story, 5, 6])
        words = here.tokenizer.decode(story[:4])
        here.check(asked, "evicted", 0, 0, "", words, words)


def test_uncuttable_state(caplog: pytest.LogCaptureFixture) -> None:
    """A recurrent layer's state exists where the prompt's last token begins, and where the answer ended."""
    with site(caplog, "qwen3_5") as here:
        story = here.tokenizer.encode(STORY * 2)[:90]
        here.complete(story)
        words = here.tokenizer.decode(story[:4])
        here.check(here.complete([*story[:60], 5, 6]), "uncuttable state", 0, 0, "", words, words)
        last = here.tokenizer.decode(story[89:])
        here.check(
            here.complete([*story, 5, 6]), "uncuttable state", 89, 89, here.tokenizer.decode(story[85:89]), last, last
        )


def test_no_entry(caplog: pytest.LogCaptureFixture) -> None:
    with site(caplog) as here:
        here.complete([7, 8, 9])
        story = here.tokenizer.encode(STORY)
        asked = here.complete(story)
        here.check(asked, "no entry", 0, 0, "", "the cat sat", here.tokenizer.decode([7]))


def test_no_miss(caplog: pytest.LogCaptureFixture) -> None:
    """All that is stored was used: the next turn of a conversation whose answer is repeated as it was."""
    with site(caplog) as here:
        _, first = here.chat(STORY)
        assert first == {"tier": "none", "tokens": 0, "miss": {"kind": "no entry", "position": 0}}
        answer = here.client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": STORY}],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
            },
        ).json()
        text, prompt = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
        assert answer["usage"]["cache"]["tokens"] == prompt - 1
        assert answer["usage"]["cache"]["miss"] is None
        _, cache = here.chat(STORY, text, "and then?")
        assert (cache["tier"], cache["miss"]) == ("ram", None)
        assert cache["tokens"] >= prompt + 5
        stats = here.client.get("/stats").json()["prompt_cache"]
        assert (stats["hits"], stats["misses"]) == (2, 1)
