"""Grammars compiled for a byte vocabulary: what they take, where they end, and what can't be made of a demand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine_fixtures import EOS_ID, tiny_tokenizer
from gnomon.chat import constraint
from gnomon.chat.constraint import Constraint, json_object, json_schema
from gnomon.grammar import Compiler, GrammarFailed, Matcher, Unenforceable, Vocabulary

PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(Vocabulary(tiny_tokenizer(), {EOS_ID}))


def start(compiler: Compiler, wanted: Constraint) -> Matcher:
    return compiler.compile(wanted).start()


def walked(compiler: Compiler, wanted: Constraint, text: str) -> Matcher | None:
    """The matcher after the text; None when it isn't the beginning of an answer."""
    matcher = start(compiler, wanted)
    for token in tiny_tokenizer().encode(text):
        if not matcher.allows(token):
            return None
        matcher.advance(token)
    return matcher


def takes(compiler: Compiler, wanted: Constraint, text: str) -> bool:
    matcher = walked(compiler, wanted, text)
    return matcher is not None and matcher.accepting


def ids(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize(
    ("text", "compact", "flexible"),
    [
        ('{"a":1,"b":[1,2]}', True, True),
        ('{"a": 1, "b": [1, 2]}', True, True),
        ('{"a":1, "b":[1, 2]}', True, True),
        ('{\n    "a": 1,\n    "b": []\n}', False, True),
        ('{"a":  1,"b":[]}', False, True),
        ('{"a":' + " " * 81 + '1,"b":[]}', False, False),
        (' {"a":1,"b":[]}', False, False),
        ('{"a":1,"b":[]}\n', False, False),
        ('{"a":1}', False, False),
        ('{"a":"1","b":[]}', False, False),
    ],
)
def test_white_space_is_never_endless(compiler: Compiler, text: str, compact: bool, flexible: bool) -> None:
    assert takes(compiler, json_schema(PAIR), text) == compact
    assert takes(compiler, json_schema(PAIR, any_whitespace=True), text) == flexible


@pytest.mark.parametrize(
    ("text", "taken"), [("{}", True), ('{"a":[null,{"b":"\\né"}]}', True), ("[]", False), ("1", False), ("", False)]
)
def test_json_object(compiler: Compiler, text: str, taken: bool) -> None:
    assert takes(compiler, json_object(), text) == taken


@pytest.mark.parametrize(
    ("pattern", "text", "taken"),
    [
        ("a|b", "b", True),
        ("^a$", "a", True),
        (r"\d{3}", "123", True),
        (r"\d{3}", "1234", False),
        ("(?i)yes", "YeS", True),
        ("a/b", "a/b", True),
        ("é+", "éé", True),
        ("a*", "", True),
    ],
)
def test_regex(compiler: Compiler, pattern: str, text: str, taken: bool) -> None:
    assert takes(compiler, constraint.regex(pattern), text) == taken


OPTIONS = ["a", "ab", "a|b", "(x)+ - #", 'q"\\uote', "é{2}\n", "a"]


def test_choices_are_literal(compiler: Compiler) -> None:
    wanted = constraint.choice(OPTIONS)
    for option in OPTIONS:
        assert takes(compiler, wanted, option)
    for other in ("b", "xx - #", "", "a|", "éé\n"):
        assert not takes(compiler, wanted, other)


GBNF = 'root ::= "x" digits\ndigits ::= [0-9]+'
LARK = "start: /x[0-9]+/"


@pytest.mark.parametrize("source", [GBNF, LARK])
def test_grammars_in_both_notations(compiler: Compiler, source: str) -> None:
    wanted = constraint.grammar(source)
    assert takes(compiler, wanted, "x10")
    assert not takes(compiler, wanted, "x")
    assert not takes(compiler, wanted, "10")


def test_the_end_is_allowed_only_where_the_text_is_whole(compiler: Compiler) -> None:
    matcher = start(compiler, constraint.regex("ab|abc"))
    expected = [({"a", "ab", "abc"}, False), ({"b", "bc"}, False), ({"c"}, True)]
    tokenizer = tiny_tokenizer()
    for letter, (texts, whole) in zip("ab_", expected, strict=True):
        allowed = ids(matcher)
        assert (EOS_ID in allowed) == whole == matcher.accepting
        assert {tokenizer.token_bytes(token).decode() for token in allowed - {EOS_ID}} <= texts
        assert not matcher.finished
        if letter != "_":
            matcher.advance(tokenizer.encode(letter)[0])
    matcher.advance(tokenizer.encode("c")[0])
    assert matcher.finished
    assert ids(matcher) == {EOS_ID}


def test_special_tokens_are_not_text(compiler: Compiler) -> None:
    anything = ids(start(compiler, constraint.regex("(?s:.*)")))
    tokenizer = tiny_tokenizer()
    assert {token for token in anything if tokenizer.is_special(token)} == {EOS_ID}
    # All else is a beginning of some text, but for bytes that begin no character.
    assert len(anything) > 200


def test_copies_go_separate_ways(compiler: Compiler) -> None:
    one = start(compiler, constraint.choice(["ac", "bd"]))
    other = one.fork()
    a, b = (tiny_tokenizer().encode(letter)[0] for letter in "ab")
    one.advance(a)
    other.advance(b)
    assert (one.allows(b), ids(one) != ids(other)) == (False, True)
    with pytest.raises(GrammarFailed, match=f"token {a}|doesn't satisfy"):
        one.advance(a)


@pytest.mark.parametrize(
    ("schema", "gaps"),
    [
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"not": {"type": "string"}}, ("not",)),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf (any of them may match)",)),
        # Alternatives that exclude each other are one of theirs anyway.
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
        (PAIR, ()),
    ],
)
def test_what_is_not_enforced_is_told(compiler: Compiler, schema: dict[str, Any], gaps: tuple[str, ...]) -> None:
    assert compiler.compile(json_schema(schema)).gaps == gaps


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        (constraint.regex("(a"), "unclosed group"),
        (constraint.regex("(?=a)b"), "look-around"),
        (constraint.grammar("start: foo"), 'at 1(8): unknown name: "foo"'),
        (constraint.grammar('root ::= "a" |\nfoo ::= ('), "line"),
        (constraint.grammar("root ::= foo"), "'foo' not found"),
        (json_schema({"$ref": "http://localhost/x"}), "is not present"),
        # These derive nothing.
        (json_schema({"$ref": "#"}), "no text has this form"),
        (json_schema({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        # These would take for ever.
        (constraint.grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "recursion"),
        (json_schema({"enum": [f"value {i}" for i in range(100_000)]}), "too big"),
    ],
)
def test_what_does_not_compile_says_where(compiler: Compiler, wanted: Constraint, part: str) -> None:
    with pytest.raises(Unenforceable) as caught:
        compiler.compile(wanted)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "sound"),
    [(r"\p{Letter}cole", True), (r"^\cC$", True), ("(?=a)b", True), ("(", False), ("a{2,1}", False)],
)
def test_patterns_of_either_notation_are_sound(pattern: str, sound: bool) -> None:
    if sound:
        json_schema({"pattern": pattern})
    else:
        with pytest.raises(constraint.ConstraintError, match="pattern"):
            json_schema({"pattern": pattern})


def test_a_schema_cannot_loosen_its_own_grammar(compiler: Compiler) -> None:
    loosened = {**PAIR, "x-guidance": {"lenient": True, "whitespace_flexible": True, "item_separator": ";"}}
    assert not takes(compiler, json_schema(loosened), '{"a":1;"b":[]}')
    assert not takes(compiler, json_schema(loosened), '{\n"a":1,"b":[]}')


def test_results_are_remembered_up_to_a_number() -> None:
    compiler = Compiler(Vocabulary(tiny_tokenizer(), {EOS_ID}), capacity=2)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(constraint.regex(pattern))
    # a b (a) c(b goes) (a) b(c goes)
    assert compiler.num_compiled == 4


def test_ids_that_write_on_behind_an_ending() -> None:
    vocabulary = Vocabulary(tiny_tokenizer(), {EOS_ID})
    spelled = {vocabulary.spellings[token] for token in vocabulary.running_past("t")}
    expected = {s for s in vocabulary.spellings if b"t" in s and s.split(b"t", 1)[1].strip(b"\n")}
    assert spelled == expected != set()


def test_json_text_of_a_schema_is_as_good_as_the_schema() -> None:
    assert json_schema(json.dumps(PAIR)) == json_schema(PAIR)


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "a{1000000}", "((a{100}){100}){100}", "(a?){2000}a{2000}"])
def test_what_is_too_large_to_follow_is_told_when_it_is_compiled(compiler: Compiler, pattern: str) -> None:
    """And not by the engine's thread, seconds into its first mask."""
    with pytest.raises(Unenforceable, match="too many"):
        compiler.compile(constraint.regex(pattern))
    compiler.compile(constraint.regex("[a-z]{1,4000}"))
    compiler.compile(constraint.choice([f"option number {i} of many" for i in range(4000)]))
