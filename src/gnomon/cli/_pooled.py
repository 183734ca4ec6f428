"""Serving several models, each with its engine in a process of its own. Loads no MLX."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.cli._model import generation_config, warn_of_fill
from gnomon.cli._prompt_log import PromptLog
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, SamplingDefaults, with_model_defaults
from gnomon.engine.api import EngineError
from gnomon.hub.resolve import Found
from gnomon.isolate import Entry, IsolatedEngine, Lease, Limits, ModelPool, Plan
from gnomon.serve.services import Voice

log = logging.getLogger(__name__)
CHILD = (sys.executable, "-m", "gnomon.cli._child")
CATALOGUE = (sys.executable, "-m", "gnomon.cli._catalogue")


@dataclass(frozen=True, slots=True)
class Tongue:
    """What of a model's way of speaking outlives its process."""

    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: SamplingDefaults


class Opener:
    """Makes what requests need beside a model's engine; tokenizers are read once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[str, Tongue] = {}

    def __call__(self, entry: Entry, engine: IsolatedEngine) -> Voice:
        """Raises CommandError, OSError or ValueError when its files can't be read."""
        known = self._known.get(entry.id)
        if known is None:
            path = Path(entry.path)
            config = with_model_defaults(self._config, generation_config(path), entry.id)
            for note in config.notes[len(self._config.notes) :]:
                log.warning(note)
            tokenizer = Tokenizer.load(path)
            template = ChatTemplate(tokenizer)
            warn_of_fill(config, template, entry.id)
            known = self._known[entry.id] = Tongue(tokenizer, template, config.sampling)
        told = PromptLog(engine, known.tokenizer) if self._config.log.log_prompts else engine
        return Voice(told, known.tokenizer, known.template, known.sampling)


def start_pool(config: Config) -> tuple[ModelPool[Voice], Voice]:
    """Find the models and load the default. Raises CommandError with the reason when it can't be loaded."""
    places = config.pool.model_pool
    if places is None:
        raise ValueError("the configuration asks for no pool")
    said = _look(config)
    entries = [Entry(**one) for one in said["entries"]]
    pins: list[str] = said["pins"]
    plan = Plan(places, said["room"], config.engine.memory_budget is not None)
    for note in _notes(config, entries, plan, pins):
        log.warning(note)

    def make(entry: Entry, share: int | None) -> IsolatedEngine:
        engine = replace(config.engine, memory_budget=share, prompt_cache=config.engine.prompt_cache // places)
        return IsolatedEngine(CHILD, (replace(config, engine=engine), Found(Path(entry.path), entry.id)))

    wanted = config.pool
    limits = Limits(wanted.pool_queue, wanted.pool_wait, wanted.idle_unload)
    pool = ModelPool(entries, plan, make, Opener(config), pins=pins, limits=limits)
    try:
        lease = pool.acquire(None).result()
    except EngineError as error:
        pool.stop()
        raise CommandError(str(error)) from error
    except BaseException:
        pool.stop()
        raise
    voice = lease.parts
    lease.release()
    for id in pins:
        pool.acquire(id).add_done_callback(_loaded)
    return pool, voice


def _look(config: Config) -> dict[str, Any]:
    done = subprocess.run(CATALOGUE, input=pickle.dumps(config), stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise CommandError(f"the search for models ended with code {done.returncode}")
    said: dict[str, Any] = json.loads(done.stdout)
    if "error" in said:
        raise CommandError(str(said["error"]))
    return said


def _loaded(done: Future[Lease[Voice]]) -> None:
    """A pinned model needs no one to use it; that it couldn't be loaded is in the log already."""
    try:
        done.result().release()
    except (EngineError, CancelledError):
        return


def _notes(config: Config, entries: list[Entry], plan: Plan, pins: list[str]) -> list[str]:
    """What an operator may not expect."""
    notes = []
    if plan.enforced:
        alone = [one.id for one in entries if plan.possible(one.need) and plan.share(one.need) == plan.room]
        never = [one.id for one in entries if not plan.possible(one.need)]
        if alone and plan.places > 1:
            notes.append(f"--memory-budget holds these with no other beside them: {', '.join(alone)}")
        if never:
            notes.append(f"--memory-budget is too small for {', '.join(never)}")
    if len(set(pins)) == plan.places and len(entries) > len(set(pins)):
        notes.append(f"every place of --model-pool {plan.places} is pinned: no other model can be loaded")
    if config.engine.kv_budget is not None:
        notes.append("--kv-budget holds for each model by itself")
    return notes
