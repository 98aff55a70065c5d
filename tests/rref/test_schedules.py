"""The protocol of references under random schedules, of which `make schedules` runs 10,000."""

import gc
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
from gradwire import rpc
from gradwire.errors import RpcTimeoutError, RRefError, SendFailedError, WorkerLostError
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.execution.futures import error_of
from gradwire.rpc.peers import control
from gradwire.rref import owner_table
from gradwire.rref.forks import References
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.rref.chance import Chance
from tests.rref.schedules import (
    RefusedToMakeError,
    Schedule,
    Value,
    fail_to_make,
    fetch_request,
    give,
    identify,
    make,
    receive,
    run_schedule,
)
from tests.rref.simulation import Machine, wait_for_value

SCHEDULES = int(os.environ.get("GRADWIRE_SCHEDULES", "50"))
COLLECT_EVERY = 50
"""Schedules between two runs of the garbage collector, which runs only there so that schedules can be repeated."""


@pytest.fixture(autouse=True)
def simulated_waits(monkeypatch) -> None:
    """Has schedules depend neither on the clock nor on threads."""
    monkeypatch.setattr(control, "ATTACH_AFTER_S", 0.0)
    monkeypatch.setattr(owner_table, "wait", wait_for_value)


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    logging.disable()  # pytest keeps log records, and with them the frames of exceptions and all they refer to
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


@pytest.mark.timeout(max(120, SCHEDULES))
def test_random_schedules_neither_leak_nor_delete_early(capsys):
    counts: Counter[str] = Counter()
    began = time.monotonic()

    @settings(
        max_examples=SCHEDULES,
        database=None,
        print_blob=True,
        derandomize=SCHEDULES < 1000,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(size=st.integers(2, 5), data=st.binary(min_size=300, max_size=1500))
    def run(size: int, data: bytes) -> None:
        counts.update(run_schedule(size, data))
        counts["schedules"] += 1
        if counts["schedules"] % COLLECT_EVERY == 0:
            gc.collect()

    run()
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(f"\n{seconds:.0f} s: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    assert counts["schedules"] >= SCHEDULES
    for what in (
        "broken",
        "lost",
        "reordered",
        "killed",
        "refused",
        "not sent",
        "timeouts",
        "cancelled",
    ):
        assert counts[what] > SCHEDULES / 20, what
    assert counts["values fetched"] > SCHEDULES
    assert counts["values freed"] > SCHEDULES


# Schedules that once failed, one by one. A Chance without bytes has everything happen in order.


def start(size: int) -> Schedule:
    return Schedule(size, Chance(b""))


def on(machine: Machine, function, *args):
    """Calls a function as a part of the program of one worker."""
    with holder.using(machine.agent):
        return function(*args)


def create(schedule: Schedule, machine: Machine, owner: Machine, *args, timeout: float = 0.0) -> rpc.RRef:
    number = len(schedule.numbers)
    rref = on(machine, rpc.remote, owner.info, make, (number, [], *args), None, timeout)
    schedule.numbers[identify(rref)] = number
    return rref


def hold_back(schedule: Schedule, kind: int) -> list:
    """Steps until envelopes of a type are in flight, takes them off the network and returns them."""
    while not any(flight.envelope.type == kind for flight in schedule.flights):
        assert schedule.step()
    taken = [flight for flight in schedule.flights if flight.envelope.type == kind]
    schedule.flights = [flight for flight in schedule.flights if flight not in taken]
    return taken


def until_timeouts(schedule: Schedule, seconds: float) -> None:
    schedule.settle()
    assert schedule.now >= seconds


def assert_nothing_left(schedule: Schedule) -> None:
    schedule.settle()
    assert not schedule._left_over()


def test_a_fetch_that_is_overtaken_by_the_end_of_its_reference():
    schedule = start(2)
    user, owner = schedule.machines
    rref = create(schedule, user, owner)
    schedule.settle()
    fetch = user.agent.request(owner.info, fetch_request(rref, 1.0, keep=rref._handle.keep_alive))
    late = hold_back(schedule, MessageType.RREF_FETCH)
    until_timeouts(schedule, 1.0)
    assert isinstance(error_of(fetch), RpcTimeoutError)
    del rref
    schedule.settle()
    assert len(owner.agent.extension(References).table) == 1
    schedule.flights += late
    assert_nothing_left(schedule)


def test_a_call_by_proxy_that_is_overtaken_by_the_end_of_its_reference():
    schedule = start(2)
    user, owner = schedule.machines
    rref = create(schedule, user, owner)
    schedule.settle()
    call = on(user, rref.rpc_async(timeout=1.0).check, 0)
    late = hold_back(schedule, MessageType.CALL)
    until_timeouts(schedule, 1.0)
    assert isinstance(error_of(call), RpcTimeoutError)
    del rref
    schedule.settle()
    schedule.flights += late
    assert_nothing_left(schedule)


def test_a_creation_that_arrives_after_its_timeout():
    schedule = start(2)
    user, owner = schedule.machines
    rref = create(schedule, user, owner, timeout=1.0)
    late = hold_back(schedule, MessageType.RREF_CREATE)
    until_timeouts(schedule, 1.0)
    with pytest.raises(RpcTimeoutError):
        on(user, rref.to_here)
    del rref
    schedule.settle()
    schedule.flights += late
    assert_nothing_left(schedule)


def test_all_references_are_released_while_a_creation_is_in_flight():
    schedule = start(2)
    user, owner = schedule.machines
    rref = create(schedule, user, owner, timeout=1.0)
    late = hold_back(schedule, MessageType.RREF_CREATE)
    until_timeouts(schedule, 1.0)
    with pytest.raises(RpcTimeoutError, match="deleting references"):
        user.agent.extension(References).release_all(0.01)
    schedule.settle()
    schedule.flights += late
    assert_nothing_left(schedule)
    with pytest.raises(RRefError, match="has been deleted"):
        on(user, rref.to_here)


def test_a_creation_that_is_not_sent():
    for own in (False, True):
        schedule = start(2)
        user, owner = schedule.machines
        target = user if own else owner
        user.network.fail_next = True
        rref = create(schedule, user, target)
        with pytest.raises(SendFailedError, match="RRef creation via remote.. on worker .* could not be sent"):
            on(user, rref.to_here)
        if not own:
            with pytest.raises(RRefError, match="cannot be passed on: RRef creation"):
                on(user, rpc.rpc_async, owner.info, receive, ([rref], 0))
        del rref
        assert_nothing_left(schedule)


def test_a_creation_here_that_is_refused():
    schedule = start(2)
    (user, _) = schedule.machines
    rref = create(schedule, user, user)
    (flight,) = hold_back(schedule, MessageType.RREF_CREATE)
    user.network.messages.on_rejected(user.peer(user), flight.envelope, ValueError("too large"))
    schedule.settle()
    with pytest.raises(ValueError, match="too large"):
        on(user, rref.to_here)
    del rref
    assert_nothing_left(schedule)


def test_a_reference_to_a_value_that_died_with_its_parent():
    """A user passes its reference to the owner before the owner has counted the fork, and the parent dies."""
    schedule = start(3)
    owner, parent, user = schedule.machines
    parent.held.append(create(schedule, parent, owner))
    schedule.settle()
    schedule.call(user, give, (1,), parent)
    while not user.held:
        assert schedule.step()
    held = hold_back(schedule, MessageType.CONTROL)
    call = on(user, rpc.rpc_async, owner.info, receive, (user.held, 1))
    late = hold_back(schedule, MessageType.CALL)
    schedule.kill(parent)
    while owner.peer(parent).end is None or owner.tasks:
        assert schedule.step()
    schedule.flights += late
    schedule.settle()
    assert call.done()
    user.held.clear()
    schedule.flights += [flight for flight in held if parent not in (flight.source, flight.target)]
    assert_nothing_left(schedule)


def test_a_fork_that_arrives_after_its_value_was_deleted_with_a_lost_worker():
    """The owner asks the creator, and does not wait for a creation that arrived long ago."""
    schedule = start(3)
    owner, creator, user = schedule.machines
    rref = create(schedule, creator, owner)
    schedule.settle()
    on(creator, rpc.rpc_async, user.info, receive, ([rref], 0))
    del rref
    schedule.settle()
    schedule.call(creator, give, (1,), user)
    while not creator.held:
        assert schedule.step()
    held = hold_back(schedule, MessageType.CONTROL)
    schedule.kill(user)
    schedule.settle()
    assert schedule.values[0]() is None
    schedule.flights += [flight for flight in held if user not in (flight.source, flight.target)]
    fetch = on(creator, lambda: creator.held[0]._fetch(creator.held[0]._handle, 0.0))
    schedule.settle()
    assert "is gone" in str(error_of(fetch))
    creator.held.clear()
    assert_nothing_left(schedule)


def test_the_loss_of_a_creator_is_noticed_by_an_owner_it_never_reached():
    schedule = start(3)
    owner, creator, user = schedule.machines
    rref = create(schedule, creator, owner)
    hold_back(schedule, MessageType.RREF_CREATE)
    on(creator, rpc.rpc_async, user.info, receive, ([rref], 0))
    while not user.held:
        assert schedule.step()
    fetch = user.agent.request(owner.info, fetch_request(user.held[0], 0.0))
    schedule.kill(creator)
    schedule.settle()
    assert isinstance(error_of(fetch), RRefError)
    user.held.clear()
    assert_nothing_left(schedule)


def test_an_answer_with_a_reference_to_a_value_of_a_dead_owner():
    """The caller gets an error instead of waiting."""
    schedule = start(3)
    owner, caller, called = schedule.machines
    rref = create(schedule, caller, owner)
    schedule.settle()
    answer = on(caller, rpc.rpc_async, called.info, receive, ([rref], 2), None, 0)
    call = hold_back(schedule, MessageType.CALL)
    schedule.kill(owner)
    schedule.settle()
    schedule.flights += call
    schedule.settle()
    if (error := error_of(answer)) is not None:
        assert "cannot be passed on" in str(error)
    else:
        (passed_on,) = answer.value()
        assert passed_on._handle.fork.state() == "failed: WorkerLostError"


def test_a_reference_that_is_sent_before_it_is_handled_that_an_earlier_connection_broke():
    """It goes by the next connection, and the receiver is not asked whether it was lost."""
    schedule = start(2)
    owner, user = schedule.machines
    schedule.call(owner, give, (1,), user)
    schedule.settle()
    schedule.break_connection(owner, user)
    for pair in ((owner, user), (user, owner)):
        schedule._heal(*pair)
    rref = on(owner, lambda: rpc.RRef(schedule.made(Value(0, []))))
    schedule.numbers[identify(rref)] = 0
    schedule.call(owner, receive, ([rref], 0), user)
    late = hold_back(schedule, MessageType.CALL)
    del rref
    schedule.settle()
    schedule.flights += late
    schedule.settle()
    assert not schedule.errors
    assert schedule.values[0]() is not None
    user.held.clear()
    assert_nothing_left(schedule)


def test_a_value_is_there_as_long_as_a_reference_to_it():
    schedule = start(2)
    user, owner = schedule.machines
    rref = create(schedule, user, owner)
    schedule.settle()
    assert isinstance(schedule.values[0](), Value)
    del rref
    schedule.settle()
    assert schedule.values[0]() is None
    assert_nothing_left(schedule)


def test_a_refused_control_message_keeps_nothing_of_what_refused_it():
    """Its outcome is kept for repetitions, even if no later message acknowledges it."""
    schedule = start(2)
    sender, listener = schedule.machines
    payloads = []

    def refuse(_sender, payload):
        payloads.append(weakref.ref(payload))
        raise RRefError("refused")

    listener.agent.control.on("refused", refuse)
    outcomes = []
    sender.agent.control.send(listener.info, "refused", Value(0, []), outcomes.append)
    (message,) = hold_back(schedule, MessageType.CONTROL)
    schedule.flights += [message, message]
    schedule.settle()
    assert [str(error) for error in outcomes] == ["refused"]
    assert [payload() for payload in payloads] == [None]


def test_a_call_that_arrives_while_its_worker_closes():
    """Its reference is not going to be confirmed, so it does not wait for that."""
    schedule = start(3)
    owner, parent, user = schedule.machines
    rref = create(schedule, parent, owner)
    schedule.settle()
    on(parent, rpc.rpc_async, user.info, receive, ([rref], 1))
    late = hold_back(schedule, MessageType.CALL)
    user.agent.extension(References).close()
    schedule.settle()
    schedule.flights += late
    hold_back(schedule, MessageType.CONTROL)
    assert not user.waiting


def test_waiting_for_a_value_of_a_closed_worker_fails():
    schedule = start(2)
    user, owner = schedule.machines
    rref = create(schedule, user, owner)
    hold_back(schedule, MessageType.RREF_CREATE)
    schedule.call(user, receive, ([rref], 0), owner)
    schedule.settle()
    assert not owner.held  # the call waits for the message that makes the value
    owner.agent.extension(References).close()
    schedule.settle()
    (held,) = owner.held
    assert held._handle.entry.future.done()
    with pytest.raises(WorkerLostError, match="has shut down"):
        on(owner, held.local_value)


def test_a_value_that_could_not_be_made_keeps_no_arguments():
    """Its error has the traceback as text, and keeps no frames of the call."""
    schedule = start(2)
    user, owner = schedule.machines
    argument = create(schedule, user, owner)
    schedule.settle()
    rref = on(user, rpc.remote, owner.info, fail_to_make, (1, [argument]))
    del argument
    schedule.settle()
    assert schedule.values[0]() is None
    fetch = on(user, lambda: rref._fetch(rref._handle, 0.0))
    schedule.settle()
    error = error_of(fetch)
    assert isinstance(error, RefusedToMakeError)
    assert "in fail_to_make" in error.__cause__.remote_traceback
