"""Serving a model that several processes hold together: rank 0 is the server, the others follow its engine."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

from gnomon.cli._library import find
from gnomon.cli._model import check_backend, start
from gnomon.cli._verbs import CommandError
from gnomon.config import Config

if TYPE_CHECKING:
    from gnomon.engine.ranks import Ranks

log = logging.getLogger(__name__)


def join(config: Config) -> Ranks | None:
    """The processes that the flags ask for; None for one alone. Raises CommandError."""
    wanted = config.distributed
    if wanted.distributed == "off":
        return None
    if config.isolation.isolate:
        raise CommandError(
            "--isolate can't be used with --distributed: a child that is started again can't join the others again"
        )
    if config.pool.model_pool is not None:
        raise CommandError("--model-pool can't be used with --distributed: its models each have a process of their own")
    if config.checkpoint.generation_checkpoint is not None:
        raise CommandError(
            "--generation-checkpoint can't be used with --distributed: only rank 0 would go on with an answer"
        )
    check_backend()
    from gnomon.engine.ranks import RanksError
    from gnomon.engine.ranks import join as join_ranks

    try:
        ranks = join_ranks(wanted.distributed, wanted.distributed_host)
    except RanksError as error:
        raise CommandError(str(error)) from error
    log.info("rank %d of %d", ranks.rank, ranks.size)
    return ranks


def follow(config: Config, ranks: Ranks) -> int:
    """Do what rank 0 does until it ends; the process's exit code. Raises CommandError when the model can't be loaded."""
    # Rank 0 decides when to end; a terminal's signals reach all.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    engine = start(config, find(config), ranks=ranks).engine
    engine.ended()
    return 1 if engine.health().state == "failed" else 0
