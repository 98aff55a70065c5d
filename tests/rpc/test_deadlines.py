"""Timeouts expire in the order of their times, and only those of pending calls."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.rpc.execution.deadlines import MAX_SETTLED_ENTRIES, Deadlines

from tests.remote_functions import wait_until


@contextmanager
def deadlines(live: set[int]) -> Iterator[tuple[Deadlines, "queue.SimpleQueue[int]"]]:
    expired: queue.SimpleQueue[int] = queue.SimpleQueue()
    started = Deadlines(expired.put, live.__contains__, live.__len__, "gradwire-deadlines-test")
    try:
        yield started, expired
    finally:
        started.close()


def test_calls_expire_in_the_order_of_their_times():
    with deadlines({1, 2, 3}) as (timeouts, expired):
        for identifier, seconds in ((3, 0.03), (1, 0.01), (2, 0.02)):
            timeouts.add(identifier, seconds)
        assert [expired.get(timeout=20) for _ in range(3)] == [1, 2, 3]


def test_settled_calls_do_not_expire():
    live = {1, 2, 3}
    with deadlines(live) as (timeouts, expired):
        for identifier in live:
            timeouts.add(identifier, 0.05 * identifier)
        live -= {2}
        assert [expired.get(timeout=20) for _ in range(2)] == [1, 3]
        assert expired.empty()


def test_entries_of_settled_calls_are_removed():
    live = set(range(100))
    with deadlines(live) as (timeouts, expired):
        for identifier in live - {0}:
            timeouts.add(identifier, 3600 + identifier)
        live.intersection_update({0})
        timeouts.add(0, 0.01)
        assert expired.get(timeout=20) == 0
        wait_until(lambda: not any(timeouts._queues.values()))


def test_nothing_is_kept_of_many_different_timeouts():
    live: set[int] = set()
    with deadlines(live) as (timeouts, _):
        for identifier in range(3 * MAX_SETTLED_ENTRIES):
            timeouts.add(identifier, 1000 + identifier / 7)
        assert len(timeouts._queues) <= MAX_SETTLED_ENTRIES + 1
