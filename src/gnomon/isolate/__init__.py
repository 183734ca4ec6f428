"""The engine in a process of its own: the process that answers HTTP loads no MLX and outlives whatever happens to the device."""

from gnomon.isolate.child import run
from gnomon.isolate.engine import IsolatedEngine

__all__ = ["IsolatedEngine", "run"]
