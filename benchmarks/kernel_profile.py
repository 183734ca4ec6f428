"""The share of a step's time that runs in native CPU kernels, for random models of realistic shapes, and what runs as stock operations.

    uv run python benchmarks/kernel_profile.py [MODEL ...] [--kernels native] [--rows 1] [--steps 12] [--prompt 64] [--context 256]

One thread, the engine's state; the prompt is one row, --rows of it decode together. CPU seconds of native operations are measured in the
extension; the whole are the process's CPU seconds while a step whose graph is built is evaluated, so the difference is MLX's own operations
and its scheduling, and a busy machine disturbs little. The primitives are counted in the graph of one step.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from gnomon.config import resolve
from gnomon.kernels import dispatch, native
from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState

DENSE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LINEAR = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


def _shape(hidden: int, middle: int, heads: int, groups: int, dim: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        **DENSE,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": dim,
        "vocab_size": vocabulary,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama": _shape(576, 1536, 9, 3, 64, 49152, model_type="llama", num_hidden_layers=30),
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": _shape(1024, 3584, 8, 2, 256, 65536, model_type="qwen3_5_text", **LINEAR),
    },
    "qwen3_moe": _shape(
        1024, 3072, 16, 4, 128, 65536, model_type="qwen3_moe", num_experts=32, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True,
    ),
    "gemma3": _shape(
        640, 2048, 4, 1, 256, 65536, model_type="gemma3_text", sliding_window=512, sliding_window_pattern=6,
        query_pre_attn_scalar=256,
    ),
}  # fmt: skip


def make(name: str) -> nn.Module:
    """A random model with 4-bit weights."""
    config = MODELS[name]
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    nn.quantize(model, 64, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and not path.endswith("gate"))
    mx.eval(model.parameters())
    return model


def primitives(*outputs: mx.array) -> Counter[str]:
    """Primitives in the graph of arrays not yet evaluated, by name."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return Counter(re.findall(r'label ?= ?"([A-Za-z]\w*)"[^\n]*shape ?= ?rectangle', text.getvalue()))


def profile(name: str, policy: native.Policy, rows: int, steps: int, prompt: int, context: int) -> None:
    """Print the shares of prefill and decode of one model."""
    model, kernel = make(name), resolve().kernel
    kernels = native.prepare(model, policy, cache=kernel.kernel_cache, threads=1)
    extension = native.extension()
    if not kernels.native or extension is None:
        raise SystemExit(kernels.reason)
    binding = bind(model)
    state = BatchState(model, binding.make_caches(), pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim)
    for phase, width, times in (("prefill", prompt, 2), ("context", context, 1), ("decode", 1, steps)):
        while phase == "decode" and state.num_rows < rows:
            state.join(state.fork(0))
        whole, build, by_name, count = 0.0, 0.0, Counter[str](), Counter[str]()
        for step in range(times + 1):
            tokens = mx.random.randint(5, 1000, (state.num_rows, width))
            mx.eval(tokens)
            begun = time.process_time()
            state.begin(width)
            with dispatch.step():
                logits = model(tokens, cache=state.caches)[:, -1]
                token = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
            state.commit()
            built = time.process_time()
            if step == 0:
                count = primitives(token)
                mx.eval(token, state.arrays())
                continue
            extension.set_profile(True)
            mx.eval(token, state.arrays())
            whole += time.process_time() - built
            build += built - begun
            by_name.update(extension.set_profile(False))
        if phase == "context":
            continue
        own = sum(by_name.values())
        parts = ", ".join(f"{n.removeprefix('Gnomon')} {s / own:.0%}" for n, s in by_name.most_common(6))
        stock = {n: c for n, c in count.most_common() if not n.startswith("Gnomon")}
        print(f"{name} {phase}: {own / whole:.1%} of {whole / times * 1e3:.1f} ms in native operations ({parts})")
        print(
            f"  graph built in {build / times * 1e3:.1f} ms; {sum(count.values())} primitives, stock: {stock}",
            flush=True,
        )
    print(f"  not covered: {dict(dispatch.stock_calls)}")
    dispatch.stock_calls.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all when left out")
    parser.add_argument("--kernels", choices=("native", "int8"), default="native")
    parser.add_argument("--rows", type=int, default=1, help="rows that decode together")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    for name in args.models or MODELS:
        profile(name, args.kernels, args.rows, args.steps, args.prompt, args.context)


if __name__ == "__main__":
    main()
