"""How keys and values of past tokens are held."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from gnomon.options import option

KEY_BITS: Final = (2, 4, 5, 8)
VALUE_BITS: Final = (2, 3, 4, 5, 8)
_TURBO: Final = re.compile(r"turbo(?::k(\d+)v(\d+))?")


@dataclass(frozen=True, slots=True)
class KvScheme:
    """What keys and values are held as.

    `affine`: codes of `bits` with a scale and a bias per `group` elements, in layers of full attention. `config`: the same per layer, as
    the model's kv_config.json says. `turbo`: keys in `key_bits`, values in `value_bits`. Rows are coded from `start` tokens on, but never
    before their first window is over. `fused`: windows of several tokens attend in tiles (affine only). `paged`: tokens are held in pages,
    which requests share.
    """

    mode: Literal["off", "affine", "config", "turbo"] = "off"
    bits: int = 8
    group: int = 64
    key_bits: int = 8
    value_bits: int = 3
    start: int = 0
    fused: bool = False
    paged: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and what is taken."""
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}, but must be 4 or 8")
        if self.group not in (32, 64, 128):
            raise ValueError(f"group is {self.group}, but must be 32, 64 or 128")
        if self.key_bits not in KEY_BITS:
            raise ValueError(f"keys in {self.key_bits} bits: turbo takes {_listed(KEY_BITS)}")
        if self.value_bits not in VALUE_BITS:
            raise ValueError(f"values in {self.value_bits} bits: turbo takes {_listed(VALUE_BITS)}")
        if self.start < 0:
            raise ValueError(f"start is {self.start}, but must not be negative")
        if self.paged and self.start:
            raise ValueError(f"start is {self.start}, but pages are coded from the first token on: it must be 0")

    @property
    def name(self) -> str:
        """As `--kv-quant` takes it."""
        if self.mode == "affine":
            return str(self.bits)
        return f"turbo:k{self.key_bits}v{self.value_bits}" if self.mode == "turbo" else self.mode


def parse_scheme(text: str, fused: bool | None = None) -> KvScheme:
    """The scheme of a `--kv-quant` value. `fused` None leaves tiling to the scheme: on for `config`. Raises ValueError."""
    if text in ("4", "8"):
        return KvScheme("affine", bits=int(text), fused=bool(fused))
    if text == "config":
        return KvScheme("config", fused=fused is not False)
    if text == "off":
        return KvScheme()
    turbo = _TURBO.fullmatch(text)
    if turbo is None:
        raise ValueError(f"{text!r} is not one of config, off, 4, 8, turbo, turbo:kXvY")
    key_bits, value_bits = turbo.groups()
    return KvScheme("turbo", key_bits=int(key_bits or 8), value_bits=int(value_bits or 3))


@dataclass(frozen=True, slots=True)
class KvConfig:
    """How keys and values of past tokens are held."""

    kv_quant: str | None = option(
        None,
        "keys and values in fewer bits: 4, 8, turbo[:kXvY] (k in 2,4,5,8; v in 2,3,4,5,8), config (per layer, as the model's "
        "kv_config.json says) or off; off unless --l2 is given",
        metavar="SCHEME",
    )
    fused_sdpa: bool | None = option(
        None, "attention over 4 and 8 bits goes through prompts in tiles; on for config, off otherwise"
    )
    paged_kv: bool = option(
        False, "keys and values in pages of 256 tokens that requests share; models of full attention only"
    )
    l2: bool = option(False, "equal to mlx-optiq's mixed precision: --kv-quant config --fused-sdpa on")

    @property
    def scheme(self) -> KvScheme:
        """Raises ValueError for a `kv_quant` that names none."""
        scheme = parse_scheme(self.kv_quant or ("config" if self.l2 else "off"), self.fused_sdpa)
        return replace(scheme, paged=self.paged_kv)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
