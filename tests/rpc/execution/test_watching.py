"""A waiting thread looks after the others seldom, but soon enough, and only while there is something to do."""

import time

import pytest
from gradwire.rpc.execution.poller import MAX_WATCH_INTERVAL_S, WATCH_FOR_S, WATCH_INTERVAL_S, Poller, Watch

DESCRIPTOR = 0


@pytest.fixture
def poller():
    made = Poller(0)
    yield made
    made.close()


class Polls:
    """Waits in vain for a number of times, and notes for how long."""

    def __init__(self, in_vain: float) -> None:
        self.in_vain = in_vain
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return len(self.seconds) > self.in_vain


def busy(poller: Poller) -> None:
    """Has a socket been ready in an hour, so that the watch lasts as long as the test."""
    poller.last_ready = time.monotonic() + 3600


def test_looks_become_less_frequent_while_there_is_nothing_to_take_over(poller):
    watch, polls = Watch(poller, lambda: False), Polls(in_vain=4)
    busy(poller)
    watch.extend()
    assert watch.wait(polls)
    longer = [2 * WATCH_INTERVAL_S, 4 * WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S]
    assert polls.seconds == [WATCH_INTERVAL_S, *longer]


def test_messages_do_not_make_looks_more_frequent_but_a_find_does(poller):
    found: list[bool] = []
    watch = Watch(poller, lambda: bool(found))
    busy(poller)
    watch.extend()
    assert watch.wait(Polls(in_vain=9))
    next_polls = Polls(in_vain=1)
    assert watch.wait(next_polls)
    assert next_polls.seconds[0] == MAX_WATCH_INTERVAL_S
    found.append(True)
    assert not watch.wait(Polls(in_vain=1))
    found.clear()
    after_find = Polls(in_vain=0)
    assert watch.wait(after_find)
    assert after_find.seconds == [WATCH_INTERVAL_S]


def test_what_is_queued_is_looked_at_with_the_next_look(poller):
    watch, polls = Watch(poller, lambda: len(polls.seconds) == 3), Polls(in_vain=float("inf"))
    busy(poller)
    watch.extend()
    assert not watch.wait(polls)
    assert len(polls.seconds) == 3


def test_a_descriptor_that_is_kept_for_too_long_ends_the_wait(poller):
    watch, polls = Watch(poller, lambda: False), Polls(in_vain=float("inf"))
    busy(poller)
    watch.extend()
    poller.kept[DESCRIPTOR] = time.monotonic() - 2 * WATCH_INTERVAL_S
    assert not watch.wait(polls)
    assert len(polls.seconds) == 1


def test_a_descriptor_that_is_kept_for_a_moment_does_not(poller):
    watch, polls = Watch(poller, lambda: False), Polls(in_vain=1)
    poller.kept[DESCRIPTOR] = time.monotonic() + 3600
    assert watch.wait(polls)


def test_nobody_watches_when_no_socket_has_been_busy_for_some_time(poller):
    watch, polls = Watch(poller, lambda: False), Polls(in_vain=float("inf"))
    poller.last_ready = time.monotonic() - 2 * WATCH_FOR_S
    watch.extend()
    assert time.monotonic() >= watch.until
    assert not watch.wait(polls)
