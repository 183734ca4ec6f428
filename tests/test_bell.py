"""Calls that wake readers are gathered by the threads that say so, made once each, and never lost."""

from __future__ import annotations

import threading

from gnomon import bell


def test_a_thread_that_does_not_gather_wakes_at_once() -> None:
    heard: list[str] = []

    def call() -> None:
        heard.append(threading.current_thread().name)

    with bell.gathering():
        bell.wake(call)
        thread = threading.Thread(target=bell.wake, args=(call,), name="another")
        thread.start()
        thread.join()
        assert heard == ["another"]
    bell.wake(call)
    assert heard == ["another", "MainThread", "MainThread"]


def test_each_call_is_made_once_a_ring_in_the_order_of_the_first() -> None:
    heard: list[int] = []
    calls = [lambda n=n: heard.append(n) for n in range(3)]
    with bell.gathering():
        for n in (2, 0, 2, 1, 0):
            bell.wake(calls[n])
        assert heard == []
        bell.ring()
        assert heard == [2, 0, 1]
        bell.ring()
        bell.wake(calls[0])
    assert heard == [2, 0, 1, 0]


def test_what_a_call_gathers_is_left_for_the_next_ring() -> None:
    heard: list[str] = []
    with bell.gathering():
        bell.wake(lambda: bell.wake(lambda: heard.append("late")))
        bell.ring()
        assert heard == []
    assert heard == ["late"]
