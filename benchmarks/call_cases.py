"""Tool calls for benchmarks/fill.py: what a strict tool's grammar forces in several notations, and calls that a model writes by itself.

A constrained call is never asserted, whatever `--fill` says, so it is the grammar that foretells it. For asserted calls a conversation
shows the model how: one that was taught no calls then writes them, token for token as a template that renders Hermes's notation does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.chat.constraint import Constraint
from gnomon.chat.spans import ToolSpans, tool_spans
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.chat.tool_choice import tool_call
from gnomon.chat.tools import FORMATS

NOTATIONS = ("json", "qwen_xml", "llama", "mistral", "deepseek", "pythonic")

_TEXT, _NUMBER = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 9999}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_ADDRESS = _object(
    street_name=_TEXT, house_number=_NUMBER, postal_code=_NUMBER, country_code={"enum": ["DE", "FR", "GB"]}
)


def _tool(name: str, parameters: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


STRICT_TOOLS = [
    _tool(
        "create_customer_delivery_order",
        _object(
            customer_number=_NUMBER,
            delivery_address=_ADDRESS,
            payment_method={"enum": ["invoice", "credit_card", "direct_debit"]},
            requires_signature={"type": "boolean"},
            number_of_packages=_NUMBER,
            preferred_delivery_weekday={"enum": ["monday", "tuesday", "wednesday", "thursday"]},
        ),
    ),
    _tool("cancel_customer_delivery_order", _object(order_number=_NUMBER, cancellation_reason=_TEXT)),
    _tool("update_customer_billing_address", _object(customer_number=_NUMBER, billing_address=_ADDRESS)),
]


def strict_call(notation: str, tokenizer: Tokenizer, *, named: bool = True) -> Constraint:
    """Exactly one call of a strict tool in a notation: of the largest (`named`), or of any (`tool_choice` "required")."""
    format = next(one for one in FORMATS if one.name == notation)
    name = STRICT_TOOLS[0]["function"]["name"] if named else None
    return tool_call(format, STRICT_TOOLS, name=name, single=True, split=tokenizer.split)


# Calls that nobody demands

_FREE = {
    "get_current_weather_forecast": "destination_city_name",
    "send_short_text_message": "message_to_be_sent",
    "translate_text_to_french": "english_source_text",
}
FREE_TOOLS = [_tool(name, _object(**{key: {"type": "string"}}), strict=False) for name, key in _FREE.items()]
_SHOWN = (
    ("What is the weather in Rome?", "get_current_weather_forecast", "Rome"),
    ("Tell Ann that I am late.", "send_short_text_message", "I am late."),
    ("How do you say good morning in French?", "translate_text_to_french", "good morning"),
    ("Will it rain in Oslo?", "get_current_weather_forecast", "Oslo"),
    ("Say hello to Bob.", "send_short_text_message", "Hello, Bob!"),
    ("What is the French for cheese?", "translate_text_to_french", "cheese"),
)
_ASKED = (
    "Will it snow in Helsinki?",
    "Tell Tom that dinner is ready.",
    "How do you say the house is red in French?",
    "What is the weather like in Lisbon?",
    "Tell Eve to come at nine.",
    "Will there be a storm in Bergen?",
    "What is the French for a small blue bird?",
    "Let Max know that the train is late.",
)
HERMES = """
{%- if tools %}<|im_start|>system
You call tools: {% for tool in tools %}{{ tool.function.name }}{{ ", " if not loop.last }}{% endfor %}.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ "\n" if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that was taught Hermes's notation."""


class _Hermes:
    """A model's tokenizer, with that template."""

    chat_templates: Mapping[str, str] = {"default": HERMES}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_tokens = tokenizer.special_tokens
        self.encode = tokenizer.encode
        self.token_id = tokenizer.token_id


def free_calls(tokenizer: Tokenizer, *, calls: bool = True) -> tuple[Sequence[str], ToolSpans]:
    """Conversations with calls whose last message asks for one more (without `calls` for a story, none having been shown), and what is
    settled of that call."""
    template = ChatTemplate(_Hermes(tokenizer))
    shown: list[dict[str, Any]] = []
    for asked, name, value in _SHOWN if calls else ():
        function = {"name": name, "arguments": json.dumps({_FREE[name]: value})}
        made = [{"id": "a1b2c3d4e", "type": "function", "function": function}]
        shown += [{"role": "user", "content": asked}, {"role": "assistant", "content": "", "tool_calls": made}]
    last = _ASKED if calls else [f"Tell me about {what}." for what in ("the sea", "rivers", "the moon", "bread")]
    prompts = [template.render([*shown, {"role": "user", "content": text}], FREE_TOOLS).text for text in last]
    spans = tool_spans(template, FREE_TOOLS, lambda ids: tokenizer.decode(ids, hide=False))
    if spans is None:
        raise ValueError("nothing of a call is settled: tools and template must be such that something is")
    return prompts, spans
