"""A GGUF file's tokenizer as a Hugging Face tokenizer.json and its companions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gnomon.models.gguf.errors import UnsupportedGGUF

Metadata = Mapping[str, Any]

_LLAMA3: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's fallback for files that name no pre-tokenizer (unicode regexes applied one after another).
_DEFAULT: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
PRE_TOKENIZERS: Final[dict[str, str]] = {
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "default": "default",
}
_TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


class TokenType(IntEnum):
    """ggml's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer fields of one GGUF file."""

    tokens: list[str]
    types: list[int]
    metadata: Metadata

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        """Raises `UnsupportedGGUF` when the file has no usable tokenizer."""
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise UnsupportedGGUF("the file has no tokenizer.ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type") or [int(TokenType.NORMAL)] * len(tokens)
        return cls(list(tokens), [int(kind) for kind in types], metadata)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `tokenizer.ggml.<name>`, or `default`."""
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def token(self, name: str) -> str | None:
        """The text of the special token `name` ("bos", "eos", "unknown", "padding", "eot"), if the file names one."""
        index = self.get(f"{name}_token_id")
        return self.tokens[int(index)] if index is not None and 0 <= int(index) < len(self.tokens) else None

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a generation: eos, eot, and control tokens known to end a turn; eos first."""
        ids = [int(value) for name in ("eos_token_id", "eot_token_id") if (value := self.get(name)) is not None]
        ids += [
            index
            for index, token in enumerate(self.tokens)
            if token in _TURN_ENDS and self.types[index] == TokenType.CONTROL
        ]
        return list(dict.fromkeys(ids))


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer. Raises `UnsupportedGGUF` naming a model or pre-tokenizer outside the supported ones."""
    model = vocabulary.get("model")
    if model == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise UnsupportedGGUF(f"tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama")
    tokenizer.add_special_tokens(_added(vocabulary, TokenType.CONTROL, special=True))
    tokenizer.add_tokens(_added(vocabulary, TokenType.USER_DEFINED, special=False))
    _surround(tokenizer, vocabulary)
    return tokenizer


def write(vocabulary: Vocabulary, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json into `directory`."""
    tokenizer_of(vocabulary).save(str(directory / "tokenizer.json"))
    special = {
        f"{short}_token": text
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (text := vocabulary.token(name)) is not None
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(vocabulary, "bos"),
        "add_eos_token": _adds(vocabulary, "eos"),
        **special,
    }
    architecture = vocabulary.metadata.get("general.architecture")
    if (context := vocabulary.metadata.get(f"{architecture}.context_length")) is not None:
        config["model_max_length"] = int(context)
    if (template := _chat_template(vocabulary.metadata)) is not None:
        config["chat_template"] = template
    generation: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (value := vocabulary.get(name)) is not None:
            generation[key] = int(value)
    if ids := vocabulary.eos_ids:
        generation["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "special_tokens_map.json", special)
    write_json(directory / "generation_config.json", generation)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _chat_template(metadata: Metadata) -> str | list[dict[str, str]] | None:
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): str(value) for key, value in metadata.items() if key.startswith(prefix)}
    if not named:
        return None if default is None else str(default)
    if default is not None:
        named = {"default": str(default)} | named
    return [{"name": name, "template": template} for name, template in named.items()]


def _added(vocabulary: Vocabulary, kind: TokenType, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, of in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if of == kind and token
    ]


def _adds(vocabulary: Vocabulary, name: str) -> bool:
    # llama.cpp's defaults where the file says nothing: sentencepiece models start with bos, byte-level ones don't.
    return bool(vocabulary.get(f"add_{name}_token", name == "bos" and vocabulary.get("model") == "llama"))


def _surround(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    bos = vocabulary.token("bos") if _adds(vocabulary, "bos") else None
    eos = vocabulary.token("eos") if _adds(vocabulary, "eos") else None
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if vocabulary.get("model") == "gpt2" else []
    if bos or eos:
        around = [token for token in (bos, "$A", eos) if token]
        pair = [*around, *(f"{token}:1" for token in (bos, "$B", eos) if token)]
        named = {token: vocabulary.tokens.index(token) for token in (bos, eos) if token}
        steps.append(processors.TemplateProcessing(single=around, pair=pair, special_tokens=list(named.items())))
    if steps:
        tokenizer.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    name = vocabulary.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedGGUF(
            f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    kind = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", ())]
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    except Exception as error:
        raise UnsupportedGGUF(f"tokenizer.ggml.merges doesn't go with the tokens: {error}") from error
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits: Sequence[Any]
    if kind == "gpt-2":
        splits = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif kind == "smollm":
        splits = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        patterns = {"llama-bpe": (_LLAMA3,), "qwen2": (_QWEN2,), "default": _DEFAULT}[kind]
        splits = [*(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns), bytes_only]
    tokenizer.pre_tokenizer = splits[0] if len(splits) == 1 else pre_tokenizers.Sequence(list(splits))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece BPE: the pair whose joined piece scores highest merges first; unknown characters fall back to bytes."""
    scores = vocabulary.get("scores")
    if scores is None:
        raise UnsupportedGGUF("tokenizer.ggml.model 'llama' needs tokenizer.ggml.scores, which the file lacks")
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.token("unknown")
    prefixed = bool(vocabulary.get("add_space_prefix", True))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(vocabulary, vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixed else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocabulary: Vocabulary, vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    pieces = {
        token: float(scores[index])
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
