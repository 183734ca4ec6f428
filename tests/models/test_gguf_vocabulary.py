"""Tokenizers out of GGUF metadata, against sentencepiece itself and transformers' own tokenizers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gnomon.models.gguf import UnsupportedGGUF
from gnomon.models.gguf.vocabulary import PRE_TOKENIZERS, Vocabulary, tokenizer_of, write

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's 1234 o'clock.",
    "Übergröße, naïve café, 東京 and 北京, привет мир — all of them in 2024!",
    "def main():\n    return {'a': [1, 2, 3]}\n\n\n\tprint('x  y   z')\n",
    "We'll see what they've said. I'D SAY NOT.  Two spaces.   Three.",
] * 3
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(["the", " ", "  ", "\n", "\n\n", "'s", "'LL", "12", "3456", "é", "東京", "!?", "\t", "dog"]),
        max_size=14,
    ).map("".join),
)


def metadata(**fields: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def byte_level(pre: str, special: tuple[str, ...] = ("<|end|>", "<|im_end|>"), **fields: Any) -> Vocabulary:
    """A trained byte-level vocabulary, as GGUF metadata with pre-tokenizer `pre`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=list(bytes_to_unicode().values()), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    types = [1] * len(tokens) + [3] * len(special)
    ids = {"eos_token_id": len(tokens)}
    return Vocabulary.read(
        metadata(model="gpt2", pre=pre, tokens=[*tokens, *special], token_type=types, merges=merges, **(ids | fields))
    )


def parts(vocabulary: Vocabulary) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    return vocab, [tuple(merge.split(" ")) for merge in vocabulary.get("merges")]


GPT2, QWEN2, SMOLLM, LLAMA3 = (byte_level(pre) for pre in ("gpt-2", "qwen2", "smollm", "llama-bpe"))


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_gpt2_as_transformers(text: str) -> None:
    vocab, merges = parts(GPT2)
    oracle = GPT2Tokenizer(vocab=vocab, merges=merges)
    mine = tokenizer_of(GPT2)
    ids = mine.encode(text).ids
    assert ids == oracle.encode(text)
    assert mine.decode(ids) == text.encode("utf-8", "replace").decode("utf-8")


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_qwen2_as_transformers(text: str) -> None:
    vocab, merges = parts(QWEN2)
    assert tokenizer_of(QWEN2).encode(text).ids == Qwen2Tokenizer(vocab=vocab, merges=merges).encode(text)


def pieces(vocabulary: Vocabulary, text: str) -> list[str]:
    tokenizer = tokenizer_of(vocabulary)
    decoder = decoders.ByteLevel()
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [decoder.decode([word]) for word, _ in words]


@pytest.mark.parametrize(
    ("vocabulary", "text", "expected"),
    [
        # llama.cpp's regexes, worked by hand: what may not be merged across.
        (SMOLLM, "in 2024 it's", ["in", " ", "2", "0", "2", "4", " it", "'s"]),
        (GPT2, "in 2024 it's", ["in", " 2024", " it", "'s"]),
        (LLAMA3, "in 20245 it'S\n\nok", ["in", " ", "202", "45", " it", "'S", "\n\n", "ok"]),
        (QWEN2, "in 2024 it'S\n\nok", ["in", " ", "2", "0", "2", "4", " it", "'S", "\n\n", "ok"]),
        (byte_level("default"), "a=2024;b", ["a", "=", "202", "4", ";", "b"]),
    ],
    ids=["smollm", "gpt-2", "llama-bpe", "qwen2", "default"],
)
def test_where_words_end(vocabulary: Vocabulary, text: str, expected: list[str]) -> None:
    assert pieces(vocabulary, text) == expected


def test_special_tokens_are_whole_and_user_defined_ones_are_not_special() -> None:
    vocabulary = byte_level("gpt-2")
    types = list(vocabulary.types)
    types[-1] = 4
    tokenizer = tokenizer_of(Vocabulary(vocabulary.tokens, types, vocabulary.metadata))
    ids = tokenizer.encode("a<|im_end|>b<|end|>").ids
    assert ids[1] == len(vocabulary.tokens) - 1
    assert ids[-1] == len(vocabulary.tokens) - 2
    assert tokenizer.decode(ids) == "a<|im_end|>b"


def test_llama3_takes_whole_words_before_merging() -> None:
    # ignore_merges: a word that is a token is that token even where no chain of merges leads to it.
    vocabulary = byte_level("llama-bpe", special=("xyzzy",))
    normal = Vocabulary(vocabulary.tokens, [1] * len(vocabulary.tokens), vocabulary.metadata)
    assert tokenizer_of(normal).encode("xyzzy").ids == [len(vocabulary.tokens) - 1]


@pytest.mark.parametrize("add", [False, True])
def test_bos_and_eos_are_added_as_the_file_says(add: bool) -> None:
    vocabulary = byte_level("gpt-2", bos_token_id=5, add_bos_token=add, add_eos_token=add)
    eos = vocabulary.get("eos_token_id")
    ids = tokenizer_of(vocabulary).encode("dog").ids
    assert (ids[0] == 5, ids[-1] == eos) == (add, add)


def sentencepiece_model(**options: Any) -> sentencepiece.SentencePieceProcessor:
    sink = io.BytesIO()
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 460, "normalization_rule_name": "identity"}
    settings |= {"remove_extra_whitespaces": False, "minloglevel": 2, "character_coverage": 1.0, "split_digits": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=sink, **(settings | options))
    return sentencepiece.SentencePieceProcessor(model_proto=sink.getvalue())


def from_sentencepiece(
    sp: sentencepiece.SentencePieceProcessor, user: tuple[str, ...] = (), **fields: Any
) -> Vocabulary:
    """The metadata llama.cpp's converter writes for a sentencepiece model."""
    ids = range(sp.get_piece_size())
    tokens = [sp.id_to_piece(i) for i in ids]

    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return 2
        if sp.is_control(i):
            return 3
        return 6 if sp.is_byte(i) else 4 if tokens[i] in user else 1

    types = [kind(i) for i in ids]
    scores = [-1000.0 if types[i] in (3, 4) else sp.get_score(i) for i in ids]
    texts = [token.replace("▁", " ") if of == 4 else token for token, of in zip(tokens, types, strict=True)]
    special = {"bos_token_id": sp.bos_id(), "eos_token_id": sp.eos_id(), "unknown_token_id": sp.unk_id()}
    return Vocabulary.read(
        metadata(model="llama", pre="default", tokens=texts, token_type=types, scores=scores, **(special | fields))
    )


LLAMA_SP = sentencepiece_model()
USER = ("▁▁", "▁▁▁", "\n", "\n\n")
GEMMA_SP = sentencepiece_model(add_dummy_prefix=False, user_defined_symbols=list(USER))
LLAMA_SPM = from_sentencepiece(LLAMA_SP, add_bos_token=False)
GEMMA_SPM = from_sentencepiece(GEMMA_SP, USER, add_bos_token=True, add_space_prefix=False)


@settings(deadline=None, max_examples=120)
@given(TEXTS.filter(lambda text: text and "\0" not in text and "▁" not in text))
def test_llama_as_sentencepiece(text: str) -> None:
    mine = tokenizer_of(LLAMA_SPM)
    ids = mine.encode(text).ids
    assert ids == LLAMA_SP.encode(text)
    assert mine.decode(ids) == LLAMA_SP.decode(ids)


@settings(deadline=None, max_examples=120)
@given(TEXTS.filter(lambda text: "\0" not in text and "▁" not in text))
def test_gemma_as_sentencepiece(text: str) -> None:
    mine = tokenizer_of(GEMMA_SPM)
    ids = mine.encode(text).ids
    assert ids == [GEMMA_SP.bos_id(), *GEMMA_SP.encode(text)]
    assert mine.decode(ids) == text


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tools": "{{ 2 }}"}
    context = {"general.architecture": "llama", "llama.context_length": 77}
    vocabulary = Vocabulary(GEMMA_SPM.tokens, GEMMA_SPM.types, {**GEMMA_SPM.metadata, **template, **context})
    write(vocabulary, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        text = "the dog doesn't  mind\n\n東京"
        assert loaded.encode(text) == [GEMMA_SP.bos_id(), *GEMMA_SP.encode(text)]
        assert loaded.decode(GEMMA_SP.encode(text)) == text
        assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<s>", "</s>", "<unk>")
        assert loaded.model_max_length == 77
        assert loaded.chat_template == {"default": "{{ 1 }}", "tools": "{{ 2 }}"}
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": GEMMA_SP.bos_id(), "eos_token_id": GEMMA_SP.eos_id()}


def test_turn_ends_join_the_eos_ids() -> None:
    vocabulary = byte_level("gpt-2")
    assert vocabulary.eos_ids == [len(vocabulary.tokens) - 2, len(vocabulary.tokens) - 1]
    named = byte_level("gpt-2", eot_token_id=3)
    assert named.eos_ids == [len(named.tokens) - 2, 3, len(named.tokens) - 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama"),
        ({"pre": "jais-2"}, r"tokenizer.ggml.pre 'jais-2' is not supported; supported: .*smollm"),
        ({"model": "llama"}, r"needs tokenizer.ggml.scores"),
        ({"merges": ["nope nope"]}, r"tokenizer.ggml.merges doesn't go with the tokens"),
        ({"tokens": []}, r"the file has no tokenizer.ggml.tokens"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    base = dict(GPT2.metadata) | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    with pytest.raises(UnsupportedGGUF, match=message):
        tokenizer_of(Vocabulary.read(base))


def test_every_named_pre_tokenizer_can_be_built() -> None:
    for pre in PRE_TOKENIZERS:
        assert tokenizer_of(byte_level(pre)).encode("dog").ids
