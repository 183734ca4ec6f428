"""Gnomon: a local language-model server and toolkit on MLX.

    with gnomon.load("path/to/model") as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)

Names are loaded on first use, so that importing a part that never touches the device doesn't load MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.engine.api import (
        HLG,
        ChoiceFinished,
        Delta,
        EngineError,
        EngineUnavailable,
        Event,
        Failed,
        Finished,
        InvalidRequest,
        Progress,
        QueueFull,
        Request,
        SamplingParams,
        Usage,
    )
    from gnomon.engine.completion import Choice, Completion
    from gnomon.engine.engine import Engine, load
    from gnomon.engine.settings import Host, Settings

__version__ = "0.1.0"
__all__ = [
    "HLG",
    "Choice",
    "ChoiceFinished",
    "Completion",
    "Delta",
    "Engine",
    "EngineError",
    "EngineUnavailable",
    "Event",
    "Failed",
    "Finished",
    "Host",
    "InvalidRequest",
    "Progress",
    "QueueFull",
    "Request",
    "SamplingParams",
    "Settings",
    "Usage",
    "load",
]

_HOMES = {
    "Choice": "gnomon.engine.completion",
    "Completion": "gnomon.engine.completion",
    "Engine": "gnomon.engine.engine",
    "Host": "gnomon.engine.settings",
    "Settings": "gnomon.engine.settings",
    "load": "gnomon.engine.engine",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "gnomon.engine.api")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
