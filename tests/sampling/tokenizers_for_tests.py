"""Small tokenizers built on the spot, one per decoder family."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gnomon.chat.tokenizer import Tokenizer as OurTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't matter, does it?",
    "def f(x):\n    return [x, 1, 23]  # naïve café\n",
    "Zażółć gęślą jaźń 你好世界 こんにちは 👩‍👩‍👧 🎉",
    "hello hello world, a b c d e f",
] * 4


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen: byte-level BPE; one marker that is special but not named, one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|channel|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<｜call▁id｜>", special=False)])
    return tokenizer


def sentencepiece(prefix: bool) -> Tokenizer:
    """As Llama 2 (`prefix`) or Gemma: BPE with ▁ for the space and byte fallback."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*|[^▁]+"), "isolated")
    trained.train_from_iterator(
        CORPUS[:2], trainers.BpeTrainer(vocab_size=160, special_tokens=["<unk>", "<s>", "</s>"])
    )
    state = json.loads(trained.to_str())
    vocab, merges = state["model"]["vocab"], [tuple(m) for m in state["model"]["merges"]]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: Unigram pieces with the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT: ## continues a word, the decoder cleans up spaces before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BUILDERS = {
    "byte_level": byte_level,
    "sentencepiece_prefix": lambda: sentencepiece(prefix=True),
    "sentencepiece": lambda: sentencepiece(prefix=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
}


def save(tokenizer: Tokenizer, path: Path, **settings: object) -> Path:
    """Write a model directory with only a tokenizer in it."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    if tokenizer.token_to_id("[CLS]") is not None:
        names = {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]"}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(content))
    return path


def as_loaded(tokenizer: Tokenizer, **settings: object) -> OurTokenizer:
    """What our loader makes of it."""
    with tempfile.TemporaryDirectory() as directory:
        return OurTokenizer.load(save(tokenizer, Path(directory), **settings))
