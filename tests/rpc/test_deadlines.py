"""Timeouts expire in their order, and only those of calls that are under way."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.rpc.execution.deadlines import Deadlines

from tests.remote_functions import wait_until


@contextmanager
def deadlines(live: set[int]) -> Iterator[tuple[Deadlines, "queue.SimpleQueue[int]"]]:
    expired: queue.SimpleQueue[int] = queue.SimpleQueue()
    opened = Deadlines(expired.put, live.__contains__, live.__len__, "gradwire-deadlines-test")
    try:
        yield opened, expired
    finally:
        opened.close()


def test_calls_expire_in_the_order_of_their_times():
    with deadlines({1, 2, 3}) as (kept, expired):
        for identifier, seconds in ((3, 0.03), (1, 0.01), (2, 0.02)):
            kept.add(identifier, seconds)
        assert [expired.get(timeout=20) for _ in range(3)] == [1, 2, 3]


def test_calls_that_are_over_do_not_expire():
    live = {1, 2, 3}
    with deadlines(live) as (kept, expired):
        for identifier in live:
            kept.add(identifier, 0.05 * identifier)
        live -= {2}
        assert [expired.get(timeout=20) for _ in range(2)] == [1, 3]
        assert expired.empty()


def test_nobody_waits_for_calls_that_are_over():
    live = set(range(100))
    with deadlines(live) as (kept, expired):
        for identifier in live - {0}:
            kept.add(identifier, 3600 + identifier)
        live.intersection_update({0})
        kept.add(0, 0.01)
        assert expired.get(timeout=20) == 0
        wait_until(lambda: not kept._heap)
