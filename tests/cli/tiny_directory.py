"""A model directory as `gnomon` finds them on disk: a tiny random llama over bytes, with a chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

sys.path.insert(0, str(Path(__file__).parent.parent / "chat"))
from chat_oracle import build, source

CONTEXT = 100_000


def make(path: Path, template: str | None = "chatml", seed: int = 7) -> Path:
    """Write the model; the same one every time for a seed."""
    tokenizer = build(source(template) if template else None)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_k": 40}))
    tokenizer.save_pretrained(path)
    return path
