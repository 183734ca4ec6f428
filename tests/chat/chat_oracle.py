"""A byte-level tokenizer with the special tokens of several model families, in the library whose rendering is the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]


def build(template: str | dict[str, str] | None, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """256 bytes, no merges, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL, *extra])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@dataclass
class Adapter:
    """What `ChatTemplate` asks of a tokenizer, over the oracle's."""

    inner: PreTrainedTokenizerFast

    @property
    def chat_templates(self) -> Mapping[str, str]:
        given = self.inner.chat_template
        return {"default": given} if isinstance(given, str) else given or {}

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self.inner.special_tokens_map

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.inner.encode(text, add_special_tokens=special)

    def token_id(self, piece: str) -> int | None:
        return self.inner.get_vocab().get(piece)


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def tokenizer(name: str, *extra: str) -> Adapter:
    return Adapter(build(source(name), extra))
