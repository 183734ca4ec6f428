"""The real starter at temperature 1 under grammars, with its real vocabulary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from gnomon.chat import constraint
from gnomon.engine.api import SamplingParams
from gnomon.engine.engine import load

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "big": {"type": "boolean"},
        "rank": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "big", "rank"],
    "additionalProperties": False,
}


@pytest.mark.network
def test_the_starter_keeps_to_its_grammar(starter_path: Path) -> None:
    hot = SamplingParams(temperature=1.0, seed=3)
    with load(starter_path) as engine:
        prompt = "A city in France as JSON:\n"
        made = engine.generate(prompt, sampling=hot, max_tokens=60, constraint=constraint.json_schema(SCHEMA))
        assert made.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(made.text), SCHEMA)
        pattern = r"[A-Z][a-zé]{2,8}, 1[0-9]{3}"
        made = engine.generate("Paris,", sampling=hot, max_tokens=20, constraint=constraint.regex(pattern))
        assert made.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, made.text)
