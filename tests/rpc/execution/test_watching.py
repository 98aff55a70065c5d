"""A waiting thread looks after the others seldom, but soon enough, and only while there is something to do."""

import time

import pytest
from gradwire.rpc.execution.executor import MAX_WATCH_INTERVAL_S, WATCH_FOR_S, WATCH_INTERVAL_S, Executor

DESCRIPTOR = 0


@pytest.fixture
def executor():
    made = Executor(1, "test-watching")  # without threads
    yield made
    made.poller.kept.clear()
    made.close(0)


class Polls:
    """Waits in vain for a number of times, and notes for how long; then something happens."""

    def __init__(self, executor: Executor, in_vain: float) -> None:
        self.in_vain = in_vain
        self.seconds: list[float] = []
        executor._poll = self  # type: ignore[method-assign, assignment]

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return len(self.seconds) > self.in_vain


def busy(executor: Executor) -> None:
    """Has a socket been ready in an hour, so that the watch lasts as long as the test."""
    executor._watch_until = time.monotonic() + 3600


def test_looks_become_less_frequent_while_there_is_nothing_to_take_over(executor):
    polls = Polls(executor, in_vain=4)
    busy(executor)
    assert executor._watch()
    longer = [2 * WATCH_INTERVAL_S, 4 * WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S]
    assert polls.seconds == [WATCH_INTERVAL_S, *longer]


def test_messages_do_not_make_looks_more_frequent_but_a_find_does(executor):
    busy(executor)
    Polls(executor, in_vain=9)
    assert executor._watch()
    next_polls = Polls(executor, in_vain=1)
    assert executor._watch()
    assert next_polls.seconds[0] == MAX_WATCH_INTERVAL_S
    executor._tasks.append((print, ()))
    Polls(executor, in_vain=1)
    assert not executor._watch()
    executor._tasks.clear()
    after_find = Polls(executor, in_vain=0)
    assert executor._watch()
    assert after_find.seconds == [WATCH_INTERVAL_S]


def test_what_is_queued_is_looked_at_with_the_next_look(executor, monkeypatch):
    polls = Polls(executor, in_vain=float("inf"))
    monkeypatch.setattr(executor, "_has_undone", lambda: len(polls.seconds) == 3)
    busy(executor)
    assert not executor._watch()
    assert len(polls.seconds) == 3


def test_a_descriptor_that_is_kept_for_too_long_ends_the_wait(executor):
    polls = Polls(executor, in_vain=float("inf"))
    busy(executor)
    executor.poller.kept[DESCRIPTOR] = time.monotonic() - 2 * WATCH_INTERVAL_S
    assert not executor._watch()
    assert len(polls.seconds) == 1


def test_a_descriptor_that_is_kept_for_a_moment_does_not(executor):
    Polls(executor, in_vain=1)
    executor.poller.kept[DESCRIPTOR] = time.monotonic() + 3600
    assert executor._watch()


def test_nobody_watches_when_no_socket_has_been_busy_for_some_time(executor):
    Polls(executor, in_vain=float("inf"))
    executor._watch_until = time.monotonic() - WATCH_FOR_S
    assert not executor._watch()
