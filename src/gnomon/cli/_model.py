"""Finding and loading the model that the flags ask for."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gnomon.cli._library import find
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, with_model_defaults

if TYPE_CHECKING:
    from gnomon.chat.template import ChatTemplate
    from gnomon.chat.tokenizer import Tokenizer
    from gnomon.cli._talk import InProcess
    from gnomon.engine.engine import Engine
    from gnomon.hub.resolve import Found

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory with its engine running; `config` includes the model's own defaults."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    config: Config


def generation_config(path: Path) -> Mapping[str, Any]:
    """What the model's generation_config.json says; empty without one. Raises CommandError when it can't be read."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        said = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise CommandError(f"{file} can't be read: {e}") from e
    if not isinstance(said, dict):
        raise CommandError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", said)


def check_backend() -> None:
    """Raises CommandError naming the extra when MLX has nothing to run on."""
    try:
        import mlx.core  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as e:
        raise CommandError(
            f"MLX has no backend here ({e}): install one with pip install 'gnomon[cpu]' or, for NVIDIA GPUs, 'gnomon[cuda]'"
        ) from e


def start(config: Config, found: Found) -> Loaded:
    """Load a model and start its engine. Raises CommandError with the reason when it can't be loaded."""
    check_backend()
    from gnomon.chat.template import ChatTemplate
    from gnomon.chat.tokenizer import Tokenizer
    from gnomon.engine.engine import load as load_engine

    config, notes = with_model_defaults(config, generation_config(found.path), found.id), config.notes
    for note in config.notes[len(notes) :]:
        log.warning(note)
    try:
        tokenizer = Tokenizer.load(found.path)
        template = ChatTemplate(tokenizer)
        engine = load_engine(
            found.path,
            config.engine,
            model_id=found.id,
            kernels=config.kernel,
            kernel_cache=config.paths.cache / "kernels",
        )
    except (ValueError, OSError, RuntimeError, ImportError) as e:
        raise CommandError(f"{found.id} can't be loaded: {e}") from e
    return Loaded(engine, tokenizer, template, config)


def load(config: Config) -> InProcess:
    """The model for `generate` and `chat`, loaded in this process."""
    from rich.console import Console

    from gnomon.cli._talk import InProcess

    found = find(config)
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with console.status(f"loading {found.id}"):
            loaded = start(config, found)
    else:
        loaded = start(config, found)
    return InProcess(loaded.engine, loaded.tokenizer, loaded.template, loaded.config.sampling)
