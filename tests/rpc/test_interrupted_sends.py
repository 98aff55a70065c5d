"""A send that is interrupted leaves the connections whole, wherever a signal handler raises."""

import select
import socket

import pytest
import torch
from gradwire import rpc
from gradwire.errors import SerializationError
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.frame_writer import AttachedFrame, FrameWriter

from tests.remote_functions import wait_until
from tests.rpc.channels.segments import MIB
from tests.rpc.execution.test_waiting_threads import nothing_is_pending
from tests.rpc.interruption import UNINTERRUPTED, InterruptError, Interruption

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


foreign: list[float] = []


def expect(x: torch.Tensor, number: float) -> None:
    """Notes it if a tensor has other elements than this number."""
    if not bool((x == number).all()):
        foreign.append(number)


def found_foreign() -> list[float]:
    return foreign


def raise_in_each_send(error: type[Exception]) -> None:
    """Has each send of a tensor fail later than the one before, with further calls after each."""
    moment, uninterrupted = 1, 0
    while uninterrupted < UNINTERRUPTED:
        try:
            with Interruption(moment, error=error):
                rpc.rpc_async("worker1", expect, (torch.full((MIB // 8,), float(moment)), moment))
            uninterrupted += 1
        except (error, SerializationError):  # the latter if the value was being pickled
            uninterrupted = 0
        for number in (-moment, -2 * moment):
            rpc.rpc_async("worker1", expect, (torch.full((MIB // 8,), float(number)), number)).wait()
        moment += 1
    assert moment > 80


@pytest.mark.parametrize("error", [TimeoutError, ArithmeticError])
def test_what_was_being_sent_when_a_signal_handler_raised_stays_as_it_was(workers, error):
    a, b = workers.rpc(2, transports=("unix", "grpc"), busy_poll=0)
    a.run(raise_in_each_send, error)
    assert b.run(found_foreign) == []


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


def test_a_write_that_fails_on_the_executor_too_breaks_the_connection(executor: Executor, monkeypatch):
    def fail(_writer: FrameWriter) -> None:
        raise MemoryError

    monkeypatch.setattr(FrameWriter, "_next", fail)
    executor.submit(bool)  # which starts a thread
    ours, peers = socket.socketpair()
    ours.settimeout(0)
    peers.settimeout(20)
    writer = FrameWriter(ours, executor)
    with peers, pytest.raises(MemoryError):
        try:
            writer.put(b"frame")
        finally:
            assert peers.recv(1) == b""
    writer.release()
