"""How requests that say nothing are sampled."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass

from gnomon.engine.api import HLG, HLGPivot, SamplingParams
from gnomon.options import option

BUILT_IN_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets. None means that no flag, variable or model gave a value."""

    temperature: float | None = option(
        None, "sampling temperature; 0 is greedy (built-in 0.7)", aliases=("--temp",), low=0, high=5
    )
    top_p: float | None = option(None, "nucleus size; 0 is off (built-in 0)", low=0, high=1)
    top_k: int | None = option(None, "tokens kept; 0 is off (built-in 0)", low=0, high=1e6)
    min_p: float | None = option(None, "least probability relative to the best; 0 is off (built-in 0)", low=0, high=1)
    max_tokens: int | None = option(
        None, "most tokens of an answer that doesn't say (built-in: no cap)", low=1, high=1e7
    )
    thinking: bool | None = option(
        None, "thinking of models that can switch it: on or off (built-in: as the template does)"
    )
    hlg_sampling: bool = option(False, "tone-curve sampling (Lab) in place of temperature, top-p and top-k")
    hlg_width: float = option(4.0, "half width of the curve's straight part", low=0, high=100, unit="nats")
    hlg_shoulder: float = option(4.0, "roll-off above it", low=0, high=100, unit="nats")
    hlg_toe: float = option(6.0, "roll-off below it", low=0, high=100, unit="nats")
    hlg_pivot: HLGPivot = option("top", "what the curve is centred on")
    hlg_pivot_offset: float = option(6.0, "how far below the pivot the centre lies", low=0, high=100, unit="nats")
    from_model: frozenset[str] = frozenset()
    """Names of the fields that `with_model_defaults` took from the model."""

    def temperature_for(self, thinking: bool) -> float:
        """The temperature of a request that sets none: a model's own value is capped at 0.7 on turns that don't think."""
        if self.temperature is None:
            return BUILT_IN_TEMPERATURE
        if "temperature" in self.from_model and not thinking:
            return min(self.temperature, BUILT_IN_TEMPERATURE)
        return self.temperature

    def params(self, thinking: bool, seed: int | None = None) -> SamplingParams:
        """How a request that sets nothing itself is sampled."""
        return SamplingParams(
            temperature=self.temperature_for(thinking),
            top_p=self.top_p or 0.0,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=seed,
            hlg=self.hlg if self.hlg_sampling else None,
        )

    @property
    def hlg(self) -> HLG:
        """The curve requests start from, whether or not `hlg_sampling` switches it on."""
        return HLG(self.hlg_width, self.hlg_shoulder, self.hlg_toe, self.hlg_pivot, self.hlg_pivot_offset)
