"""The list of mlx-lm's model types with what Gnomon makes of each. Imports no model code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gnomon.models.backend import backend
from gnomon.models.traits import TRAITS, TRIED, Backend, Traits

_DEFINES_MODEL = re.compile(r"^class Model\(|^from \S+ import .*\bModel\b", re.MULTILINE)


@dataclass(frozen=True)
class SupportedType:
    """A `model_type` of `config.json` and its verdict.

    `runs`, `batches` and `ragged` (rows of a batch may take different counts of tokens at once) are None where nobody has tried; `note`
    gives the reason of a no or a condition. `same_as` is the type whose code an alias uses.
    """

    model_type: str
    runs: bool | None
    batches: bool | None
    ragged: bool | None
    note: str = ""
    same_as: str | None = None


def supported_types() -> list[SupportedType]:
    """A row for each model type the installed mlx-lm knows, aliases included, by name; verdicts are for this process's backend."""
    on = backend()
    rows = [_row(name, on) for name in model_types()]
    rows += [_row(target, on, alias) for alias, target in aliases().items() if target in model_types()]
    return sorted(rows, key=lambda row: row.model_type.lower())


def runs(model_type: str) -> bool:
    """Whether mlx-lm has a model type, under its own name or an alias, and nothing is known against it on this process's backend."""
    code = code_of(model_type, ())
    return code is not None and _row(code, backend()).runs is not False


@cache
def model_types() -> frozenset[str]:
    """Names of mlx-lm's model files that define a model."""
    folder = _mlx_lm() / "models"
    return frozenset(path.stem for path in folder.glob("*.py") if _defines_model(path))


def code_of(model_type: str, architectures: Iterable[str]) -> str | None:
    """The name of the mlx-lm model file that runs a type, which some architectures have of their own; None if there is no such file."""
    own = _constant("MODEL_ARCHITECTURE_REMAPPING")
    for architecture in architectures:
        if (model_type, architecture) in own:
            return str(own[model_type, architecture])
    name = aliases().get(model_type, model_type)
    file = _mlx_lm() / "models" / f"{name}.py"
    return name if Path(name).name == name and file.is_file() and _defines_model(file) else None


def _defines_model(file: Path) -> bool:
    return _DEFINES_MODEL.search(file.read_text(encoding="utf-8")) is not None


@cache
def aliases() -> dict[str, str]:
    """Model types that mlx-lm serves with another type's code."""
    return {str(key): str(value) for key, value in _constant("MODEL_REMAPPING").items()}


@cache
def _constant(name: str) -> dict[Any, Any]:
    """A table of mlx-lm's module `utils`, read from its source, since importing it imports transformers; empty without that table."""
    found = re.search(
        rf"^{name} = (\{{.*?^\}})", (_mlx_lm() / "utils.py").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return {} if found is None else ast.literal_eval(found[1])


def _mlx_lm() -> Path:
    spec = find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("mlx_lm is not installed")
    return Path(spec.origin).parent


def _row(name: str, on: Backend, alias: str | None = None) -> SupportedType:
    same_as = None if alias is None else name
    if name not in TRIED:
        return SupportedType(alias or name, None, None, None, "not tried", same_as)
    traits = TRAITS.get(name, Traits())
    if traits.refused is not None and on in traits.refused_on:
        return SupportedType(alias or name, False, False, False, f"not on {on}: {traits.refused}", same_as)
    notes: list[str] = []
    if traits.alone is not None:
        notes.append("alone only: " + traits.alone)
    if traits.sparse_alone is not None:
        notes.append("with sparse layers alone only: " + traits.sparse_alone)
    if not traits.pads:
        notes.append("it ignores row lengths: prompts are prefilled one by one")
    if not traits.windows:
        notes.append("a window of several tokens differs from single steps: nothing is proposed")
    batches = traits.alone is None
    return SupportedType(alias or name, True, batches, batches and traits.pads, "; ".join(notes), same_as)
