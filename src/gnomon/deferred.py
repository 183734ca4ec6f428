"""Packages whose own code runs when one of its names is asked for, and not yet when a module inside it is imported."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any, Final, cast

_LOCK: Final = RLock()


class _Package(ModuleType):
    """A package between its entry in `sys.modules` and the run of its `__init__`."""

    _modules: dict[str, ModuleType]
    _running: bool

    def __getattr__(self, name: str) -> Any:
        _run(self)
        # Not getattr: while the code runs, it may ask for what isn't there yet.
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and not self._running:
            # The import system stores a module in its package. The package may have a function of that name, which is the later one.
            self._modules[name] = value
        else:
            _run(self)
            ModuleType.__setattr__(self, name, value)


def defer(name: str) -> None:
    """Have the top-level package `name` run its `__init__` at the first use of one of its names; importing its modules runs only their
    own code. A package that is imported already, or missing, is left alone."""
    with _LOCK:
        if name in sys.modules or (spec := find_spec(name)) is None or spec.loader is None:
            return
        module = module_from_spec(spec)
        vars(module).update(_modules={}, _running=False)
        module.__class__ = _Package
        sys.modules[name] = module


def _run(package: _Package) -> None:
    with _LOCK:
        if type(package) is not _Package or package._running:  # pyright: ignore[reportPrivateUsage]
            return
        spec, state = package.__spec__, vars(package)
        if spec is None or spec.loader is None:
            raise ImportError(f"{package.__name__} has lost its loader", name=package.__name__)
        state["_running"] = True
        state.update(state["_modules"])
        try:
            spec.loader.exec_module(package)
        except BaseException:
            # As after any import that failed, the next use tries again.
            state["_running"] = False
            raise
        cast("ModuleType", package).__class__ = ModuleType
        del state["_modules"], state["_running"]
