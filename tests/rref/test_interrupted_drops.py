"""Ctrl-C may come while a reference is dropped: its owner is told all the same, and once."""

from contextlib import suppress
from typing import Any

from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.execution import timers
from gradwire.rref.forks import References

from tests.remote_functions import add, wait_until
from tests.rpc.execution.interruption import UNINTERRUPTED, Interruption

deleted: list[Any] = []


def count(name: str) -> int:
    return int(current_agent().debug_info()[name])


def note_deletions() -> None:
    """Has `deletions` tell how often this worker has been told of a dropped reference."""
    agent = current_agent()
    handle = agent.extension(References)._on_delete

    def note(*message: Any) -> None:
        deleted.append(message)
        handle(*message)

    agent.control.on("rref.delete", note)


def deletions() -> int:
    return len(deleted)


def drop_at_each_moment() -> tuple[int, int]:
    """Drops references to values of worker1, and interrupts each drop later.

    Returns:
        How often it has, and how many references it has dropped.
    """
    timers.LINGER_S = 0.001
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        rref = rpc.remote("worker1", add, (1, 2))
        assert rref.to_here() == 3
        wait_until(rref.confirmed_by_owner, pause=0.001)
        interruption = Interruption(moment)
        with suppress(KeyboardInterrupt), interruption:
            del rref
        uninterrupted = 0 if interruption.has_come else uninterrupted + 1
        moment += 1
        wait_until(lambda: count("num_user_rrefs") == 0, seconds=5, pause=0.001)
    return moment - 1 - uninterrupted, moment - 1


def test_a_reference_is_deleted_once_though_its_drop_is_interrupted(workers):
    a, b = workers.rpc(2)
    b.run(note_deletions)
    interrupted, dropped = a.run(drop_at_each_moment)
    assert interrupted > 10
    assert b.run(count, "num_owner_rrefs") == 0
    assert b.run(deletions) == dropped
