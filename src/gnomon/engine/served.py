"""What a core is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gnomon.chat.tokenizer import Tokenizer
from gnomon.engine.budget import Budget
from gnomon.engine.counters import Counters
from gnomon.engine.heart import Heart
from gnomon.engine.mailbox import Mailbox
from gnomon.engine.row import Job
from gnomon.models.load import LoadedModel
from gnomon.state.codecs import Coding
from gnomon.state.paged import PagePool


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model and how it is run. `operations` says whose kernels run: with others a state has other bits."""

    loaded: LoadedModel
    tokenizer: Tokenizer
    budget: Budget
    coding: Coding | None = None
    operations: str = "stock"
    pages: PagePool | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """What the engine's door and its thread both hold. `on_close` hears of each request that ended, on the thread."""

    mailbox: Mailbox
    counters: Counters
    heart: Heart
    on_close: Callable[[Job], None]
