"""What attention over a prompt's windows takes beside keys and values, and how wide they may be where it holds all their scores at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from gnomon.kernels import codes, native
from gnomon.models.load import LoadedModel
from gnomon.state.codecs import Affine, Coding

LIMIT: Final = 1 << 30
"""Bytes of one layer's scores."""
FEWEST: Final = 8
"""Queries of a window, however long the context."""
_WIDEST_FUSED: Final = 128
"""Elements of a head up to which MLX's fused attention takes windows of several tokens."""
_AT_ONCE: Final = 2
"""Layers of a window that a GPU runs at once: `Rows.pace` sees to it."""
_MASK_BYTES: Final = 3
"""Of a query and a key in a causal mask that is written out, once for all layers: a bool, and the bf16 number that it becomes."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """`pair_bytes` is what one query's score against one key takes in a layer, all heads together; 0 if scores are never held whole.

    `key_bytes` is what a key and its value take in the copies that a layer makes of its own, `mask_bytes` what a query and a key take in
    masks, which all layers share, and `layers` how many of them run at once.
    """

    pair_bytes: int = 0
    key_bytes: int = 0
    mask_bytes: int = 0
    layers: int = 1

    def chunk(self, chunk: int, context: int) -> int:
        """`chunk`, halved until a window's scores against `context` keys stay within `LIMIT`, but not below `FEWEST`."""
        while chunk > FEWEST and chunk * context * self.pair_bytes > LIMIT:
            chunk = max(FEWEST, chunk // 2)
        return chunk

    def nbytes(self, chunk: int, context: int) -> int:
        """Most bytes of a layer's scores in a window of a prompt of up to `context` tokens, of which one may have the widest at fewer."""
        most = max(LIMIT, FEWEST * context * self.pair_bytes)
        return min(chunk * context * self.pair_bytes, most)

    def beside(self, chunk: int, context: int) -> int:
        """Most bytes of copies, masks, and all layers' scores but one's in a window of a prompt of up to `context` tokens."""
        scores, pairs = self.nbytes(chunk, context), min(chunk, context) * context
        if self.pair_bytes:
            pairs = min(pairs, scores // self.pair_bytes)
        return context * self.layers * self.key_bytes + pairs * self.mask_bytes + (self.layers - 1) * scores

    def has_room(self, windows: Iterable[tuple[int, int]]) -> bool:
        """Whether prompts of (tokens to compute, context) may share a window."""
        windows = list(windows)
        width, context = max(tokens for tokens, _ in windows), max(context for _, context in windows)
        return len(windows) * width * context * self.pair_bytes <= LIMIT


def workspace_of(loaded: LoadedModel, coding: Coding | None, *, paged: bool = False) -> Workspace:
    """What attention holds. Scores of the model's type: where keys are in 4 or 8 bits, not tiled and not read by a native kernel of the
    calling thread's, and where no fused kernel takes heads so wide or numbers of 4 bytes, on CUDA and in models of recurrent layers.

    On CUDA also copies of a layer's keys and values: of the buffer that the window outgrew, of all that is
    `paged` or coded as the numbers it stands for, and of these filled up to a length that attention is planned for.
    """
    text, element = _text(loaded.config), _element(loaded)
    heads, is_cuda = int(text.get("num_attention_heads") or 0), native.is_cuda()
    width = int(text.get("head_dim") or 0) or (int(text.get("hidden_size") or 0) // heads if heads else 0)
    is_whole = not codes.reads_codes() and any(
        isinstance(codec, Affine) and not codec.fused for codec in (coding.codecs if coding else ())
    )
    is_wide = width > _WIDEST_FUSED and (is_cuda or "recurrent" in loaded.binding.layer_kinds)
    pair = heads * element if is_whole or is_wide or (is_cuda and element > 2) else 0
    if not is_cuda:
        return Workspace(pair)
    layer = 2 * int(text.get("num_key_value_heads") or heads) * width * element
    copies = 3 if coding is not None or paged else 2
    return Workspace(pair, copies * layer, _MASK_BYTES, _AT_ONCE)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else config


def _element(loaded: LoadedModel) -> int:
    """Bytes of an activation: norms have the type that the model computes in."""
    named = cast("list[tuple[str, mx.array]]", tree_flatten(loaded.model.parameters()))
    return max((array.itemsize for name, array in named if name.endswith("norm.weight")), default=2)
