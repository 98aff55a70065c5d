"""Requests that name values which are not there wait without a thread, and end with their callers' timeouts."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from gradwire import rpc
from gradwire.errors import LimitReachedError, Outcome, RpcTimeoutError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rref.forks import References
from gradwire.rref.handles import Fork, UserHandle
from gradwire.rref.owner_table import GlobalId

from tests import remote_functions
from tests.remote_functions import add, assert_clean, set_event, wait_for, wait_until
from tests.rpc.wire import policy_functions as functions

CALLS = 600
"""More than the threads that a worker may have while they wait."""

MAX_THREADS = 60


def promise(number: int) -> rpc.RRef[Any]:
    """Returns a reference to a value of worker1 that this worker says it will make, and never does."""
    agent = current_agent()
    value, fork = GlobalId((agent.info.id, 1_000_000 + number)), GlobalId((agent.info.id, 2_000_000 + number))
    references: Any = agent.extension(References)
    references._creating.add(value)
    return rpc.RRef._of(UserHandle(agent, Fork(value, fork, agent.worker("worker1"), keep_alive=references)))


def value_here(rref: rpc.RRef[Any]) -> Any:
    return rref.local_value()


def use(rref: rpc.RRef[Any], number: int, timeout: float) -> Any:
    """Names a value in one of the ways in which requests do; returns a future."""
    ways: list[Callable[[], Any]] = [
        lambda: rref.rpc_async(timeout).add(1),
        lambda: rref.rpc_async(timeout).value(),
        lambda: rref._get_type(timeout, blocking=False),
        lambda: rref._fetch(rref._handle, timeout),
        lambda: rpc.rpc_async("worker1", functions.value_of, (rref,), timeout=timeout),
    ]
    return ways[number % len(ways)]()


def call_in_vain(timeout: float) -> None:
    remote_functions.kept.extend(use(promise(number), number, timeout) for number in range(CALLS))


def outcomes() -> set[str]:
    names = set()
    while remote_functions.kept:
        with pytest.raises(Exception, match=r".") as caught:
            remote_functions.kept.pop().wait()
        names.add(type(caught.value).__name__)
    gc.collect()
    return names


def forget() -> None:
    remote_functions.kept.clear()


def parked(caller: str = "worker0") -> int:
    count: int = rpc.debug_info()["flow_control"][caller]["parked_requests"]
    return count


def test_values_that_never_come_cost_a_worker_with_a_policy_no_threads(workers):
    attacker, victim, other = workers.rpc(3, policy=rpc.Policy(accepts="plain"))
    victim.run(functions.load)
    before = victim.run(threading.active_count)
    attacker.run(call_in_vain, 2.0)
    victim.run(wait_until, lambda: parked() == CALLS)
    assert victim.run(threading.active_count) < before + MAX_THREADS
    assert other.run(rpc.rpc_sync, "worker1", functions.echo, (1,)) == 1
    assert attacker.run(outcomes) == {"RpcTimeoutError"}
    victim.run(wait_until, lambda: not parked())  # by its own clock
    victim.run(lambda: wait_until(lambda: gc.collect() >= 0 and not rpc.debug_info()["num_awaited_rrefs"]))
    assert victim.run(threading.active_count) < before + MAX_THREADS
    assert other.run(rpc.rpc_sync, "worker1", functions.echo, (2,)) == 2


def test_they_end_when_they_are_cancelled_and_with_their_caller(workers):
    caller, callee, _ = workers.rpc(3)

    def cancel() -> None:
        call = promise(0).rpc_async(0).add(1)
        remote_functions.kept.append(promise(1).rpc_async(0).add(1))
        current_agent().control.run(lambda: None)
        remote_functions.kept.append(call)

    caller.run(cancel)
    callee.run(wait_until, lambda: parked() == 2)
    assert caller.run(lambda: remote_functions.kept.pop().cancel())
    callee.run(wait_until, lambda: parked() == 1)
    caller.kill()
    callee.run(wait_until, lambda: not parked())


def test_one_caller_cannot_leave_any_number_of_them(workers):
    flow = rpc.FlowControlOptions(max_in_flight=8, max_received=8)
    attacker, victim = workers.rpc(2, flow_control=flow)

    def fill() -> None:
        agent: Any = current_agent()
        agent._flow_control.close()  # it sends all that it likes
        remote_functions.kept.extend(promise(number).rpc_async(2).add(1) for number in range(8))

    def call() -> None:
        for number in range(8, 12):
            with pytest.raises(LimitReachedError, match="8 requests of worker 'worker0'.* wait") as caught:
                promise(number).rpc_sync(2).add(1)
            assert caught.value.outcome is Outcome.NOT_SENT
        assert rpc.rpc_sync("worker1", add, (1, 2)) == 3

    attacker.run(fill)
    victim.run(wait_until, lambda: parked() == 8)
    attacker.run(call)
    assert attacker.run(outcomes) == {"RpcTimeoutError"}
    victim.run(wait_until, lambda: not parked())


def wait_for_value() -> str:
    return wait_for("value")


def test_what_a_function_waits_for_by_itself_ends_with_the_call(workers):
    caller, callee = workers.rpc(2)

    def call() -> None:
        value = rpc.remote("worker1", wait_for_value)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", value_here, (value,), timeout=0.2)
        remote_functions.kept.append(value)

    caller.run(call)
    callee.run(wait_until, lambda: rpc.debug_info()["agent.server_active_calls"] == 1)
    callee.run(set_event, "value")
    caller.run(forget)
    for each in (caller, callee):
        each.run(assert_clean)


def test_a_call_that_has_timed_out_while_it_waits_has_not_run(workers):
    caller, callee = workers.rpc(2)

    def call() -> None:
        value = rpc.remote("worker1", wait_for_value)
        for name in (False, True):
            with pytest.raises(RpcTimeoutError):
                value.rpc_sync(timeout=0.1).upper() if name else value.to_here(timeout=0.1)
        remote_functions.kept.append(value)

    caller.run(call)
    callee.run(wait_until, lambda: not parked())
    callee.run(set_event, "value")
    caller.run(forget)
    for each in (caller, callee):
        each.run(assert_clean)
