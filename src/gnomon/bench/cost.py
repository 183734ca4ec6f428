"""Bytes and operations a forward must spend, from an inventory: the least work, by phase, against which a roofline is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from gnomon.bench.inventory import Inventory, Weight

KV_BYTES = 2
"""Bytes of a cached element: 16-bit floats."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Least work of one forward. `weight_bytes` and `state_bytes` are read, `operations` count a multiplication and an addition as two."""

    tokens: int
    weight_bytes: float
    state_bytes: float
    operations: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.state_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.tokens + other.tokens,
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.operations + other.operations,
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    inner = config.get("text_config")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, dict) else config


class CostModel:
    """Costs of a model. Attention is read off the key and value projections; layers without them keep no state that grows."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        config = text_config(inventory.config)
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
        active = config.get("num_experts_per_tok") or config.get("top_k_experts")
        self.expert_share = float(active) / float(experts) if experts and active else 1.0
        """Share of the routed experts that one token uses."""
        self._window = config.get("sliding_window")
        self._types = cast("list[str]", config.get("layer_types") or [])
        self._pattern = config.get("sliding_window_pattern")
        self._keys = self._widths("k_proj", "kv_a_proj_with_mqa")
        self._values = self._widths("v_proj")
        self._queries = self._widths("q_proj")

    def _widths(self, *names: str) -> dict[int, int]:
        found: dict[int, int] = {}
        for weight in self._inventory.weights:
            if weight.layer is not None and weight.is_matrix and weight.name.endswith(names):
                found[weight.layer] = weight.shape[-2]
        return found

    def window(self, layer: int) -> int | None:
        """Tokens a layer's attention reaches back, None for all."""
        if not isinstance(self._window, int):
            return None
        if layer < len(self._types):
            return self._window if self._types[layer] == "sliding_attention" else None
        if isinstance(self._pattern, int):
            return None if (layer + 1) % self._pattern == 0 else self._window
        return None

    def _reach(self, layer: int, depth: int) -> int:
        window = self.window(layer)
        return depth if window is None else min(depth, window)

    def state_bytes(self, depth: int) -> float:
        """Bytes of keys and values that one token at `depth` attends to, in 16-bit floats."""
        width = ((self._keys[n] + self._values.get(n, 0)) * self._reach(n, depth) for n in self._keys)
        return float(sum(width) * KV_BYTES)

    def _attention_operations(self, depth: int) -> float:
        """Scores and weighted sum of one token over what it attends to: 4 x query width x reach, per layer."""
        return float(sum(4 * self._queries.get(n, self._keys[n]) * self._reach(n, depth) for n in self._keys))

    def _share(self, weight: Weight, tokens: int) -> float:
        """Share of a weight that `tokens` tokens read at least: all of it, but of routed experts those they can use."""
        return min(1.0, self.expert_share * tokens) if weight.role == "expert" else 1.0

    def forward(self, tokens: int, depth: int, outputs: int = 1, rows: int = 1) -> Cost:
        """Least cost of one forward over `tokens` tokens in each of `rows` rows at `depth`, with logits for `outputs` positions a row."""
        read = multiplied = 0.0
        inventory = self._inventory
        for w in inventory.weights:
            is_head = w.role == "head" or (w.role == "embedding" and inventory.tied)
            if w.role == "embedding":
                width = w.size / w.shape[0]
                read += tokens * rows * width
            if is_head:
                read += w.size if outputs else 0.0
                multiplied += 2.0 * w.parameters * outputs * rows
            elif w.role != "embedding":
                read += w.size * self._share(w, tokens * rows)
                if w.is_matrix:
                    used = self.expert_share if w.role == "expert" else 1.0
                    multiplied += 2.0 * w.parameters * used * tokens * rows
        middle = depth + tokens // 2
        attention = self._attention_operations(middle) * tokens * rows
        return Cost(tokens * rows, read, self.state_bytes(depth + tokens) * rows, multiplied + attention)

    def decode(self, depth: int, rows: int = 1) -> Cost:
        """Least cost of one decode step."""
        return self.forward(1, depth, 1, rows)

    def prefill(self, prompt: int, chunk: int = 2048, depth: int = 0) -> Cost:
        """Least cost of a prompt in chunks, its last token alone: what stands before the first output token."""
        total = self.forward(1, depth + prompt - 1)
        done = 0
        while done < prompt - 1:
            step = min(chunk, prompt - 1 - done)
            total += self.forward(step, depth + done, 0)
            done += step
        return total
