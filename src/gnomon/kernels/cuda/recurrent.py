"""The gated delta rule and the mixers of Qwen3-Next and Qwen3.5 around it.

Contract
    gated_delta        q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk], beta [B, T, Hv], state [B, Hv, Dv, Dk],
                       mask bool [B, T] or None; f32, f16 or bf16, q, k and v of one type; Dk a multiple of 32 up to 256, Hv one of Hk;
                       y has q's type, the state keeps its own
    mixer              bf16 or f16, Dk and Dv multiples of 32 up to 256, a float32 state; one launch after the input projections for windows
                       of up to 16 tokens, three for longer ones
    short_convolution  depthwise `mx.conv1d`: x [B, T, C], weight [C, taps, 1], stride 1, no padding or dilation, one group per channel

Arithmetic: float32; q, k, v, y and the norm's result are rounded to the activations' type as the model's own operations do, products
with the state are sums over eight lanes' columns and a fixed tree. With a float32 state a token's result and the state after it don't
depend on chunks or on other rows, so states after kept prefixes are had by running the mixer again on them (`gnomon.state.replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import is_
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_next

from gnomon.kernels.cuda.mixtures import MOST_GRAPHS, become
from gnomon.kernels.cuda.products import TYPES, Weights, most_rows, product
from gnomon.kernels.cuda.sources import Kernel, make
from gnomon.kernels.dispatch import Operation, thread, uncovered
from gnomon.kernels.quantized_matmul import FLOATS

MOST_TOKENS = 16
"""Tokens of a window that one launch takes: a block goes through them one after the other."""
MOST_STATE = 64
"""Numbers of the state that a thread of that launch can hold."""
MIX_BLOCK, BLOCK = 512, 128
NAMES = {**TYPES, mx.float32: "float"}


@cache
def _gated_delta(width: int, each: bool, masked: bool, types: tuple[mx.Dtype, ...]) -> Kernel:
    body = f"""
  gnomon::gated_delta<{width}, {"true" if each else "false"}>(q, k, v, g, beta, state, {"mask" if masked else "nullptr"}, q_shape[1],
      q_shape[2], v_shape[2], v_shape[3], y, after);
"""
    names = ["q", "k", "v", "g", "beta", "state", *(["mask"] if masked else [])]
    named = "_".join(NAMES[t].strip("_") for t in types)
    return make(f"gated_delta_{named}", "recurrent.cuh", names, ["y", "after"], body, block=BLOCK)


def why_not_gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> str | None:
    """What keeps inputs from `gated_delta`, or None."""
    if not {a.dtype for a in (q, g, beta, state)} <= FLOATS or q.dtype != k.dtype or q.dtype != v.dtype:
        return f"types {q.dtype}, {k.dtype}, {v.dtype}, {g.dtype}, {beta.dtype}, {state.dtype}"
    if q.shape[3] % 32 or not 32 <= q.shape[3] <= 256 or v.shape[2] % q.shape[2] or not q.shape[1]:
        return f"heads {q.shape[2:]} and {v.shape[2:]}"
    return None


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The results of a window of tokens and the state after it."""
    batch, _, heads, rows = v.shape
    types = (q.dtype, g.dtype, beta.dtype, state.dtype)
    y, after = _gated_delta(q.shape[3], g.ndim == 4, mask is not None, types)(
        inputs=[q, k, v, g, beta, state, *([] if mask is None else [mask])],
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, state.dtype],
        grid=(-(-rows // 16) * BLOCK, heads, batch),
        threadgroup=(BLOCK, 1, 1),
    )
    return y, after


@cache
def _convolve(types: tuple[mx.Dtype, mx.Dtype, mx.Dtype]) -> Kernel:
    body = """
  gnomon::convolve(x, weight, x_shape[0], x_shape[1], x_shape[2], weight_shape[1], out);
"""
    named = "_".join(NAMES[t].strip("_") for t in types)
    return make(f"convolve_{named}", "recurrent.cuh", ["x", "weight"], ["out"], body, block=256)


def short_convolution(x: mx.array, weight: mx.array) -> mx.array:
    """y[b, t, c] = sum over j of x[b, t + j, c] * weight[c, j]."""
    shape = (x.shape[0], x.shape[1] - weight.shape[1] + 1, x.shape[2])
    dtype = mx.result_type(x, weight)
    return _convolve((x.dtype, weight.dtype, dtype))(
        inputs=[x, weight],
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(-(-shape[0] * shape[1] * shape[2] // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
    )[0]


def _make_convolution(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:  # noqa: ARG001  (no extension)
    def conv1d(
        input: mx.array,
        weight: mx.array,
        /,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        *,
        stream: Any = None,
    ) -> mx.array:
        if (
            thread.active
            and (stride, padding, dilation) == (1, 0, 1)
            and input.ndim == 3
            and input.size
            and groups == input.shape[2] == weight.shape[0]
            and weight.shape[2] == 1
            and input.shape[1] >= weight.shape[1]
            and input.dtype in FLOATS
            and weight.dtype in FLOATS
        ):
            return short_convolution(input, weight)
        return stock(input, weight, stride, padding, dilation, groups, stream=stream)

    return conv1d


OPERATIONS = (Operation("short_convolution", mx, "conv1d", _make_convolution, "depthwise, stride 1, no padding"),)


@dataclass(frozen=True, slots=True)
class Form:
    """Heads of a mixer, and what its kernels are made for."""

    k_heads: int
    v_heads: int
    k_size: int
    v_size: int
    eps: float
    dtype: mx.Dtype

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_size + self.v_heads * self.v_size

    def why_not(self) -> str | None:
        """What keeps such mixers from the kernels, or None."""
        if self.dtype not in TYPES:
            return f"a mixer of {self.dtype}"
        if any(size % 32 or not 32 <= size <= 256 for size in (self.k_size, self.v_size)):
            return f"mixer heads of {self.k_size} and {self.v_size}"
        return None

    def in_one(self, tokens: int) -> bool:
        """Whether a window of that many tokens is one launch."""
        return tokens <= MOST_TOKENS and -(-self.v_size // 64) * self.k_size // 8 <= MOST_STATE


@dataclass(frozen=True, slots=True)
class Projected:
    """A window's projections: mixed [B, T, channels], z [B, T, Hv * Dv], a and b [B, T, Hv]; or all in one: mixed, z, b, a side by side."""

    mixed: mx.array
    others: tuple[mx.array, mx.array, mx.array] | None = None

    def arrays(self) -> list[mx.array]:
        return [self.mixed, *(self.others or ())]


def _inputs(form: Form, joined: bool, masked: bool, lengths: bool, first: str) -> tuple[list[str], str]:
    """Names of inputs, and the lines that put them together."""
    t, z, b, a = TYPES[form.dtype], form.channels, form.v_heads * form.v_size, form.v_heads
    if joined:
        total = f"{z + b + 2 * a}"
        gates = f"{{mixed + {z}, mixed + {z + b + a}, mixed + {z + b}, {total}, {total}, {total}}}"
    else:
        total, gates = f"{z}", f"{{z, a, b, {b}, {a}, {a}}}"
    names = ["mixed", *([] if joined else ["z", "a", "b"]), "before", "weight", "log", "bias"]
    names += [*(["mask"] if masked else []), *(["lengths"] if lengths else [])]
    lines = f"""
  const gnomon::Window<{t}> window{{before, mixed, weight, {"mask" if masked else "nullptr"}, {total}, mixed_shape[1], {form.channels},
      weight_shape[1]}};
  const gnomon::Gates<{t}> gates{gates};
  gnomon::{first}<{t}, {form.k_size}, {form.v_size}>(window, gates, log, bias, """
    return names, lines


@cache
def _mix(form: Form, joined: bool, masked: bool, lengths: bool, types: tuple[mx.Dtype, mx.Dtype]) -> Kernel:
    names, lines = _inputs(form, joined, masked, lengths, "mix")
    body = f"""{lines}state, {"lengths" if lengths else "nullptr"}, norm, {form.eps!r}f, {form.k_heads}, {form.v_heads}, out, kept, after);
"""
    named = "_".join(NAMES[t].strip("_") for t in types)
    return make(
        f"mix_{named}", "recurrent.cuh", [*names, "state", "norm"], ["out", "kept", "after"], body, block=MIX_BLOCK
    )


@cache
def _prepare(form: Form, joined: bool, masked: bool, lengths: bool, types: tuple[mx.Dtype, mx.Dtype]) -> Kernel:
    names, lines = _inputs(form, joined, masked, lengths, "prepare")
    body = f"""{lines}{"lengths" if lengths else "nullptr"}, {form.k_heads}, {form.v_heads}, q, k, v, g, beta, kept);
"""
    named = "_".join(NAMES[t].strip("_") for t in types)
    return make(f"prepare_{named}", "recurrent.cuh", names, ["q", "k", "v", "g", "beta", "kept"], body, block=BLOCK)


@cache
def _norm_heads(form: Form, joined: bool) -> Kernel:
    t, total = TYPES[form.dtype], form.channels + form.v_heads * (form.v_size + 2)
    z = f"z + {form.channels}, {total}" if joined else f"z, {form.v_heads * form.v_size}"
    body = f"""
  gnomon::norm_heads<{t}, {form.v_size}>(y, {z}, norm, {form.eps!r}f, {form.v_heads}, y_shape[0] * y_shape[1] * y_shape[2], out);
"""
    return make("norm_heads", "recurrent.cuh", ["y", "z", "norm"], ["out"], body, block=BLOCK)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a mixer holds besides its projections: convolution [C, taps, 1], A_log and dt_bias [Hv], the norm's weight [Dv]."""

    weight: mx.array
    log: mx.array
    bias: mx.array
    norm: mx.array


def mix(
    form: Form,
    projected: Projected,
    parts: Parts,
    before: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """A mixer between its projections: its result [B, T, Hv * Dv], the inputs to keep [B, taps - 1, C], and the state after the window.

    `before` are the inputs kept so far, `state` is float32 [B, Hv, Dv, Dk]. Tokens whose `mask` [B, T] is false leave no trace; `lengths`
    int32 [B] says where in the window a row's inputs to keep end.
    """
    batch, tokens, _ = projected.mixed.shape
    joined, types = projected.others is None, (parts.log.dtype, parts.bias.dtype)
    case = (form, joined, mask is not None, lengths is not None, types)
    inputs = [*projected.arrays(), before, parts.weight, parts.log, parts.bias]
    inputs += [array for array in (mask, lengths) if array is not None]
    width = form.v_heads * form.v_size
    if form.in_one(tokens):
        out, kept, after = _mix(*case)(
            inputs=[*inputs, state, parts.norm],
            output_shapes=[(batch, tokens, width), before.shape, state.shape],
            output_dtypes=[form.dtype, form.dtype, mx.float32],
            grid=(form.v_heads * MIX_BLOCK, batch, 1),
            threadgroup=(MIX_BLOCK, 1, 1),
        )
        return out, kept, after
    heads = (2 * form.k_heads + form.v_heads + 3) // 4
    keys, gates = (batch, tokens, form.k_heads, form.k_size), (batch, tokens, form.v_heads)
    q, k, v, g, beta, kept = _prepare(*case)(
        inputs=inputs,
        output_shapes=[keys, keys, (*gates, form.v_size), gates, gates, before.shape],
        output_dtypes=[form.dtype, form.dtype, form.dtype, mx.float32, mx.float32, form.dtype],
        grid=(heads * BLOCK, tokens, batch),
        threadgroup=(BLOCK, 1, 1),
    )
    y, after = gated_delta(q, k, v, g, beta, state, mask)
    z = projected.mixed if projected.others is None else projected.others[0]
    out = _norm_heads(form, joined)(
        inputs=[y, z, parts.norm],
        output_shapes=[(batch, tokens, width)],
        output_dtypes=[form.dtype],
        grid=(-(-batch * tokens * form.v_heads // 4) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]
    return out, kept, after


class Mixer:
    """A mixer's form and parts. `joined` are its input projections where one product can take them, `out` its output projection."""

    def __init__(
        self,
        form: Form,
        parts: Parts,
        joined: tuple[Weights, ...] | None,
        out: Weights | None,
        owners: tuple[Any, ...],
    ) -> None:
        self.form = form
        self.parts = parts
        self.joined = joined
        self.out = out
        self.owners = owners
        self._shapes: set[tuple[int, ...]] = set()
        self._compiled = mx.compile(self._step)

    @staticmethod
    def of(layer: Any) -> Mixer | str:
        """What kernels need of a `GatedDeltaNet`, or what keeps it from them."""
        if "bias" in layer.conv1d:
            return "a convolution with a bias"
        parts = Parts(layer.conv1d["weight"], layer["A_log"], layer["dt_bias"], layer.norm["weight"])
        form = Form(
            layer.num_k_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            float(layer.norm.eps),
            parts.weight.dtype,
        )
        if parts.norm.dtype != form.dtype or not {parts.log.dtype, parts.bias.dtype} <= FLOATS:
            return f"a mixer's norm of {parts.norm.dtype}"
        if type(layer) is not qwen3_5.GatedDeltaNet:
            return form.why_not() or Mixer(form, parts, None, None, ())
        owners = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
        weights = [Weights.of(owner) for owner in owners]
        found = tuple(w for w in weights if w is not None)
        alike = len(found) == len(owners) and len({(w.bits, w.group, w.dtype, w.bias is None) for w in found}) == 1
        joined = found if alike and found[0].dtype == form.dtype else None
        out = Weights.of(layer.out_proj)
        return form.why_not() or Mixer(
            form, parts, joined, out if out is not None and out.dtype == form.dtype else None, (*owners, layer.out_proj)
        )

    def is_current(self, layer: Any) -> bool:
        """Whether `layer` still has the parts this was made from."""
        parts, now = self.parts, (layer.conv1d["weight"], layer["A_log"], layer["dt_bias"], layer.norm["weight"])
        return all(map(is_, now, (parts.weight, parts.log, parts.bias, parts.norm)))

    def _joined_is_current(self, layer: Any) -> bool:
        owners = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
        return (
            self.joined is not None
            and all(map(is_, owners, self.owners))
            and all(owner["weight"] is w.weight for owner, w in zip(owners, self.joined, strict=True))
        )

    def project(self, layer: Any, x: mx.array) -> Projected:
        """The input projections of x [B, T, K]."""
        batch, tokens, _ = x.shape
        if not self.owners:
            q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
            mixed = mx.concatenate([part.reshape(batch, tokens, -1) for part in (q, k, v)], axis=-1)
            return Projected(mixed, (z.reshape(batch, tokens, -1), a, b))
        if batch * tokens <= most_rows() and self._joined_is_current(layer):
            return self._joined_product(x)
        mixed, z, b, a = layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
        return Projected(mixed, (z, a, b))

    def _joined_product(self, x: mx.array) -> Projected:
        batch, tokens, _ = x.shape
        return Projected(product(x.reshape(batch * tokens, -1), *(self.joined or ())).reshape(batch, tokens, -1))

    def _step(self, x: mx.array, before: mx.array, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        if self.out is None:
            raise ValueError("an output projection that is no product of the kernels")
        y, kept, after = mix(self.form, self._joined_product(x), self.parts, before, state)
        return product(y.reshape(-1, y.shape[-1]), self.out).reshape(x.shape), kept, after

    def _is_one(self, layer: Any, x: mx.array) -> bool:
        """Whether a window without padding is one compiled function."""
        out = layer.out_proj
        return (
            self.out is not None
            and x.shape[0] * x.shape[1] <= most_rows()
            and self.form.in_one(x.shape[1])
            and self._joined_is_current(layer)
            and out is self.owners[-1]
            and out["weight"] is self.out.weight
        )

    def run(self, layer: Any, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        """The mixer's result [B, T, K]; `cache` gets the inputs to keep and the state, and is advanced."""
        form, (batch, tokens, _) = self.form, x.shape
        before = cache[0] if cache is not None else None
        state = cache[1] if cache is not None else None
        if before is None:
            before = mx.zeros((batch, layer.conv_kernel_size - 1, form.channels), dtype=form.dtype)
        if state is None:
            state = mx.zeros((batch, form.v_heads, form.v_size, form.k_size), dtype=mx.float32)
        lengths = cache.lengths if cache is not None else None
        if mask is None and lengths is None and self._is_one(layer, x):
            if x.shape not in self._shapes:
                if len(self._shapes) == MOST_GRAPHS:
                    self._shapes.clear()
                    self._compiled = mx.compile(self._step)
                self._shapes.add(x.shape)
            y, kept, after = self._compiled(x, before, state)
        else:
            lengths = None if lengths is None else lengths.astype(mx.int32)
            out, kept, after = mix(form, self.project(layer, x), self.parts, before, state, mask, lengths)
            y = layer.out_proj(out)
        if cache is not None:
            cache[0], cache[1] = kept, after
            cache.advance(tokens)
        return y

    def why_not(self, layer: Any, x: mx.array, mask: mx.array | None, cache: Any) -> str | None:
        """What keeps a call from the kernels, or None."""
        if x.ndim != 3 or not x.size or x.dtype != self.form.dtype:
            return f"activations {x.shape} of {x.dtype}"
        if mask is not None and (mask.dtype != mx.bool_ or mask.shape != x.shape[:2]):
            return f"a mask {mask.shape} of {mask.dtype}"
        held = () if cache is None else (cache[0], cache[1])
        for array, dtype in zip(held, (self.form.dtype, mx.float32), strict=False):
            if array is not None and (array.dtype != dtype or array.shape[0] != x.shape[0]):
                return f"a state {array.shape} of {array.dtype}"
        if getattr(layer, "sharding_group", None) is not None:
            return "a mixer shared between ranks"
        return None if self.is_current(layer) else "parts that were replaced"


def _mixer_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if thread.active:
            mixer: Mixer = self.mixer
            why = mixer.why_not(self, inputs, mask, cache)
            if why is None:
                return mixer.run(self, inputs, mask, cache)
            uncovered("gated_delta", why)
        return own(self, inputs, mask, cache)

    return __call__


MIXERS: tuple[type[nn.Module], ...] = (qwen3_5.GatedDeltaNet, qwen3_next.Qwen3NextGatedDeltaNet)


def swap(model: nn.Module) -> dict[str, int]:
    """Let a model's gated delta mixers take the kernels, in place. Returns how many of each class; raises nothing."""
    found: dict[str, int] = {}
    for _, layer in model.named_modules():
        if type(layer) not in MIXERS:
            continue
        mixer = Mixer.of(layer)
        if isinstance(mixer, str):
            uncovered("gated_delta", mixer)
            continue
        name = become(layer, _mixer_forward, mixer=mixer)
        found[name] = found.get(name, 0) + 1
    return found
