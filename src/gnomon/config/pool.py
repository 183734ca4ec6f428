"""Several models in one server."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Which models a server may load, how many at once, and which go. Times are in seconds."""

    model_pool: int | None = option(
        None,
        "serve every model that is here, each asked for by its exact id in `model` and loaded when it is, so many at a time, each in a "
        "process of its own as under --isolate (unset: one model, whatever id is asked for)",
        low=1,
        high=64,
    )
    models: tuple[str, ...] = option(
        (),
        "load this model when it is asked for, and no other but those named so and the first; may be repeated",
        flag="--pool-model",
        metavar="MODEL",
    )
    pins: tuple[str, ...] = option(
        (),
        "load this model at the start and never unload it for another; may be repeated",
        flag="--pin",
        metavar="MODEL",
    )
    idle_unload: float = option(
        0.0, "unload a model that was not asked for so long; 0 keeps it", low=0, high=1e9, unit="s"
    )
    pool_queue: int = option(
        64, "requests that may wait for models to be loaded; more are answered 429", low=1, high=1_000_000
    )
    pool_wait: float = option(
        600.0, "how long a request waits for its model before it is answered 503", low=1, high=86_400, unit="s"
    )
