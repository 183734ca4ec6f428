"""What is known of mlx-lm's model types: which run, which batch, which bear padding. Found by running tiny models of each type against
mlx-lm's own caches; imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TRIED_WITH = "mlx-lm 0.32.2"

Backend = Literal["metal", "cuda", "cpu"]


@dataclass(frozen=True)
class Traits:
    """How a model type departs from the rule, which is: it runs alone, it batches, padding and windows of several tokens are harmless.

    `refused` says why it can't run, on the backends `refused_on`. `alone` says why its rows can't share a forward. `sparse_alone` does
    so for models some of whose layers select keys. `pads` false: padding at a row's end disturbs its state. `windows` false: a
    window of several tokens sees other keys than single steps do, so nothing may be proposed.
    """

    refused: str | None = None
    refused_on: tuple[Backend, ...] = ("metal", "cuda", "cpu")
    alone: str | None = None
    sparse_alone: str | None = None
    pads: bool = True
    windows: bool = True


_IGNORES_LENGTHS = Traits(pads=False)

TRAITS: Mapping[str, Traits] = {
    "afm7": Traits(alone="its layers that reuse keys take their position from the width of the batch"),
    "baichuan_m1": _IGNORES_LENGTHS,
    "bailing_moe_linear": _IGNORES_LENGTHS,
    "bitnet": Traits(refused="its ternary layers exist as a Metal kernel only", refused_on=("cuda", "cpu")),
    "deepseek_v41": Traits(refused="its layers keep compressed keys in a cache of their own kind (LayerCache)"),
    "gpt_bigcode": Traits(alone="its learned positions take one offset for all rows"),
    "jamba": _IGNORES_LENGTHS,
    "llama4": Traits(refused="its chunked attention keeps keys in a cache of its own kind (ChunkedKVCache)"),
    "longcat_flash_ngram": Traits(
        pads=False, alone="the tokens its embeddings look back at are fewer at the start of a prompt"
    ),
    "mamba": _IGNORES_LENGTHS,
    "minimax_m3_vl": Traits(sparse_alone="its sparse layers choose key blocks by the slots of the longest row"),
    "muse_spark": Traits(refused="its fused operations exist as Metal kernels only", refused_on=("cuda", "cpu")),
    "nemotron_h": _IGNORES_LENGTHS,
    "olmo": Traits(refused="it needs the package ai2-olmo, which brings torch"),
    "olmo_hybrid": _IGNORES_LENGTHS,
    "phi3small": Traits(
        refused="it corrupts memory on MLX's CPU backend",
        refused_on=("cpu",),
        alone="its block-sparse mask places queries by the width of the batch",
        windows=False,
    ),
    "plamo3": Traits(pads=False, windows=False),
    "recurrent_gemma": _IGNORES_LENGTHS,
    "rwkv7": _IGNORES_LENGTHS,
}

_TRIED = """
Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone exaone4
exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite
glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl laguna lfm2 lfm2-vl
lfm2_moe lille-130m llama llama4 llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo
mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark
nanbeige nanochat nemotron nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small
phimoe phixtral pixtral plamo plamo2 plamo3 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5 stablelm starcoder2
step3p5 talkie telechat3 youtu_llm
"""
TRIED = frozenset(_TRIED.split())
"""Model types (module names of mlx-lm) of which a tiny model was run."""
