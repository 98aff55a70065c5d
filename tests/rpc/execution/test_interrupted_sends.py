"""A send during which Ctrl-C comes leaves the connections whole, at whatever moment."""

import pytest
from gradwire import rpc

from tests.remote_functions import wait_until
from tests.rpc.channels.segments import MIB
from tests.rpc.execution.interruption import UNINTERRUPTED, Interruption
from tests.rpc.execution.test_waiting_threads import nothing_is_pending

FIRST_CALLS = 20
"""Calls after which the connections for large payloads are made."""


def interrupt_each_send(value: bytes) -> int:
    """Interrupts each send later than the one before, with a call after each; returns how often."""
    for _ in range(FIRST_CALLS):
        rpc.rpc_sync("worker1", len, (value,))
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        try:
            with Interruption(moment):
                rpc.rpc_async("worker1", len, (value,))
            uninterrupted += 1
        except KeyboardInterrupt:
            uninterrupted = 0
        moment += 1
        assert rpc.rpc_sync("worker1", len, (value,), timeout=20) == len(value), moment
    return moment - 1 - uninterrupted


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc"), ("grpc",)], ids=lambda names: names[0])
@pytest.mark.parametrize("size", [2, MIB // 2, MIB])
def test_a_send_may_be_interrupted_at_any_moment(workers, transports, size):
    a, b = workers.rpc(2, transports=transports, busy_poll=0)
    assert a.run(interrupt_each_send, bytes(size)) > 80
    for worker in (a, b):
        worker.run(wait_until, nothing_is_pending)
