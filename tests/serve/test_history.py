"""Tokens that were generated are taken again for the text they made; edited text is tokenised as usual."""

from __future__ import annotations

from fake_engine import FakeEngine, Job, eventually
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from engine_fixtures import tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import HTTPConfig, SamplingDefaults
from gnomon.engine.api import Delta
from gnomon.serve.app import create_app
from gnomon.serve.history import History

TOKENIZER = tiny_tokenizer()
ASK = "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
SPELT = [TOKENIZER.encode(letter)[0] for letter in "the cat"]
"""An answer made letter by letter, which the tokenizer would cut into fewer tokens."""
NEXT = "<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"


def history(**how: int) -> History:
    made = History(TOKENIZER, **how)
    made.record(ASK, TOKENIZER.encode(ASK), SPELT)
    return made


def test_generated_tokens_are_taken_again() -> None:
    assert len(TOKENIZER.encode("the cat")) < len(SPELT)
    text = ASK + "the cat" + NEXT
    expected = (*TOKENIZER.encode(ASK), *SPELT, *TOKENIZER.encode(NEXT))
    assert history().encode(text) == expected
    assert tuple(TOKENIZER.encode(text)) != expected


def test_edited_text_is_tokenised_as_usual() -> None:
    made = history()
    for text in (ASK + "the hat" + NEXT, "x" + ASK + "the cat" + NEXT, ASK + "the ca", ASK, ""):
        assert made.encode(text) is None
    assert made.reuses == 0


def test_the_longest_known_text_is_taken() -> None:
    """Turn after turn: the second answer's key holds the first one's tokens."""
    made = history()
    second = ASK + "the cat" + NEXT
    ids = made.encode(second)
    assert ids is not None
    made.record(second, ids, SPELT)
    third = made.encode(second + "the cat" + NEXT)
    assert third == (*ids, *SPELT, *TOKENIZER.encode(NEXT))


def test_an_answer_that_ends_inside_a_character_is_not_kept() -> None:
    made = History(TOKENIZER)
    made.record(ASK, TOKENIZER.encode(ASK), TOKENIZER.encode("ü")[:1])
    made.record(ASK, TOKENIZER.encode(ASK), [])
    assert len(made) == 0


def test_the_oldest_texts_go_when_they_are_too_many() -> None:
    size = len(ASK + "the cat")
    made = history(max_characters=2 * size + 10)
    made.record("b" + ASK, TOKENIZER.encode("b" + ASK), SPELT)
    assert made.encode(ASK + "the cat" + NEXT) is not None
    made.record("c" + ASK, TOKENIZER.encode("c" + ASK), SPELT)
    assert made.encode(ASK + "the cat" + NEXT) is not None
    assert made.encode("b" + ASK + "the cat" + NEXT) is None
    assert made.num_characters == 2 * size + 1


@given(st.text(max_size=20), st.lists(st.integers(3, 319), max_size=12), st.text(max_size=20))
def test_ids_always_decode_to_the_whole_text(prompt: str, answer: list[int], rest: str) -> None:
    made = History(TOKENIZER)
    made.record(prompt, TOKENIZER.encode(prompt), answer)
    text = prompt + TOKENIZER.decode(answer, hide=False) + rest
    ids = made.encode(text)
    if ids is not None:
        assert TOKENIZER.decode(ids, hide=False) == text


def app_over(engine: FakeEngine) -> TestClient:
    app = create_app(engine, TOKENIZER, ChatTemplate(TOKENIZER), HTTPConfig(), SamplingDefaults())
    return TestClient(app, base_url="http://127.0.0.1")


def spell(job: Job) -> None:
    for letter, token in zip("the cat", SPELT, strict=True):
        job.sink(Delta(job.request.id, 0, letter, (token,)))
    job.finish()
    job.end()


def wait_for(client: TestClient, entries: int) -> None:
    eventually(lambda: client.get("/stats").json()["history"]["entries"] == entries)


def test_the_next_turn_of_a_conversation_has_the_tokens_of_the_last() -> None:
    engine = FakeEngine(spell)
    asked = [{"role": "user", "content": "who?"}]
    with app_over(engine) as client:
        first = client.post("/v1/chat/completions", json={"messages": asked}).json()
        said = first["choices"][0]["message"]["content"]
        assert said == "the cat"
        wait_for(client, 1)
        more = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "why?"}]
        client.post("/v1/chat/completions", json={"messages": more})
        more[1] = {"role": "assistant", "content": "the hat"}
        client.post("/v1/chat/completions", json={"messages": more})
    one, two, three = engine.submitted
    assert two.prompt == (*one.prompt, *SPELT, *TOKENIZER.encode(NEXT))
    assert list(three.prompt) == TOKENIZER.encode(ASK + "the hat" + NEXT)


def test_the_engine_is_told_where_the_template_opens_the_answer() -> None:
    """Also where the prompt's own tokens are others than those rendered."""
    engine = FakeEngine(spell)
    asked = [{"role": "user", "content": "who?"}]
    with app_over(engine) as client:
        client.post("/v1/chat/completions", json={"messages": asked})
        wait_for(client, 1)
        more = [*asked, {"role": "assistant", "content": "the cat"}, {"role": "user", "content": "why?"}]
        client.post("/v1/chat/completions", json={"messages": more})
    for request in engine.submitted:
        assert request.boundary is not None
        assert TOKENIZER.decode(request.prompt[request.boundary :], hide=False) == "<|im_start|>assistant\n"


def test_raw_prompts_remember_too() -> None:
    engine = FakeEngine(spell)
    with app_over(engine) as client:
        client.post("/v1/completions", json={"prompt": "once "})
        wait_for(client, 1)
        client.post("/v1/completions", json={"prompt": "once the cat sat"})
    one, two = engine.submitted
    assert two.prompt == (*one.prompt, *SPELT, *TOKENIZER.encode(" sat"))


def test_messages_take_the_tokens_of_the_last_answer() -> None:
    engine = FakeEngine(spell)
    asked = [{"role": "user", "content": "who?"}]
    with app_over(engine) as client:
        first = client.post("/v1/messages", json={"messages": asked, "max_tokens": 9}).json()
        assert first["content"] == [{"type": "text", "text": "the cat"}]
        wait_for(client, 1)
        more = [*asked, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "why?"}]
        client.post("/v1/messages", json={"messages": more, "max_tokens": 9})
    one, two = engine.submitted
    assert two.prompt == (*one.prompt, *SPELT, *TOKENIZER.encode(NEXT))


def test_responses_take_the_tokens_of_the_last_answer() -> None:
    """Whether the client sends the conversation again, or names the response before."""
    engine = FakeEngine(spell)
    with app_over(engine) as client:
        first = client.post("/v1/responses", json={"input": "who?"}).json()
        wait_for(client, 1)
        again = [
            {"role": "user", "content": "who?"},
            {"role": "assistant", "content": first["output"][0]["content"]},
            {"role": "user", "content": "why?"},
        ]
        client.post("/v1/responses", json={"input": "why?", "previous_response_id": first["id"]})
        client.post("/v1/responses", json={"input": again})
    one, *others = engine.submitted
    assert [other.prompt for other in others] == [(*one.prompt, *SPELT, *TOKENIZER.encode(NEXT))] * 2
