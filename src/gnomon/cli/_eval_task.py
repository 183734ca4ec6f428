"""What `gnomon eval` asks of a server: tasks, and how two runs of one compare."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli._verbs import CommandError
from gnomon.config import Config

if TYPE_CHECKING:
    import httpx

    from gnomon.evals.task_run import Result, Served

PATIENCE_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = parser.add_argument_group("--task")
    of.add_argument(
        "--by", choices=("logprobs", "letter"), default="logprobs",
        help="how choices are told: by the log-probability of each (needs echo), or by the letter that is written (default: logprobs)",
    )  # fmt: skip
    of.add_argument("--chat", action="store_true", help="ask through the chat template, not as plain text")
    of.add_argument("--shots", type=int, metavar="N", help="worked examples before each question (default: the task's)")
    of.add_argument("--concurrency", type=int, default=4, metavar="N", help="items asked at once (default: 4)")
    of.add_argument(
        "--timeout",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="S",
        help="seconds to wait for an answer (default: 600)",
    )
    of.add_argument("--fields", default="{}", metavar="JSON", help="further fields of every request")
    of.add_argument(
        "--resume", type=Path, metavar="RESULT", help="go on with this run: ask what it lacks, and what failed"
    )


def task(args: argparse.Namespace) -> int:
    """`--task TASK`, of `--server` or of a model loaded here. Raises CommandError."""
    from gnomon.bench.store import Store, load
    from gnomon.evals import tasks
    from gnomon.evals.asking import Asker
    from gnomon.evals.task_run import TaskRun, result

    config: Config = args.config
    try:
        found = tasks.load(args.task)
        form = tasks.Form(
            found,
            args.by if found.has_choices else "answer",
            found.head.shots if args.shots is None else args.shots,
            args.chat,
        )
        fields = json.loads(args.fields)
        earlier = load(args.resume) if args.resume is not None else None
        if not isinstance(fields, dict):
            raise ValueError(f"--fields is {args.fields}, but must be a JSON object")
        if args.concurrency < 1:
            raise ValueError(f"--concurrency is {args.concurrency}, but must be at least 1")
    except FileNotFoundError as error:
        known = ", ".join(tasks.built_in())
        raise CommandError(
            f"there is no file {error.filename}, and the tasks that come with Gnomon are {known}"
        ) from error
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    with _client(args, config) as (client, served):
        asker = Asker(client, served.model, form, fields)
        run = TaskRun(
            Store(args.out or config.paths.cache / "bench"),
            asker,
            served,
            argv=sys.argv,
            hash_cache=config.paths.cache / "hashes.json",
        )
        try:
            if earlier is not None:
                run.resume(earlier)
        except ValueError as error:
            raise CommandError(f"--resume: {error}") from error
        path = run.finish(args.concurrency)
    summed = result(run.samples)
    print(json.dumps({**asdict(summed), "file": str(path)}) if args.json else f"{_told(summed)}\n{path}")
    return 130 if run.run.interruption else 1 if summed.failed else 0


def compare(args: argparse.Namespace) -> int:
    """`--compare A B`. Raises CommandError."""
    from gnomon.bench.store import load
    from gnomon.evals.task_run import paired

    first, second = args.compare
    try:
        found = paired(load(Path(first)), load(Path(second)))
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps(asdict(found)))
        return 0
    print(
        f"{found.items} items: {found.both} right in both, {found.only_first} in the first alone, {found.only_second} in the second alone, "
        f"{found.neither} in neither" + (f"; {found.left_out} not answered by both" if found.left_out else "")
    )
    print(f"McNemar, exact: p = {found.p:.4g}")
    return 0


@contextmanager
def _client(args: argparse.Namespace, config: Config) -> Generator[tuple[httpx.Client, Served]]:
    """A client of `--server`, or of a server on loopback with a model of its own, and who answers there."""
    from gnomon.cli._talk import connect
    from gnomon.config import ClientConfig
    from gnomon.evals.task_run import Served

    if config.client.server is not None:
        remote = connect(config.client, config.sampling, config.model.wanted)
        try:
            remote.client.timeout = args.timeout
            yield remote.client, Served(remote.model, config.client.server, _weights(remote.client, remote.model))
        finally:
            remote.close()
        return
    with _own(config) as (address, path):
        remote = connect(ClientConfig(server=address), config.sampling, None)
        try:
            remote.client.timeout = args.timeout
            yield remote.client, Served(remote.model, "own", _weights(remote.client, remote.model), path)
        finally:
            remote.close()


@contextmanager
def _own(config: Config) -> Generator[tuple[str, Path]]:
    from gnomon.cli._library import find
    from gnomon.cli._model import start, working
    from gnomon.config import HTTPConfig
    from gnomon.serve.app import create_app
    from gnomon.serve.listen import StartupError, bind
    from gnomon.serve.server import serving

    http = replace(HTTPConfig(), port=0)
    if config.origin("log", "log_level").kind == "default":
        # Of each request the run itself keeps what matters.
        logging.getLogger("gnomon").setLevel(logging.WARNING)
    found = find(config)
    with working(f"loading {found.id}"):
        loaded = start(config, found)
    try:
        with bind(http) as bound:
            app = create_app(loaded.engine, loaded.tokenizer, loaded.template, http, loaded.config.sampling)
            with serving(app, loaded.engine, bound, http) as address:
                yield address, found.path
    except StartupError as error:
        raise CommandError(str(error)) from error
    finally:
        loaded.engine.stop()


def _weights(client: httpx.Client, model: str) -> int | None:
    """What the list of models says of a model's size: Gnomon's does."""
    try:
        listed: list[dict[str, Any]] = client.get("models").json()["data"]
        found = next(one for one in listed if one.get("id") == model).get("size_bytes")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
    return found if isinstance(found, int) and found > 0 else None


def _told(found: Result) -> str:
    if found.accuracy is None:
        text = "no item was answered"
    else:
        text = f"{found.right} of {found.answered} right: {found.accuracy:.1%} [{found.lower:.1%}, {found.upper:.1%}]"
        text += f", {found.per_length:.1%} by log-probability per character" if found.per_length is not None else ""
    return text + "".join(f"\n{count} failed: {reason}" for reason, count in found.reasons.items())
