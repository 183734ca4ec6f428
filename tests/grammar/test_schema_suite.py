"""JSON Schema's public cases for draft 2020-12, walked through the matcher without a model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from json_suite import Group, groups

from engine_fixtures import EOS_ID, tiny_tokenizer
from gnomon.chat.constraint import ConstraintError, json_schema
from gnomon.grammar import Compiler, Matcher, Unenforceable, Vocabulary

FALSE_ALONE = "must be a JSON schema, got false"
"""No answer at all could be valid."""
OUT_OF_REACH = (
    "is not present in a registry",  # documents elsewhere
    "schema is false",
    "are not disjoint",  # patterns of property names that overlap
    "Expected positive integer",  # 2.0 for 2
    "too many digits",
)
FORMAT_IS_ASSERTED = "is only an annotation by default"
NARROWER = {
    # Properties come in the schema's order.
    ("allOf.json", "allOf", "allOf"),
    ("allOf.json", "allOf with base schema", "valid"),
    ("const.json", "const with object", "same object with different property order is valid"),
}
"""Valid instances that the grammar doesn't write: harmless, since it has other ways to say the same."""


def takes(matcher: Matcher, instance: Any) -> bool:
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    for token in tiny_tokenizer().encode(text):
        if not matcher.allows(token):
            return False
        matcher.advance(token)
    return matcher.accepting


@pytest.fixture(scope="module")
def suite() -> list[Group]:
    return list(groups("draft2020-12"))


def test_what_is_claimed_of_draft_2020_12_is_kept(suite: list[Group]) -> None:
    compiler = Compiler(Vocabulary(tiny_tokenizer(), {EOS_ID}), capacity=1)
    count: Counter[str] = Counter()
    refused: list[str] = []
    beyond: list[str] = []
    wrong: list[tuple[str, str, str, bool]] = []
    for group in suite:
        try:
            compiled = compiler.compile(json_schema(group.schema))
        except ConstraintError as error:
            refused.append(str(error))
            continue
        except Unenforceable as error:
            beyond.append(str(error))
            continue
        if compiled.gaps:
            count["in part"] += 1
            continue
        count["enforced"] += 1
        for about, instance, valid in group.cases:
            got = takes(compiled.start(), instance)
            count["agree" if got == valid else "differ"] += 1
            narrower = (
                (group.file, group.about, about) in NARROWER
                or (group.file == "format.json" and FORMAT_IS_ASSERTED in about)
                or (group.file in ("const.json", "enum.json", "type.json") and "float" in about)
                or (group.file == "enum.json" and about in ("[0.0] is valid", "[1.0] is valid"))
            )
            # An invalid instance is never taken, in no case.
            if got != valid and not (valid and narrower):
                wrong.append((group.file, group.about, about, valid))
    assert wrong == []
    assert len(refused) == 1
    assert FALSE_ALONE in refused[0]
    assert [text for text in beyond if not any(reason in text for reason in OUT_OF_REACH)] == []
    assert count["enforced"] >= 150
    assert count["agree"] >= 500
