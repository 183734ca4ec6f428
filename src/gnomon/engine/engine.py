"""The engine: its thread's life, and the door that other threads knock at."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from gnomon import bell
from gnomon.chat.constraint import Constraint
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig
from gnomon.engine import admission, stats
from gnomon.engine.api import (
    EngineError,
    EngineUnavailable,
    FlushReport,
    Health,
    InvalidRequest,
    ModelInfo,
    QueueFull,
    Request,
    Sink,
    TokenLogprob,
    Unenforceable,
)
from gnomon.engine.aside import SideJob
from gnomon.engine.budget import allocator_limits
from gnomon.engine.core import Core, Shared
from gnomon.engine.counters import Counters
from gnomon.engine.drafting import check_tokenizers
from gnomon.engine.embedding import EmbeddingJob, embeds
from gnomon.engine.exits import await_thread_exit
from gnomon.engine.generating import Generating
from gnomon.engine.heart import Heart
from gnomon.engine.mailbox import Ask, Beside, Cancel, CloseSession, Stop, Submit, Wake
from gnomon.engine.opening import Opened, open_core, sections
from gnomon.engine.ranks import Begin, about, check_ranks, kept, listen, mailbox_of
from gnomon.engine.resume import Record, Slot, claim
from gnomon.engine.row import Job
from gnomon.engine.runner import DeviceFailed
from gnomon.engine.sampling import fresh_seed
from gnomon.engine.scoring import ScoringJob
from gnomon.engine.settings import Host, Settings
from gnomon.grammar import Compiled, Compiler, Vocabulary
from gnomon.grammar import Unenforceable as NoGrammar
from gnomon.models.load import LoadedModel, read_config
from gnomon.models.load import load as load_model
from gnomon.models.split import splitter

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_BEAT = 1.0
"""Seconds between heartbeats of an idle engine."""
ASK_SECONDS = 60.0
"""How long another thread waits for an answer of the engine's."""
SWITCH_SECONDS = 0.0005
"""How long the engine's thread waits for another that runs Python (a prompt being rendered) before it takes the interpreter over. It waits
so several times a step."""
MAX_RESETS = 3
"""Defects in a row, with no request finished between them, after which the engine gives up."""


class Engine(Generating):
    """Serves one model from one thread, which loads it, builds every graph and evaluates it.

    `load` and `load_draft` run on that thread.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        tokenizer: Tokenizer,
        settings: Settings | None = None,
        host: Host | None = None,
        *,
        load_draft: Callable[[], LoadedModel] | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.config = self.settings.engine
        self.tokenizer = tokenizer
        self.host = host or Host()
        self._saves = self.host.saves
        self._load = load
        self._load_draft = load_draft
        self._mailbox = mailbox_of(self.host.ranks, self._begun_elsewhere)
        self._counters = Counters()
        self._heart = Heart(self.config.stall_timeout)
        self._started = time.time()
        self._core: Core | None = None
        self._opened: Opened | None = None
        self._compiler: Compiler | None = None
        self._error: Exception | None = None
        self._loaded = threading.Event()
        self._draining = False
        self._stopped = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_aside = 0
        """Side jobs whose future is open; guarded by the lock."""
        self._open: dict[str, Job] = {}
        """Requests whose last event was not sent yet; guarded by the lock."""
        self._thread = threading.Thread(target=self._run, name="gnomon-engine", daemon=True)
        # A daemon thread inside MLX while the interpreter is torn down would crash the process.
        atexit.register(self.stop)
        self._thread.start()
        listen(self._mailbox, self)

    # The door

    @property
    def model(self) -> ModelInfo:
        return self._ready.model

    @property
    def _ready(self) -> Opened:
        if self._opened is None:
            raise EngineUnavailable("the model is still loading" if self._error is None else str(self._error))
        return self._opened

    def wait(self, timeout: float | None = None) -> ModelInfo:
        """Wait until the model is loaded. Raises what loading raised, or TimeoutError."""
        if not self._loaded.wait(timeout):
            raise TimeoutError(f"the model was not loaded within {timeout} s")
        if self._opened is None and self._error is not None:
            raise self._error
        return self.model

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its events reach `sink` on the engine thread, ending with `Finished` or `Failed`.

        Raises `InvalidRequest`, `QueueFull` or `EngineUnavailable`; then nothing was started.
        """
        opened, saves = self._ready, self._saves
        grammar = None if request.constraint is None else self._grammar(request.constraint)
        if saves is None:
            self._submit(request, sink, opened, grammar)
            return
        vocab_size = opened.model.vocab_size
        request, slot, record = claim(saves, request, opened.identity, self.tokenizer, vocab_size, grammar)
        try:
            self._submit(request, sink, opened, grammar, slot, record)
        except EngineError:
            if slot is not None:
                saves.keep(slot)
            raise
        if record is not None:
            saves.tell_resumed(record)
            log.info("request %s goes on after %d tokens of an interrupted answer", request.id, len(record.tokens))

    def _submit(
        self,
        request: Request,
        sink: Sink,
        opened: Opened,
        grammar: Compiled | None,
        slot: Slot | None = None,
        record: Record | None = None,
    ) -> None:
        model = opened.model
        in_memory = opened.budget.max_context(max(1, request.n))
        limit = admission.token_limit(request, model, self.config.context_limit, in_memory)
        admission.check_states(request, limit, opened.budget)
        seed = request.sampling.seed
        if seed is None:
            seed = fresh_seed() if record is None else record.seed
        if self.host.ranks is not None:
            sink = kept(sink, lambda: self.cancel(request.id))
        job = Job(request, sink, limit, seed, grammar, tier=model.tier, slot=slot, record=record)
        with self._lock:
            self._refuse_if_closed()
            if request.id in self._open:
                raise InvalidRequest(f"request id {request.id!r} is in use", "id")
            self._refuse_if_full()
            self._open[request.id] = job
            self._counters.submitted_requests += 1
            self._counters.submitted_rows += request.n
            self.host.tracer.begin(request.id, request.trace_id, at=job.submitted)
            self._mailbox.post(Submit(job))

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Future[list[list[float]]]:
        """Vectors of length 1, the hidden states at the prompts' last tokens; whoever cancels the future stops the work.

        Raises `InvalidRequest`, `QueueFull` or `EngineUnavailable`; the future may raise `EngineError`.
        """
        model = self._ready.model
        if not embeds(model.model_type):
            raise InvalidRequest(
                f"the model {model.id} ({model.model_type}) gives no embeddings", "model", "unsupported"
            )
        return self.set_aside(EmbeddingJob(prompts), [f"input[{n}]" for n in range(len(prompts))])

    def score(self, prompts: Sequence[tuple[int, ...]], top: int) -> Future[list[tuple[TokenLogprob, ...]]]:
        """Scores of the prompts' tokens but the first, each with the `top` likeliest ones; whoever cancels the future stops the work.

        Raises `InvalidRequest`, `QueueFull` or `EngineUnavailable`; the future may raise `EngineError`.
        """
        names = ["prompt"] if len(prompts) == 1 else [f"prompt[{n}]" for n in range(len(prompts))]
        return self.set_aside(ScoringJob(prompts, top, self.tokenizer), names)

    def set_aside(self, job: SideJob[T], names: Sequence[str]) -> Future[list[T]]:
        """Compute a job's prompts, called `names` in messages, between the steps of the answers; whoever cancels the future stops the work.

        Raises `InvalidRequest`, `QueueFull` or `EngineUnavailable`; the future may raise `EngineError`.
        """
        opened = self._ready
        if self.host.ranks is not None:
            raise InvalidRequest(
                f"{job.what.capitalize()} a text is not possible while the model is split over processes",
                names[0],
                "unsupported",
            )
        model, in_memory = opened.model, opened.budget.max_context(1)
        for name, prompt in zip(names, job.prompts, strict=True):
            admission.check_length(prompt, name, model, in_memory)
        with self._idle:
            self._refuse_if_closed()
            if self._num_aside > self.config.queue:
                raise QueueFull(
                    f"{self._num_aside} embeddings and scorings wait already, the limit is {self.config.queue}"
                )
            self._num_aside += 1
            self._mailbox.post(Beside(job))
        job.future.add_done_callback(self._left_aside)
        return job.future

    def _left_aside(self, _: Future[Any]) -> None:
        with self._idle:
            self._num_aside -= 1
            self._idle.notify_all()

    def compile(self, constraint: Constraint) -> Sequence[str]:
        """Make ready to enforce a constraint, on the caller's thread, so that `submit` finds it done. What of it would not be enforced.

        Raises `Unenforceable`.
        """
        return self._grammar(constraint).gaps

    def _grammar(self, constraint: Constraint) -> Compiled:
        if not self.config.grammar:
            raise Unenforceable("grammars are switched off", constraint.param, "grammar_off")
        try:
            with self._lock:
                if self._compiler is None:
                    eos = {*self.model.eos_token_ids, *self.tokenizer.eos_ids}
                    self._compiler = Compiler(Vocabulary(self.tokenizer, eos))
            return self._compiler.compile(constraint)
        except NoGrammar as error:
            raise Unenforceable(
                f"{constraint.param} can't be enforced: {error}", constraint.param, "unsupported"
            ) from error

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request at the next chunk or step; its sink still gets its last event. Unknown ids are ignored.

        `answered` tells that the client has all it wants: nothing is kept to go on with.
        """
        self._mailbox.post(Cancel(request_id, answered))

    def health(self) -> Health:
        age, error = self._heart.age, self._error
        if error is not None:
            return Health("failed", age, str(error) or type(error).__name__)
        if not self._thread.is_alive():
            return Health("stopped", age) if self._stopped else Health("failed", age, "the engine thread died")
        if self._opened is None:
            return Health("loading", age)
        if self._heart.is_late:
            return Health("stalled", age, f"{self._heart.doing} for {age:.0f} s")
        return Health("draining" if self._draining else "ok", age)

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges by section, as plain JSON values; gauges are as old as the last turn that took them."""
        with self._lock:
            jobs = list(self._open.values())
        core, opened = self._core, self._opened
        return {
            "engine": {
                "state": self.health().state,
                "doing": self._heart.doing,
                "beat_age_seconds": self._heart.age,
                "started_at": self._started,
                "open_requests": len(jobs),
            },
            **stats.snapshot(
                self._counters,
                self.config,
                opened.model if opened is not None else None,
                opened.budget if opened is not None else None,
                jobs,
            ),
            "generation_checkpoints": {"enabled": False} if self._saves is None else self._saves.stats(),
            **(sections(opened, core) if opened is not None and core is not None else {}),
        }

    def flush(self, timeout: float) -> FlushReport:
        """Write every state that only memory holds, waiting up to `timeout` seconds."""
        core = self._core
        return core.reuse.flush(timeout, self._ask) if core is not None else FlushReport(False)

    def close_session(self, session: str) -> bool:
        """Hold on to a session's states no longer; False if there is no such session, or the engine doesn't turn."""
        core = self._core
        if core is None or not self._thread.is_alive():
            return False
        answer: Future[bool] = Future()
        self._mailbox.post(CloseSession(session, answer))
        try:
            return answer.result(ASK_SECONDS)
        except TimeoutError:
            return False

    def _ask(self, work: Callable[[], T], timeout: float) -> T | None:
        """The result of `work` on the engine's thread; None if it didn't come to it in time. Raises what `work` raises."""
        if not self._thread.is_alive():
            return None
        answer: Future[T] = Future()
        self._mailbox.post(Ask(work, answer))
        try:
            return answer.result(timeout)
        except TimeoutError:
            return None

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait up to `timeout` seconds for the open ones; True if all ended by themselves."""
        with self._idle:
            self._draining = True
            return self._idle.wait_for(lambda: not self._open and not self._num_aside, timeout)

    def stop(self) -> None:
        """End the engine thread and wait for it. Open requests get `Failed`."""
        with self._lock:
            self._stopped = True
        self._mailbox.post(Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()
            await_thread_exit(self._thread.native_id)
            if self._saves is not None:
                self._saves.close()
            atexit.unregister(self.stop)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _refuse_if_closed(self) -> None:
        if self._error is not None:
            raise EngineUnavailable(f"the engine failed: {self._error}")
        if self._stopped:
            raise EngineUnavailable("the engine has stopped")
        if self._draining:
            raise EngineUnavailable("the engine is draining and takes no new requests")

    def _refuse_if_full(self) -> None:
        rows = self.config.batch if self.model.batchable else 1
        jobs = list(self._open.values())
        num_waiting = sum(not job.admitted for job in jobs)
        num_taken = sum(min(job.num_unfinished, rows) for job in jobs if job.admitted)
        # Those that a free row awaits are only on their way.
        room = max(0, rows - num_taken)
        if num_waiting < self.config.queue + room:
            return
        self._counters.refused_requests += 1
        seconds = admission.retry_after(1, rows, self._counters.request_seconds)
        free = f" and {room} for free rows" if room else ""
        raise QueueFull(f"{num_waiting} requests wait already, the limit is {self.config.queue}{free}", seconds)

    def lost(self, reason: str) -> None:
        """Another process is gone. The engine's thread finds out at its next turn, if its collective ever ends."""
        with self._lock:
            self._error = self._error or EngineUnavailable(reason)
        self._mailbox.post(Wake())

    def _begun_elsewhere(self, begin: Begin) -> Job:
        """A request that rank 0 answers."""
        request = begin.request
        grammar = None if request.constraint is None else self._grammar(request.constraint)
        return Job(request, lambda _: None, begin.limit, begin.seed, grammar, tier=self.model.tier)

    def abandon(self, reason: str) -> None:
        """The engine's thread doesn't come back from the device: tell every open request."""
        with self._lock:
            jobs = list(self._open.values())
        for job in jobs:
            job.fail(EngineUnavailable(reason), "engine_failed", fatal=True)

    def ended(self, timeout: float | None = None) -> bool:
        """Wait for the end of the engine's thread; False if it didn't come in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        with allocator_limits(self.config.memory_budget), bell.gathering():
            self._live()
        if self.host.ranks is not None:
            self.host.ranks.close(str(self._error) if self._error is not None else None)
        # The weights go with the core, unless the caller of `load` holds them.
        self._core = None

    def _live(self) -> None:
        try:
            core, opened = open_core(
                self._load,
                self._load_draft,
                self.tokenizer,
                self.settings,
                self.host,
                Shared(self._mailbox, self._counters, self._heart, self._closed),
            )
            self._core, self._opened = core, opened
        except Exception as error:  # noqa: BLE001  (whatever the load raised reaches the caller through `wait` and `health`)
            self._fail(None, error)
            return
        finally:
            self._loaded.set()
        resets, finished = 0, 0
        while not core.stopping:
            try:
                self._heart.beat("idle")
                is_busy = core.has_work and not core.is_waiting
                bell.ring()
                core.read_mail(0.0 if is_busy else IDLE_BEAT)
                bell.ring()
                if core.has_work and not core.is_waiting and not core.stopping:
                    core.turn()
                else:
                    core.tend()
            except DeviceFailed as error:
                self._fail(core, error)
                return
            except Exception as error:
                # A defect of ours. Health must not go on saying fine while nothing turns: start over, or give up aloud.
                log.exception("the engine's loop failed")
                resets = 1 if core.counters.finished_requests > finished else resets + 1
                finished = core.counters.finished_requests
                try:
                    core.reset(error)
                except DeviceFailed as worse:
                    self._fail(core, worse)
                    return
                if resets >= MAX_RESETS:
                    self._fail(core, error)
                    return
        with self._lock:
            self._stopped = True
        self._end(core, EngineUnavailable("the engine was stopped"), "engine_stopped")
        core.close()
        core.reuse.close()

    def _fail(self, core: Core | None, error: Exception) -> None:
        """The engine can't go on: tell every open request, health and the host."""
        with self._lock:
            self._error = error
        if self.host.ranks is not None:
            self.host.ranks.over = True
        if core is not None:
            # What keeps it from starting is told by whoever waits for it.
            log.critical("the engine failed: %s", error)
            self._end(core, error, "engine_failed")
        if self.host.on_failure is not None:
            self.host.on_failure(str(error) or type(error).__name__)

    def _end(self, core: Core, error: Exception, code: str) -> None:
        """Fail what is open, commands still in the mailbox included: none comes after, since submits look at the flags first."""
        core.read_mail()
        core.fail_all(error, code)
        bell.ring()

    def _closed(self, job: Job) -> None:
        with self._idle:
            self._open.pop(job.request.id, None)
            self._idle.notify_all()


def load(
    path: str | Path,
    settings: Settings | EngineConfig | None = None,
    host: Host | None = None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """Load the MLX model directory at `path` and start its engine. Raises what loading raises. `tokenizer` is the directory's, if it was
    read already: it takes memory, and time to read.

    Stop the engine when done: it is a context manager.
    """
    path = Path(path)
    if isinstance(settings, EngineConfig):
        settings = Settings(settings)
    # Before the tokenizer's word on what it misses.
    read_config(path)
    tokenizer = tokenizer or Tokenizer.load(path)
    wanted = settings.speculation.draft_model if settings is not None else None
    draft = Path(wanted) if wanted is not None else None
    if draft is not None:
        read_config(draft)
        check_tokenizers(tokenizer, Tokenizer.load(draft))
    load_draft = None if draft is None else lambda: load_model(draft)
    ranks = host.ranks if host is not None else None
    if ranks is not None:
        settings = settings or Settings()
        check_ranks(settings)
        ranks.agree(*about(path, settings))
    split = None if ranks is None else splitter(ranks.group)
    engine = Engine(lambda: load_model(path, split), tokenizer, settings, host, load_draft=load_draft)
    try:
        engine.wait()
    except BaseException:
        engine.stop()
        raise
    return engine
