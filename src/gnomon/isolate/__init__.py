"""The engine in a process of its own: the process that answers HTTP loads no MLX and outlives whatever happens to the device."""

from gnomon.isolate.child import run
from gnomon.isolate.engine import IsolatedEngine
from gnomon.isolate.member import Lease
from gnomon.isolate.plan import Entry, Plan
from gnomon.isolate.pool import Limits, ModelPool

__all__ = ["Entry", "IsolatedEngine", "Lease", "Limits", "ModelPool", "Plan", "run"]
