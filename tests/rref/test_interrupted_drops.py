"""The handler of a signal may raise while a reference is dropped: its owner is told all the same."""

import sys

from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.execution import scheduler

from tests.remote_functions import add, wait_until
from tests.rpc.interruption import UNINTERRUPTED, Interruption


def count(name: str) -> int:
    return int(current_agent().debug_info()[name])


def drop_at_each_moment() -> int:
    """Drops references to values of worker1, and interrupts each drop later; returns how often."""
    sys.unraisablehook = lambda _: None  # Python reports what is raised in a finalizer
    scheduler.LINGER_S = 0.001
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        rref = rpc.remote("worker1", add, (1, 2))
        assert rref.to_here() == 3
        wait_until(rref.confirmed_by_owner, pause=0.001)
        with Interruption(moment) as interruption:
            del rref
        uninterrupted = 0 if interruption.has_raised else uninterrupted + 1
        moment += 1
        wait_until(lambda: count("num_user_rrefs") == 0, seconds=5, pause=0.001)
    return moment - 1 - uninterrupted


def test_a_reference_may_be_dropped_with_an_interruption_at_any_moment(workers):
    a, b = workers.rpc(2)
    assert a.run(drop_at_each_moment) > 10
    assert b.run(count, "num_owner_rrefs") == 0
