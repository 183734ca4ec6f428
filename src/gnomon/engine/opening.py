"""From loaded models and settings to a core that takes requests. Runs on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import KernelConfig
from gnomon.engine.api import ModelInfo, Tier
from gnomon.engine.budget import Budget, budget_for, shared_budget
from gnomon.engine.coding import coding_for, stats_of, tier_of
from gnomon.engine.core import Core, Served, Shared
from gnomon.engine.counters import Counters
from gnomon.engine.drafting import check_draft, open_speculation
from gnomon.engine.paging import pages_for
from gnomon.engine.reuse import Reuse
from gnomon.engine.runner import Runner
from gnomon.engine.settings import Host, Settings
from gnomon.engine.workspace import workspace_of
from gnomon.kernels import native
from gnomon.kernels.native import Kernels
from gnomon.models.load import LoadedModel
from gnomon.state.fingerprint import fingerprint


@dataclass(frozen=True, slots=True)
class Opened:
    """What stays known of a core that was opened. `identity` is what tokens depend on beside the request, `kv` a section of `/stats`."""

    model: ModelInfo
    budget: Budget
    kernels: Kernels
    identity: str
    kv: Mapping[str, Any]


def sections(opened: Opened, core: Core) -> dict[str, Any]:
    """For `/stats`; read on any thread."""
    guessing, speculation = core.speculation, dict[str, Any](enabled=False)
    if guessing is not None:
        speculation = {"enabled": True, **guessing.stats(core.counters.active_rows)}
    return {
        **core.reuse.sections(),
        "memory_pressure": {**core.pressure.stats(), "given_back": core.freed.stats()},
        "speculation": speculation,
        "kernels": dict(opened.kernels.stats()),
        "kv_quant": opened.kv,
        **({} if (ranks := core.ranks) is None else {"distributed": {"rank": ranks.rank, "size": ranks.size}}),
        **core.memory.sections(),
    }


def open_core(
    load: Callable[[], LoadedModel],
    load_draft: Callable[[], LoadedModel] | None,
    tokenizer: Tokenizer,
    settings: Settings,
    host: Host,
    shared: Shared,
) -> tuple[Core, Opened]:
    """Load the models, and build what serves them. Raises what loading raises, and ValueError or RuntimeError for settings that don't go
    with the model."""
    config, cores = settings.engine, list[Core]()
    loaded = load()
    kernels = _prepare(loaded, settings.kernels, alone=host.ranks is None)
    draft = load_draft() if load_draft is not None else None
    if draft is not None:
        check_draft(draft)
        _prepare(draft, settings.kernels)
    coding = coding_for(loaded, settings.kv)
    pages = pages_for(loaded, settings.kv, coding)

    def runner_of(model: LoadedModel) -> Runner:
        if model is loaded:
            return Runner(model, config, Counters(), shared.heart, coding=coding, pages=pages)
        return Runner(model, config, Counters(), shared.heart)

    def reuse() -> Reuse:
        return cores[0].reuse

    budget = budget_for(loaded, config.memory_budget, settings.kv, draft, config.kv_budget)
    if host.ranks is not None:
        budget = shared_budget(budget, loaded.weight_bytes, host.ranks.memory)
    served = Served(
        loaded,
        tokenizer,
        replace(budget, workspace=workspace_of(loaded, coding, paged=pages is not None)),
        coding,
        kernels.identity,
        pages,
    )
    speculation = None
    if host.ranks is None:
        speculation = open_speculation(
            settings.speculation,
            loaded,
            draft,
            runner_of=runner_of,
            # Another build of the kernels has other speeds.
            kernels=f"{kernels.name} {kernels.identity} {settings.kv.name}{' paged' if settings.kv.paged else ''}",
            reuse=reuse,
            measurements=settings.measurements,
            extra=host.propose,
        )
    core = Core(served, settings, host, shared, speculation)
    cores.append(core)
    opened = Opened(
        _told(loaded, settings, "Lab" if kernels.native else tier_of(settings.kv, coding, loaded)),
        served.budget,
        kernels,
        _identity(core, kernels.identity),
        stats_of(settings.kv, coding, loaded),
    )
    return core, opened


def _prepare(loaded: LoadedModel, wanted: KernelConfig, *, alone: bool = True) -> Kernels:
    # Native kernels don't know layers that are split over processes.
    policy = "stock" if wanted.stock or not alone else wanted.kernels
    return native.prepare(
        loaded.model, policy, cache=wanted.kernel_cache, threads=wanted.threads, graph=wanted.cuda_graph
    )


def _identity(core: Core, operations: str) -> str:
    """What tokens depend on beside the request; matters only where generations are saved."""
    saves = core.host.saves
    if saves is None:
        return ""
    return "\n".join((core.reuse.identity, fingerprint(core.loaded.path, saves.directory), operations))


def _told(loaded: LoadedModel, settings: Settings, tier: Tier) -> ModelInfo:
    limits = [one for one in (loaded.context_length, settings.engine.context_limit) if one is not None]
    return ModelInfo(
        id=settings.model_id or loaded.path.name,
        path=str(loaded.path),
        model_type=loaded.model_type,
        context_length=min(limits) if limits else None,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        weight_bytes=loaded.weight_bytes,
        created=int(time.time()),
        batchable=loaded.binding.batchable,
        why_not_batchable=loaded.binding.why_not,
        asserts_calls=settings.speculation.strict,
        tier=tier,
    )
