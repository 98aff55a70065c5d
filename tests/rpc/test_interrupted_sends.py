"""A send that is interrupted leaves the connections whole, wherever a signal handler raises."""

import select
import socket

import pytest
from gradwire import rpc
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.frame_writer import AttachedFrame, FrameWriter

from tests.remote_functions import wait_until
from tests.rpc.interruption import UNINTERRUPTED, InterruptError, Interruption
from tests.rpc.segments import MIB
from tests.rpc.test_waiting_threads import nothing_is_pending

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
        except InterruptError:
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


@pytest.mark.parametrize("error", [InterruptError, TimeoutError])  # the latter is an OSError
@pytest.mark.parametrize("attaches", [False, True])
def test_a_frame_that_is_begun_is_written_wherever_the_write_is_interrupted(
    executor: Executor, attaches: bool, error: type[BaseException]
):
    executor.submit(bool)  # which starts a thread
    large = bytes(range(256)) * (MIB // 256)  # more than a socket takes at once
    frame = AttachedFrame.of(large[:4], [memoryview(large)[4:]]) if attaches else large
    moment, uninterrupted, begun = 1, 0, 0
    while uninterrupted < UNINTERRUPTED:
        ours, peers = socket.socketpair()
        ours.settimeout(0)
        writer = FrameWriter(ours, executor)
        try:
            with Interruption(moment, error=error):
                writer.put(frame)
            uninterrupted += 1
        except error:
            uninterrupted = 0
        moment += 1
        with peers, peers.makefile("rb") as received:
            if select.select([peers], [], [], 0)[0]:
                begun += 1
                peers.settimeout(20)
                assert received.read(MIB) == large, moment
            writer.release()
    assert begun > 20
