"""Which notation of tool calls a model was taught: from its chat template, or else from its vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from gnomon.chat.reasoning import CHANNEL, MESSAGE, START
from gnomon.chat.tools import deepseek, kimi, kimi_k3, llama, mistral
from gnomon.chat.tools.deepseek import DeepSeek
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.gemma import Gemma
from gnomon.chat.tools.glm import Glm
from gnomon.chat.tools.harmony import Harmony
from gnomon.chat.tools.invoke import Invoke
from gnomon.chat.tools.kimi import Kimi
from gnomon.chat.tools.kimi_k3 import KimiK3
from gnomon.chat.tools.llama import Llama
from gnomon.chat.tools.minicpm import MiniCPM
from gnomon.chat.tools.mistral import Mistral
from gnomon.chat.tools.pythonic import Pythonic
from gnomon.chat.tools.qwen import FUNCTION
from gnomon.chat.tools.tagged import Tagged
from gnomon.chat.tools.values import Notation

HARMONY = Harmony(name="harmony", openers=(START, CHANNEL), leading=("to=",), whole_turn=True)
KIMI_K3 = KimiK3(name="kimi_k3", openers=(kimi_k3.TOOLS, kimi_k3.CALL), ends_thinking=(kimi_k3.TOOLS,))
KIMI_K2 = Kimi(name="kimi_k2", openers=(kimi.SECTION, kimi.CALL), ends_thinking=(kimi.SECTION,))
DEEPSEEK = DeepSeek(name="deepseek", openers=(deepseek.SECTION, deepseek.CALL), ends_thinking=(deepseek.SECTION,))
DSML = Invoke(
    name="dsml",
    openers=("<｜DSML｜function_calls>", "<｜DSML｜invoke"),
    close="</｜DSML｜function_calls>",
    prefix="｜DSML｜",
    declares=True,
    ends_thinking=("<｜DSML｜function_calls>",),
)
MINIMAX = Invoke(name="minimax", openers=("<minimax:tool_call>", "<invoke name="), close="</minimax:tool_call>")
MUSE = Invoke(
    name="muse",
    openers=("<atem:function_calls>", "<atem:invoke"),
    close="</atem:function_calls>",
    prefix="atem:",
)
GEMMA = Gemma(name="gemma", openers=("<|tool_call>",), close="<tool_call|>", notation=Notation(mark='<|"|>', bare=True))
FUNCTION_GEMMA = Gemma(
    name="function_gemma",
    openers=("<start_function_call>",),
    close="<end_function_call>",
    notation=Notation(mark="<escape>", bare=True),
)
LONGCAT = Glm(name="longcat", openers=("<longcat_tool_call>",), close="</longcat_tool_call>", prefix="longcat_")
GLM = Glm(name="glm", openers=("<tool_call>",), close="</tool_call>")
SEED = Tagged(
    name="seed", openers=("<seed:tool_call>", FUNCTION), close="</seed:tool_call>", framing="none", style="elements"
)
QWEN_XML = Tagged(name="qwen_xml", openers=("<tool_call>", FUNCTION), close="</tool_call>", style="elements")
MINICPM = MiniCPM(name="minicpm", openers=("<function name=",))
MISTRAL = Mistral(name="mistral", openers=(mistral.TOOL_CALLS,))
PYTHONIC = Pythonic(name="pythonic", openers=("<|tool_call_start|>",), close="<|tool_call_end|>")
COMMAND = Tagged(name="command", openers=("<|START_ACTION|>",), close="<|END_ACTION|>", style="list")
NEMOTRON = Tagged(name="nemotron", openers=("<TOOLCALL>",), close="</TOOLCALL>", style="list")
GRANITE = Tagged(name="granite", openers=("<|tool_call|>",), close="<|/tool_call|>", style="list")
JSON = Tagged(name="json", openers=("<tool_call>",), close="</tool_call>")
GENERIC = Tagged(name="generic", openers=("<tool_call>",), close="</tool_call>")
"""For models that were taught none: that of Hermes, as `gnomon.chat.tool_prompt` tells it."""
LLAMA = Llama(name="llama", openers=(llama.PYTHON_TAG, llama.PYTHON_START), leading=("{", "["))

FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    KIMI_K3,
    KIMI_K2,
    DEEPSEEK,
    DSML,
    MINIMAX,
    MUSE,
    GEMMA,
    FUNCTION_GEMMA,
    LONGCAT,
    GLM,
    SEED,
    QWEN_XML,
    MINICPM,
    MISTRAL,
    PYTHONIC,
    COMMAND,
    NEMOTRON,
    GRANITE,
    JSON,
    LLAMA,
)

WRITTEN: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<longcat_tool_call>",), LONGCAT),
    (("<arg_key>",), GLM),
    ((deepseek.SECTION,), DEEPSEEK),
    (("<｜DSML｜",), DSML),
    ((kimi.SECTION,), KIMI_K2),
    (("<atem:function_calls>",), MUSE),
    (("<seed:tool_call>",), SEED),
    ((FUNCTION,), QWEN_XML),
    (('<function name="', '<param name="'), MINICPM),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call_start|>",), PYTHONIC),
    (("<|tool_list_start|>",), PYTHONIC),
    (("<|START_ACTION|>",), COMMAND),
    (("<TOOLCALL>",), NEMOTRON),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>",), JSON),
    ((llama.PYTHON_TAG,), LLAMA),
    ((llama.PYTHON_START,), LLAMA),
    (("ipython", '"parameters"'), LLAMA),
)
"""Formats by what their templates write, all of it; the first that fits. Those that share a tag come before the plainer ones."""

KNOWN: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("｜DSML｜",), DSML),
    ((kimi.SECTION,), KIMI_K2),
    ((deepseek.SECTION,), DEEPSEEK),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call_start|>", "<|tool_call_end|>"), PYTHONIC),
    ((mistral.TOOL_CALLS,), MISTRAL),
    (("<|START_ACTION|>",), COMMAND),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>",), JSON),
    ((llama.PYTHON_TAG,), LLAMA),
    ((llama.PYTHON_START,), LLAMA),
)
"""Formats by the tokens they are made of."""


def detect(template: str | None, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """The format of a model, from the source of its chat template and what tokens its vocabulary has; None if it has none.

    Structures made of special tokens come first, then what the template writes, then tokens that the template doesn't mention.
    """
    if all(has_token(token) for token in (START, CHANNEL, MESSAGE)):
        return HARMONY
    if all(has_token(token) for token in (kimi_k3.OPEN, kimi_k3.CLOSE, kimi_k3.SEP, "<|end_of_msg|>")):
        return KIMI_K3
    source = template or ""
    for written, format in WRITTEN:
        if all(text in source for text in written):
            return format
    for tokens, format in KNOWN:
        if all(has_token(token) for token in tokens):
            return format
    return None
