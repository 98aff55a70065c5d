"""Control messages, and answers that nobody waits for, travel with other messages to the same worker."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from gradwire import rpc
from gradwire.rpc.agent import control
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.execution import scheduler
from gradwire.rpc.transports.frame_writer import FrameWriter
from gradwire.rref import forks
from gradwire.rref.forks import References

from tests.remote_functions import add, wait_until

FOREVER_S = 3600.0


@pytest.fixture(params=[("unix",), ("tcp",)], ids=["unix", "tcp"])
def pair(request, agents, monkeypatch) -> tuple[GrpcAgent, GrpcAgent]:
    """Two connected agents, of which the control threads send nothing that is not urgent by themselves."""
    a, b = agents(2, transports=(*request.param, "grpc"))
    call(a, b)
    wait_until(lambda: a.debug_info()["transports"]["agent1"] == request.param[0])
    monkeypatch.setattr(scheduler, "LINGER_S", FOREVER_S)
    monkeypatch.setattr(control, "PIGGYBACK_AFTER_S", 0.0)
    return a, b


def call(a: GrpcAgent, b: GrpcAgent) -> None:
    with holder.using(a):
        assert rpc.rpc_sync(b.info, add, (1, 2)) == 3


def count_writes(agent: GrpcAgent, monkeypatch) -> Callable[[], int]:
    """Returns a function that returns the number of writes of an agent to the other one since."""
    streams: list[Any] = [each for each in agent._network._transports.values() if each.name != "loopback"]
    (stream,) = streams
    writer, writes = stream.outbox.socket._writer, []
    next_write = FrameWriter._next

    def count(self: FrameWriter):
        if self is writer:
            writes.append(1)
        return next_write(self)

    monkeypatch.setattr(FrameWriter, "_next", count)
    return lambda: len(writes)


def test_control_messages_are_piggybacked_on_a_call_and_acknowledged_with_an_answer(pair, monkeypatch):
    a, b = pair
    got: list[int] = []
    handled = threading.Event()

    def note(_sender, payload: int) -> None:
        got.append(payload)
        if payload == 9:
            handled.set()

    b.control.on("note", note)
    told: list[Exception | None] = []
    writes = count_writes(a, monkeypatch)
    for i in range(10):
        a.control.send(b.info, "note", i, told.append, urgent=False)
    assert not writes()
    call(a, b)
    assert writes() == 1
    assert handled.wait(20)
    assert got == list(range(10))
    wait_until(lambda: b._codec._to_flush)  # b has answered, but keeps it for what it sends next
    assert a.control.pending() == 10
    call(a, b)
    wait_until(lambda: not a.debug_info()["agent.client_active_calls"])
    a.control.run(lambda: None)  # wakes the control thread, which settles them
    wait_until(lambda: told == [None] * 10)
    assert a.control.pending() == 0


def test_what_is_urgent_is_not_piggybacked(pair):
    a, b = pair
    got: list[str] = []
    told = threading.Event()
    b.control.on("note", lambda _sender, payload: got.append(payload))
    a.control.send(b.info, "note", "waits", urgent=False)
    a.control.send(b.info, "note", "urgent", lambda _error: told.set())
    assert told.wait(20)  # without any other message
    assert got == ["waits", "urgent"]


def test_control_messages_are_piggybacked_on_an_answer(pair):
    a, b = pair
    got: list[int] = []
    a.control.on("note", lambda _sender, payload: got.append(payload))
    b.control.send(a.info, "note", 1, urgent=False)
    call(a, b)
    wait_until(lambda: got == [1])


def test_a_message_behind_which_nothing_can_be_sent_is_sent(pair, monkeypatch):
    a, b = pair

    def fail(*_args, **_options):
        raise LookupError("no reason")

    a.control.send(b.info, "note", 1, urgent=False)
    with monkeypatch.context() as patched:
        patched.setattr(a._control, "_attempt", fail)
        call(a, b)
    assert a.control.pending() == 1
    b.control.on("note", lambda _sender, _payload: None)
    a.control.run(lambda: None)
    call(a, b)
    wait_until(lambda: not a.debug_info()["agent.client_active_calls"])


def test_the_confirmation_of_a_reference_comes_with_its_value(pair, monkeypatch):
    a, b = pair
    writes = count_writes(b, monkeypatch)
    with holder.using(a):
        rref = rpc.remote(b.info, add, (1, 2))
        wait_until(lambda: b._codec._to_flush)
        assert not writes()
        assert not rref.confirmed_by_owner()
        assert rref.to_here() == 3
        wait_until(rref.confirmed_by_owner)
        assert writes() == 1


def test_who_waits_for_a_creation_does_not_wait_for_other_messages(pair, monkeypatch):
    a, b = pair
    monkeypatch.setattr(forks, "MIN_WAITING_TIMEOUT_S", 30.0)
    with holder.using(a):
        early, late = rpc.remote(b.info, add, (1, 2)), rpc.remote(b.info, add, (1, 2))
        early._get_future().wait()
        wait_until(lambda: b._codec._to_flush or late._handle.creation.done())
        late._get_future().wait()
        short = rpc.remote(b.info, add, (1, 2), timeout=20)
        short._handle.creation.wait()


def test_a_reference_is_deleted_with_the_next_message(pair):
    a, b = pair
    table = b.extension(References).table
    with holder.using(a):
        rref = rpc.remote(b.info, add, (1, 2))
        assert rref.to_here() == 3
        wait_until(rref.confirmed_by_owner)
        assert len(table) == 1
        del rref
        gc.collect()
        call(a, b)
        wait_until(lambda: len(table) == 0)


def test_nothing_that_waits_is_lost_when_a_worker_leaves(workers):
    a, _ = workers.rpc(2)

    def create() -> list:
        return [rpc.remote("worker1", add, (1, i)) for i in range(40)]

    def use() -> None:
        made = create()
        del made[::2]
        assert [rref.to_here() for rref in made] == list(range(2, 41, 2))

    a.run(use)
    workers.each(workers.all, rpc.shutdown)
