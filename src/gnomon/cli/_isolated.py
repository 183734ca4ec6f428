"""Serving with the engine in a process of its own. Loads no MLX."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.cli._model import Loaded, generation_config, tracer_of
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, with_model_defaults
from gnomon.hub.resolve import Found
from gnomon.isolate import IsolatedEngine

log = logging.getLogger(__name__)


def begin(config: Config) -> IsolatedEngine:
    """Start the child, which finds and loads a model."""
    return IsolatedEngine([sys.executable, "-m", "gnomon.cli._child"], (config, None))


def start_isolated(config: Config, engine: IsolatedEngine) -> Loaded[IsolatedEngine]:
    """Wait until the child has loaded its model. Raises CommandError with its reason when it can't be loaded."""
    try:
        model = engine.wait()
        path = Path(model.path)
        # A restart serves the same, whatever was downloaded meanwhile.
        engine.restart_with((config, Found(path, model.id)))
        tracer = tracer_of(config)
        config, notes = with_model_defaults(config, generation_config(path), model.id), config.notes
        for note in config.notes[len(notes) :]:
            log.warning(note)
        tokenizer = Tokenizer.load(path)
        return Loaded(engine, tokenizer, ChatTemplate(tokenizer), config, tracer)
    except (ValueError, OSError, RuntimeError) as error:
        engine.stop()
        raise CommandError(str(error)) from error
