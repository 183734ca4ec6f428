"""Rendering equals transformers' own, and what it tells of the prompt is true."""

from __future__ import annotations

import copy
from datetime import datetime

import pytest
from chat_oracle import Adapter, build, source, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gnomon.chat.messages import ChatError, joined
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo d'une ville <&>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
HELLO = [{"role": "user", "content": 'Grüße <b>&"quoted"</b>\n'}]
TURNS = [
    {"role": "user", "content": "  one "},
    {"role": "assistant", "content": "two\n\n"},
    {"role": "user", "content": "three 🙂"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TURNS]
CALLS = [
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Pâris", "n": 1}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "21 °C"},
]


def oracle(made: Adapter, messages, tools=None, **kwargs):
    kwargs = {"add_generation_prompt": True, **kwargs}
    text = made.inner.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
    ids = made.inner.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **kwargs)
    return text, tuple(ids)


CASES = [
    ("starter", HELLO, None),
    ("starter", SYSTEM, None),
    ("chatml", SYSTEM, None),
    ("llama3", HELLO, None),
    ("llama3", SYSTEM, TOOLS),
    ("llama3", CALLS, TOOLS),
    ("qwen3", SYSTEM, None),
    ("qwen3", CALLS, TOOLS),
    ("gemma3", HELLO, None),
    ("gemma3", SYSTEM, None),
    ("mistral", SYSTEM, TOOLS),
    ("mistral", CALLS, TOOLS),
    ("deepseek", SYSTEM, None),
    ("gemma4", SYSTEM, None),
    ("harmony", CALLS, None),
]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(("name", "messages", "tools"), CASES)
def test_equals_transformers(name, messages, tools, add):
    made = tokenizer(name)
    rendered = ChatTemplate(made).render(messages, tools, add_generation_prompt=add)
    assert (rendered.text, rendered.ids) == oracle(made, messages, tools, add_generation_prompt=add)


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_equals_transformers_with_variables(name, thinking):
    made = tokenizer(name)
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    rendered = ChatTemplate(made).render(TURNS, **kwargs)
    assert (rendered.text, rendered.ids) == oracle(made, TURNS, **kwargs)


def test_a_variable_may_have_any_name():
    made = Adapter(build("{{ self }}{{ messages[0].content }}"))
    assert ChatTemplate(made).render(HELLO, self=2).text.endswith(HELLO[0]["content"])


def test_the_starter_as_its_makers_render_it():
    # The text SmolLM2's model card shows for a user's question.
    assert ChatTemplate(tokenizer("starter")).render([{"role": "user", "content": "Hi"}]).text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_writes_the_bos_gets_one():
    made = tokenizer("gemma3")
    bos = made.token_id("<s>")
    assert ChatTemplate(made).render(HELLO).ids.count(bos) == 1


def test_globals_and_filters_are_those_of_transformers():
    template = (
        "{% set d = dict(a=1, b='é<') %}{{ d | tojson }}{{ d | tojson(indent=2, sort_keys=true) }}"
        "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls }}\n"
        "    {% endfor %}\n{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{{ documents is none }}{{ extra }}"
    )
    made = Adapter(build(template))
    for messages in (TURNS, CALLS):
        rendered = ChatTemplate(made).render(messages, extra=[1, {"k": None}])
        assert rendered.text == oracle(made, messages, extra=[1, {"k": None}])[0]


def test_the_date_comes_from_the_clock():
    template = ChatTemplate(tokenizer("llama3"), now=lambda: datetime(2031, 2, 3))
    assert "Today Date: 03 Feb 2031" in template.render(HELLO).text


@pytest.mark.parametrize(
    "hostile", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% set n = namespace(_x=1) %}"]
)
def test_the_sandbox_holds(hostile):
    with pytest.raises(ChatError) as caught:
        ChatTemplate(Adapter(build(hostile))).render(HELLO)
    assert caught.value.code == "template_error"


def test_a_template_refuses_in_its_own_words():
    template = ChatTemplate(tokenizer("gemma3"))
    with pytest.raises(
        ChatError, match=r"^Conversation roles must alternate user/assistant/user/assistant/\.\.\.$"
    ) as caught:
        template.render([{"role": "assistant", "content": "Hi"}, HELLO[0]])
    assert (caught.value.param, caught.value.code) == ("messages", "template_error")


def test_a_failure_inside_a_template_is_a_template_error():
    template = ChatTemplate(Adapter(build("{{ messages[0].content + 1 }}")))
    with pytest.raises(ChatError, match="failed on this conversation") as caught:
        template.render(HELLO)
    assert caught.value.code == "template_error"


def test_a_template_that_does_not_compile_is_refused_at_once():
    with pytest.raises(ChatError, match="doesn't compile"):
        ChatTemplate(Adapter(build("{% if %}")))


def test_a_model_without_a_template():
    template = ChatTemplate(Adapter(build(None)))
    assert not template.exists
    with pytest.raises(ChatError, match="no chat template") as caught:
        template.render(HELLO)
    assert caught.value.code == "no_chat_template"


def test_named_templates():
    named = {"default": source("chatml"), "tool_use": source("qwen3")}
    made = Adapter(build(named))
    template = ChatTemplate(made)
    assert template.render(HELLO).text == oracle(made, HELLO)[0]
    assert template.render(CALLS, TOOLS).text == oracle(made, CALLS, TOOLS)[0]
    assert "<tools>" in template.render(CALLS, TOOLS).text
    with pytest.raises(ChatError, match="none of the model's chat templates is the default: other"):
        ChatTemplate(Adapter(build({"other": "x"}))).render(HELLO)


def test_parts_are_joined():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    whole = [{"role": "user", "content": "ab"}]
    template = ChatTemplate(tokenizer("chatml"))
    assert template.render(parts).text == template.render(whole).text


def test_a_template_that_takes_only_parts_gets_parts():
    made = tokenizer("typed")
    rendered = ChatTemplate(made).render(HELLO)
    assert (
        rendered.text == oracle(made, [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}])[0]
    )
    assert rendered.text.startswith("USER: Grüße")


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        ([{"content": "x"}], "messages[0].role", "role"),
        ([{"role": "user", "content": 3}], "messages[0].content", "int"),
        (
            [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content[0]",
            "image_url",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "string"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls", "list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function", "name"),
    ],
)
def test_bad_shapes_name_the_field(messages, param, says):
    with pytest.raises(ChatError, match=says) as caught:
        ChatTemplate(tokenizer("chatml")).render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception"])
def test_reserved_variables_are_refused(name):
    with pytest.raises(ChatError, match=f"{name} is reserved") as caught:
        ChatTemplate(tokenizer("chatml")).render(HELLO, None, **{name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_developer_is_system_unless_the_template_knows_it():
    messages = [{"role": "developer", "content": "Obey."}, *HELLO]
    assert "<|im_start|>system\nObey." in ChatTemplate(tokenizer("chatml")).render(messages).text
    made = tokenizer("harmony")
    assert ChatTemplate(made).render(messages).text == oracle(made, messages)[0]


def said(text):
    return f"<system>\n{text}\n</system>"


LATE = [
    {"role": "system", "content": "A"},
    {"role": "developer", "content": "B"},
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "system", "content": "C"},
    {"role": "assistant", "content": "two"},
    {"role": "system", "content": "D"},
    {"role": "user", "content": "three"},
]
FOLDED = [
    {"role": "system", "content": "A\n\nB"},
    {"role": "user", "content": f"one\n\n{said('C')}"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": f"{said('D')}\n\nthree"},
]
# As Qwen 3.5's template refuses them.
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3"])
def test_late_system_messages_stay_in_their_place(name):
    """Gemma 3 refuses them, Gemma 4 leaves them out, Qwen 3 writes them."""
    made = tokenizer(name)
    expected = oracle(made, FOLDED)[0]
    if name == "qwen3":
        plain = [{**one, "role": "system"} if one["role"] == "developer" else one for one in LATE]
        expected = oracle(made, [{**one, "content": "one"} if one is LATE[2] else one for one in plain])[0]
    template = ChatTemplate(made)
    assert template.render(LATE).text == expected
    # A conversation that goes on begins as before.
    before = template.render(LATE[:4], add_generation_prompt=False).text
    assert template.render(LATE).text.startswith(before)


def test_turns_in_a_row_are_joined_where_the_template_wants_them_to_alternate():
    """As Codex 0.171.0, Goose 0.20.1 and opencode 1.18.33 send them. Gemma 3 refuses them, Qwen 3 writes them."""
    users = [{"role": "user", "content": text} for text in ("a", "b", "")]
    assistants = [{"role": "assistant", "content": text} for text in ("c", "d")]
    row = [SYSTEM[0], *users, *assistants, {"role": "user", "content": "e"}]
    one = [
        SYSTEM[0],
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c\n\nd"},
        {"role": "user", "content": "e"},
    ]
    made = tokenizer("gemma3")
    assert ChatTemplate(made).render(row).text == oracle(made, one)[0]
    made = tokenizer("qwen3")
    assert ChatTemplate(made).render(row).text == oracle(made, row)[0]


@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_results_and_calls_are_not_joined(role):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    more = {"tool_calls": [call]} if role == "assistant" else {"tool_call_id": "1"}
    row = [{"role": role, "content": text, **more} for text in ("a", "b")]
    assert joined(row) == row


def test_late_system_messages_of_a_template_that_wants_them_first():
    template = ChatTemplate(Adapter(build(FIRST_ONLY)))
    assert template.render(LATE).text == "".join(f"<{one['role']}>{one['content']}" for one in FOLDED)
    with pytest.raises(ChatError, match=r"messages\[3\]\.content is int"):
        template.render([*LATE[:3], {"role": "system", "content": 3}])


def test_the_request_is_not_touched_and_reasoning_is_seen():
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        HELLO[0],
        {"role": "assistant", "content": None, "reasoning": "hmm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "warm"},
    ]
    before = copy.deepcopy(messages)
    made = tokenizer("qwen3")
    text = ChatTemplate(made).render(messages).text
    assert messages == before
    assert "<think>\nhmm\n</think>" in text
    assert '"arguments": {"city": "Rom"}' in text
    parsed = copy.deepcopy(messages)
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Rom"}
    assert text == oracle(made, parsed)[0]


def test_an_explicit_reasoning_content_wins():
    def text(**fields):
        return ChatTemplate(tokenizer("qwen3")).render([HELLO[0], {"role": "assistant", "content": "x", **fields}]).text

    assert "<think>\nexplicit\n" in text(reasoning="other", reasoning_content="explicit")
    assert "<think>\nother\n" in text(reasoning="other", reasoning_content=None)


def test_arguments_as_the_template_wants_them():
    as_text = copy.deepcopy(CALLS)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Pâris", "n": 1}'
    made = tokenizer("deepseek")
    for messages in (CALLS, as_text):
        assert ChatTemplate(made).render(messages).text == oracle(made, as_text)[0]
    made = tokenizer("qwen3")
    assert ChatTemplate(made).render(as_text).text == oracle(made, CALLS)[0]


def test_arguments_that_are_not_json_stay():
    messages = copy.deepcopy(CALLS)
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    assert '"arguments": {"city": }' in ChatTemplate(tokenizer("qwen3")).render(messages).text


@pytest.mark.parametrize("name", ["starter", "qwen3", "llama3", "gemma3", "gemma4", "deepseek", "harmony"])
def test_the_stable_boundary(name):
    made = tokenizer(name)
    rendered = ChatTemplate(made).render(TURNS)
    without = oracle(made, TURNS, add_generation_prompt=False)
    assert rendered.stable
    assert rendered.text[: rendered.generation_start] == without[0]
    assert rendered.ids[: rendered.stable_tokens] == without[1]


def test_an_unstable_boundary_is_said():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}|A:<think>{% else %}|.{% endif %}"
    rendered = ChatTemplate(Adapter(build(template))).render(HELLO)
    assert not rendered.stable
    assert rendered.stable_tokens is None
    assert rendered.thinking_open


@pytest.mark.parametrize(
    ("name", "kwargs", "opened", "thinks"),
    [
        ("deepseek", {}, True, True),
        ("qwen3", {}, False, True),
        ("qwen3", {"enable_thinking": False}, False, False),
        ("qwen3", {"enable_thinking": True}, False, True),
        ("gemma4", {}, False, False),
        ("gemma4", {"enable_thinking": True}, False, True),
        ("starter", {}, False, False),
        ("starter", {"enable_thinking": True}, False, False),
        ("harmony", {}, False, True),
    ],
)
def test_whether_a_turn_thinks(name, kwargs, opened, thinks):
    extra = {"gemma4": ("<|channel>", "<channel|>"), "harmony": ("<|start|>", "<|channel|>", "<|message|>")}.get(
        name, ()
    )
    rendered = ChatTemplate(tokenizer(name, *extra)).render(TURNS, **kwargs)
    assert (rendered.thinking_open, rendered.thinking) == (opened, thinks)


def test_a_tag_in_the_users_words_opens_nothing():
    asked = [{"role": "user", "content": "What does <think> mean?"}]
    assert not ChatTemplate(tokenizer("qwen3")).render(asked).thinking_open


@pytest.mark.parametrize(
    ("name", "default"), [("qwen3", True), ("gemma4", False), ("starter", None), ("deepseek", None)]
)
def test_the_default_of_thinking_is_the_templates(name, default):
    assert ChatTemplate(tokenizer(name)).thinks_by_default is default


@pytest.mark.parametrize(
    ("request_kwargs", "effort", "flag", "expected"),
    [
        ({"enable_thinking": True}, "none", False, True),
        ({"enable_thinking": False}, "high", True, False),
        ({}, "none", True, False),
        ({}, "minimal", False, True),
        ({}, None, True, True),
        ({}, None, False, False),
        ({}, None, None, None),
        (None, None, None, None),
    ],
)
def test_precedence_of_thinking(request_kwargs, effort, flag, expected):
    made = ChatTemplate(tokenizer("qwen3")).thinking_kwargs(request_kwargs, effort, flag)
    assert made.get("enable_thinking") is expected


def test_other_names_of_the_switch_and_of_the_effort():
    template = ChatTemplate(
        Adapter(build("{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}"))
    )
    assert template.thinks_by_default is False
    on = template.render(HELLO, **template.thinking_kwargs({}, "low", None))
    assert (on.thinking_open, on.thinking) == (True, True)
    off = template.render(HELLO, **template.thinking_kwargs({}, "none", True))
    assert (off.thinking_open, off.thinking) == (False, False)
    harmony = ChatTemplate(tokenizer("harmony"))
    assert "Reasoning: high" in harmony.render(HELLO, **harmony.thinking_kwargs({}, "high", None)).text
    assert (
        "Reasoning: low"
        in harmony.render(HELLO, **harmony.thinking_kwargs({"reasoning_effort": "low"}, "high", None)).text
    )


def test_a_switch_that_is_no_boolean_is_refused():
    with pytest.raises(ChatError, match="enable_thinking is 'no'") as caught:
        ChatTemplate(tokenizer("qwen3")).thinking_kwargs({"enable_thinking": "no"}, None, None)
    assert caught.value.param == "chat_template_kwargs"


def test_a_model_directory_renders_as_transformers_reads_it(tmp_path):
    """Through our own tokenizer: named templates, special tokens and ids from the files."""
    inner = build({"default": source("llama3"), "tool_use": source("qwen3")})
    inner.save_pretrained(tmp_path)
    template = ChatTemplate(Tokenizer.load(tmp_path))
    read = Adapter(AutoTokenizer.from_pretrained(tmp_path))
    for tools in (None, TOOLS):
        rendered = template.render(CALLS, tools)
        assert (rendered.text, rendered.ids) == oracle(read, CALLS, tools)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["<think>x</think>y", "<|im_end|>", " \n", "{{ 1 }}"]
)
CONVERSATIONS = st.builds(
    lambda system, texts: [
        *([{"role": "system", "content": system}] if system is not None else []),
        *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)),
    ],
    st.none() | TEXTS,
    st.lists(TEXTS, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1),
)
MADE = {
    name: tokenizer(name)
    for name in ("starter", "llama3", "qwen3", "gemma3", "mistral", "deepseek", "gemma4", "harmony")
}
COMPILED = {name: ChatTemplate(made) for name, made in MADE.items()}


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(MADE)), CONVERSATIONS, st.booleans())
def test_any_conversation_renders_as_transformers_does(name, messages, add):
    rendered = COMPILED[name].render(messages, add_generation_prompt=add)
    assert (rendered.text, rendered.ids) == oracle(MADE[name], messages, add_generation_prompt=add)


@pytest.mark.parametrize(
    ("name", "tokens", "text", "reasoning", "content"),
    [
        ("gemma4", ("<|channel>", "<channel|>"), "<|channel>thought\nwhy é\n<channel|>yes 🙂", "why é", "yes 🙂"),
        (
            "harmony",
            ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>yes",
            "why",
            "yes",
        ),
        ("qwen3", ("<think>", "</think>"), "<think>\nwhy\n</think>\n\nyes", "why", "yes"),
    ],
)
def test_markers_that_are_special_tokens_reach_the_splitter(tmp_path, name, tokens, text, reasoning, content):
    """From ids through the model's own decoder, token by token."""
    build(source(name), tokens).save_pretrained(tmp_path)
    own = Tokenizer.load(tmp_path)
    template = ChatTemplate(own)
    ids = own.encode(text)
    assert all(own.is_special(own.token_id(token)) for token in tokens)
    prompt = template.render(HELLO, enable_thinking=True).generation_prompt
    stream, made = own.stream(), template.splitter(prompt)
    segments = [segment for token in ids for segment in made.feed(stream.push(token))]
    segments += [*made.feed(stream.finish()), *made.finish()]
    assert "".join(s.text for s in segments if s.kind == "reasoning") == reasoning
    assert "".join(s.text for s in segments if s.kind == "content") == content


@pytest.mark.network
def test_the_starter_from_its_directory(starter_path):
    template = ChatTemplate(Tokenizer.load(starter_path))
    read = Adapter(AutoTokenizer.from_pretrained(starter_path))
    for messages in (HELLO, SYSTEM, [{"role": "user", "content": "1234 <|im_end|> ünï\r\n\t🙂"}]):
        rendered = template.render(messages)
        assert (rendered.text, rendered.ids) == oracle(read, messages)
        assert rendered.stable_tokens == len(oracle(read, messages, add_generation_prompt=False)[1])


@pytest.mark.parametrize(
    ("asks", "expected"),
    [
        # As transformers has it: a missing field.
        ("{% if message.content is defined %}{{ message.content }}{% endif %}", ""),
        # Templates of makers whose API sends null.
        ("{% if message['content'] is none %}[null]{% else %}{{ '[' + message['content'] + ']' }}{% endif %}", "[]"),
        (
            "{% if message['content'] is none %}[null]{% else %}{{ '[' + message['content'][0] + ']' }}{% endif %}",
            "[null]",
        ),
        # Templates that take a string for granted.
        ("{{ message.content + '' }}", ""),
    ],
)
def test_a_call_without_content(asks, expected):
    write = "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    made = Adapter(build("{% for message in messages %}" + asks + write + "{% endfor %}"))
    messages = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": CALLS[1]["tool_calls"]}]
    assert ChatTemplate(made).render(messages).text.endswith(expected + '{"city": "Pâris", "n": 1}')
