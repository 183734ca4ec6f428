"""One model over several processes. Every process holds a part of each layer and does the same turns in the same order.

    rank 0      mailbox -> Turn -> the others           the only one that is asked, and that answers
    rank n      Turn -> mailbox                         its sinks are silent

A turn says what came by mail since the last one. All else an engine decides from what it has heard and drawn, so that processes of the
same settings and the same bits decide alike; each turn carries a digest of what the last one came to, and one that differs ends them all.
"""

from gnomon.engine.ranks.checks import about, check_ranks
from gnomon.engine.ranks.link import Ranks, RanksError, join
from gnomon.engine.ranks.mailbox import Begin, Following, Leading, Turn, kept, listen, mailbox_of

__all__ = [
    "Begin",
    "Following",
    "Leading",
    "Ranks",
    "RanksError",
    "Turn",
    "about",
    "check_ranks",
    "join",
    "kept",
    "listen",
    "mailbox_of",
]
