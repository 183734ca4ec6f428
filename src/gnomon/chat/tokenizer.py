"""A model's tokenizer: text to ids, ids to text, special tokens and chat templates. Reads local files only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from gnomon.chat.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "\u2581"


class TokenizerError(ValueError):
    """A model directory whose tokenizer can't be read."""


class _Backend(Protocol):
    def encode(self, text: str, special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def piece(self, token: int) -> str | None: ...
    def normalizes(self) -> bool: ...
    def token_id(self, piece: str) -> int | None: ...
    def added(self) -> Mapping[int, tuple[str, bool]]: ...
    def size(self) -> int: ...
    def decoder(self) -> Mapping[str, Any]: ...


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(
        self,
        backend: _Backend,
        special_tokens: Mapping[str, str],
        *,
        eos_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        identity: str = "",
    ) -> None:
        """`special_tokens` maps names like `bos_token` to pieces; `eos_ids` come beside the id of `eos_token`."""
        self._backend = backend
        self._added = dict(backend.added())
        self._size = backend.size()
        self._bytes: dict[int, bytes] = {}
        self.special_tokens: Final = dict(special_tokens)
        """Named special tokens, as chat templates expect them."""
        self.chat_templates: Final = dict(chat_templates or {})
        """Jinja sources by name; the usual one is named `default`."""
        self.identity: Final = identity
        """Hash of the files the tokenizer was read from."""
        self.bos_id: Final = self._named("bos_token")
        own = self._named("eos_token")
        self.eos_ids: Final = tuple(sorted({*eos_ids, *(() if own is None else (own,))}))
        """Ids that end a generation, of the tokenizer and of the model's configuration."""
        named = (self._named(name) for name in _NAMED)
        self.hidden_ids: Final = frozenset(i for i in (*named, *self.eos_ids) if i is not None)
        """Ids without text: end of sequence and the named special tokens. Others, such as markers of reasoning or tool calls, are text."""

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer in a model directory. Raises `TokenizerError`, which names the file that is missing or broken."""
        root = Path(path)
        settings = _read_json(root / "tokenizer_config.json")
        special = _special_tokens(root, settings)
        backend: _Backend | None = None
        if (root / "tokenizer.json").is_file():
            backend = _Fast.from_files(root / "tokenizer.json", settings, special)
        if backend is None or _rebuilt_by_transformers(settings, backend):
            backend, special = _from_transformers(root)
        return cls(
            backend,
            special,
            eos_ids=_configured_eos(root),
            chat_templates=_chat_templates(root, settings),
            identity=_identity(root),
        )

    def _named(self, name: str) -> int | None:
        piece = self.special_tokens.get(name)
        return None if piece is None else self._backend.token_id(piece)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's logits may be wider."""
        return self._size

    @property
    def longest_token(self) -> int | None:
        """The most bytes of a text that one id can stand for; None where that isn't known, as with words that are all unknown."""
        return self._longest

    @cached_property
    def _longest(self) -> int | None:
        if self._kind == "other":
            return None
        # Composing characters takes at most three bytes for one.
        shrink = 3 if self._backend.normalizes() else 1
        return shrink * max(len(self.token_bytes(token)) for token in range(self._size))

    @property
    def chat_template(self) -> str | None:
        """The default chat template's Jinja source."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text. `special` adds what the model wants around a raw prompt (often a beginning-of-sequence token).

        Special tokens written in the text become their ids either way.
        """
        return self._backend.encode(text, special)

    def decode(self, ids: Iterable[int], *, hide: bool = True) -> str:
        """Text of ids; `hide` leaves the hidden ones out. Equal to the joined pieces of `stream`."""
        stream = self.stream(hide=hide)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self, *, hide: bool = True) -> Detokenizer:
        """An incremental decoder for one output."""
        hidden = self.hidden_ids if hide else frozenset[int]()
        if self._kind == "other":
            return WindowDetokenizer(self._backend.decode, hidden)
        spm = self._kind != "bytes"

        def token_bytes(token: int) -> bytes:
            return b"" if token in hidden else self.token_bytes(token)

        return ByteDetokenizer(token_bytes, each=spm, strip=self._kind == "spm_strip")

    def piece(self, token: int) -> str:
        """The vocabulary's own spelling of an id ("ĠParis"); empty for ids it doesn't have."""
        return self._backend.piece(token) or ""

    def token_id(self, piece: str) -> int | None:
        """The id of a piece in the vocabulary's own spelling, added tokens included."""
        return self._backend.token_id(piece)

    def is_special(self, token: int) -> bool:
        """Whether an id is an added token marked special."""
        return self._added.get(token, ("", False))[1]

    def split(self, text: str) -> tuple[str | int, ...]:
        """Runs of plain text, and the ids of the special and hidden tokens written between them: those that other text can't spell."""
        pattern, ids = self._specials
        if pattern is None:
            return (text,) if text else ()
        return tuple(ids.get(part, part) for part in pattern.split(text) if part)

    @cached_property
    def _specials(self) -> tuple[re.Pattern[str] | None, Mapping[str, int]]:
        ids = {text: token for token, (text, special) in self._added.items() if special}
        ids |= {self.token_bytes(token).decode(errors="replace"): token for token in self.hidden_ids}
        longest = sorted(filter(None, ids), key=len, reverse=True)
        return (re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None), ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for, hidden ids included; for a byte-level piece possibly only part of a character."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    @cached_property
    def newline_ids(self) -> tuple[int, ...]:
        """Ids of a lone newline."""
        return tuple(self.encode("\n"))

    @cached_property
    def _kind(self) -> str:
        return _decoder_kind(self._backend.decoder())

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added[0].encode()
        piece = self.piece(token)
        if self._kind == "bytes":
            table = _byte_table()
            return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if self._backend.decoder().get("type") == "WordPiece":
            prefix = str(self._backend.decoder().get("prefix", "##"))
            return piece.removeprefix(prefix).encode()
        return piece.replace(_METASPACE, " ").encode()


class _Fast:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}

    @classmethod
    def from_files(cls, file: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> _Fast:
        """Read tokenizer.json and add the tokens that only the settings declare, as transformers' `TokenizersBackend` does.

        Like there, what surrounds a raw prompt is tokenizer.json's own affair: `add_bos_token` in the settings changes nothing.
        """
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
            raise TokenizerError(f"{file} is not a readable tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
        declared = settings.get("added_tokens_decoder") or {}
        wanted = [
            tokenizers.AddedToken(**{k: v for k, v in declared[key].items() if not k.startswith("_")})
            for key in sorted(declared, key=int)
            if isinstance(declared[key], dict)
        ]
        missing = [token for token in wanted if repr(token) not in known]
        names = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *missing)}
        missing += [
            tokenizers.AddedToken(piece, special=True, normalized=False)
            for piece in dict.fromkeys([*(special[name] for name in _NAMED if name in special), *_extra(settings)])
            if piece not in names
        ]
        if missing:
            tokenizer.add_tokens(missing)
        return cls(tokenizer)

    def encode(self, text: str, special: bool) -> list[int]:
        # Unlike `encode`, which holds the interpreter's lock all along: seconds, for a long prompt.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def normalizes(self) -> bool:
        return self._tokenizer.normalizer is not None

    def piece(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def token_id(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def added(self) -> Mapping[int, tuple[str, bool]]:
        tokens = self._tokenizer.get_added_tokens_decoder()
        return {i: (str(token.content), bool(token.special)) for i, token in tokens.items()}

    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def decoder(self) -> Mapping[str, Any]:
        return self._decoder


class _Slow:
    """A transformers tokenizer without a `tokenizers` one inside."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int]) -> str:
        known = [i for i in ids if i < len(self._tokenizer)]
        return str(self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def normalizes(self) -> bool:
        return True

    def piece(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token) if token < len(self._tokenizer) else None

    def token_id(self, piece: str) -> int | None:
        token = self._tokenizer.convert_tokens_to_ids(piece)
        return None if token is None or self.piece(token) != piece else int(token)

    def added(self) -> Mapping[int, tuple[str, bool]]:
        return {i: (str(t.content), bool(t.special)) for i, t in self._tokenizer.added_tokens_decoder.items()}

    def size(self) -> int:
        return len(self._tokenizer)

    def decoder(self) -> Mapping[str, Any]:
        return {}


def _from_transformers(root: Path) -> tuple[_Backend, dict[str, str]]:
    if not any((root / name).is_file() for name in _FILES):
        raise TokenizerError(f"{root} has no tokenizer: none of {', '.join(_FILES)} is there")
    # transformers takes a second to import and most models don't need it.
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(root), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers can't read, we can't either
        raise TokenizerError(f"transformers can't read the tokenizer in {root}: {error}") from error
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return (_Slow(tokenizer) if inner is None else _Fast(inner)), special


def _rebuilt_by_transformers(settings: Mapping[str, Any], backend: _Backend) -> bool:
    """Whether transformers puts its own rules in the place of tokenizer.json's: its Llama class gives ▁ to the text's beginning only.

    The models of this class were trained so, while their files would also insert ▁ behind every special token.
    """
    llama = str(settings.get("tokenizer_class", "")).removesuffix("Fast") == "LlamaTokenizer"
    return llama and _decoder_kind(backend.decoder()) != "bytes"


def _decoder_kind(decoder: Mapping[str, Any]) -> str:
    """`bytes` (byte-level), `spm` or `spm_strip` (▁ and byte fallback, without or with a dummy prefix), or `other`."""
    if decoder.get("type") == "ByteLevel":
        return "bytes"
    if decoder.get("type") != "Sequence":
        return "other"
    steps = decoder["decoders"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes"
    plain = (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and steps[0].get("pattern") == {"String": _METASPACE}
        and steps[0].get("content") == " "
    )
    if plain and len(steps) == 3:
        return "spm"
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return "spm_strip" if plain and steps[3:] == [strip] else "other"


def _byte_table() -> dict[str, int]:
    return _BYTE_TABLE


def _printable_bytes() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_TABLE: Final = _printable_bytes()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} should hold a JSON object, but holds a {type(content).__name__}")
    return content


def _special_tokens(root: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    result: dict[str, str] = {}
    for source in (_read_json(root / "special_tokens_map.json"), settings):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                result[name] = content
    return result


def _extra(settings: Mapping[str, Any]) -> list[str]:
    result: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        declared: Any = settings.get(name) or []
        values = declared.values() if isinstance(declared, dict) else declared
        contents = [value.get("content") if isinstance(value, dict) else value for value in values]
        result += [content for content in contents if isinstance(content, str)]
    return result


def _configured_eos(root: Path) -> list[int]:
    result: list[int] = []
    config = _read_json(root / "config.json")
    text = config.get("text_config")
    sources = [config, text if isinstance(text, dict) else {}, _read_json(root / "generation_config.json")]
    for source in sources:
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        result += [i for i in values if isinstance(i, int)]
    return result


def _chat_templates(root: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for source in (_read_json(root / "chat_template.json"), settings):
        declared = source.get("chat_template")
        if isinstance(declared, str):
            templates["default"] = declared
        elif isinstance(declared, list):
            templates.update({str(item["name"]): str(item["template"]) for item in declared})
        elif isinstance(declared, dict):
            templates.update({str(name): str(template) for name, template in declared.items()})
    if (root / "chat_template.jinja").is_file():
        templates["default"] = (root / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((root / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _identity(root: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        file = root / name
        if file.is_file():
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
