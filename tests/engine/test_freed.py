"""Memory that the C library keeps is given back: between steps when it is much, at rest when it is something."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gnomon import freed
from gnomon.freed import LEAST_BUSY, LEAST_IDLE, PAUSE_BUSY, PAUSE_IDLE, Freed

MIXED = """
import mlx.core as mx, psutil
from gnomon.freed import Freed

# A first large buffer that is freed: from now on glibc keeps such ones.
large = mx.zeros((7_000_000,)) + 1
mx.eval(large)
del large
mx.clear_cache()
looked = Freed()
kept = []
for size in range(1, 400):
    passing = mx.zeros((size * 1500,)) + 1
    kept.append(mx.zeros((12_000,)) + 1)
    mx.eval(passing, kept[-1])
    kept.append(passing)
del kept[1::2], passing
mx.clear_cache()
before = psutil.Process().memory_info().rss
looked.look(idle=True)
print(before, psutil.Process().memory_info().rss, looked.stats()["bytes"])
"""


@pytest.mark.skipif(freed.kept() == 0, reason="not a glibc that tells what it keeps")
def test_what_mlx_freed_between_arrays_that_stay_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True, check=True)
    before, after, told = (int(word) for word in done.stdout.split())
    freed_bytes = sum(size * 1500 * 4 for size in range(1, 400))  # 479 MB were computed and let go
    assert before > freed_bytes
    assert before - after > 0.8 * freed_bytes
    assert told == pytest.approx(before - after, rel=0.1)


class Kept:
    """Bytes that stand for a process's; all but `floor` of them can be given back."""

    def __init__(self) -> None:
        self.bytes = 0
        self.floor = 0
        self.asked = 0
        self.clock = 0.0

    def give_back(self) -> None:
        self.asked += 1
        self.bytes = self.floor

    def watch(self) -> Freed:
        return Freed(lambda: self.bytes, self.give_back, lambda: self.clock)


@pytest.mark.parametrize(("idle", "least"), [(True, LEAST_IDLE), (False, LEAST_BUSY)])
def test_it_is_given_back_from_the_stated_size_on(idle: bool, least: int) -> None:
    held = Kept()
    watch = held.watch()
    held.bytes = least - 1
    watch.look(idle=idle)
    assert held.asked == 0
    held.bytes = least
    held.clock = 100
    watch.look(idle=idle)
    assert watch.stats() == {"times": 1, "bytes": least}


@pytest.mark.parametrize(("idle", "pause"), [(True, PAUSE_IDLE), (False, PAUSE_BUSY)])
def test_looks_keep_their_distance(idle: bool, pause: float) -> None:
    held = Kept()
    watch = held.watch()
    watch.look(idle=idle)
    held.bytes = 1 << 40
    held.clock = pause - 0.01
    watch.look(idle=idle)
    assert held.asked == 0
    held.clock = pause
    watch.look(idle=idle)
    assert held.asked == 1


def test_what_can_not_be_given_back_is_not_asked_for_again_until_it_has_been() -> None:
    held = Kept()
    watch = held.watch()
    held.bytes = held.floor = 1 << 30
    for held.clock in (10, 20, 30):
        watch.look(idle=True)
    assert held.asked == 1
    held.bytes = 0
    held.clock = 40
    watch.look(idle=True)
    held.bytes, held.floor = 1 << 30, 0
    held.clock = 50
    watch.look(idle=True)
    assert watch.stats()["times"] == 2
