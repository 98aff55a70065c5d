"""A wait during which Ctrl-C comes loses neither its answer nor a segment, at whatever moment."""

import gc
import os
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import wait_until
from tests.rpc.channels.segments import MIB, segments_in_use, used_bytes
from tests.rpc.execution.interruption import UNINTERRUPTED, Interruption
from tests.rpc.execution.test_waiting_threads import nothing_is_pending

ELEMENTS = MIB // 4


def echo_when_told(path: str, value: Any) -> Any:
    """Returns a value when a byte can be read from a pipe: a copy, if it is one of the smaller ones."""
    with open(path, "rb", buffering=0) as pipe:
        pipe.read(1)
    return value if value.numel() == ELEMENTS else value.clone()


def interrupt_at_each_moment(path: str, value: torch.Tensor) -> int:
    """Has worker1 send a value back again and again, and interrupts each wait later; returns how often."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    moment, uninterrupted = 1, 0
    values: list[torch.Tensor] = []
    while uninterrupted < UNINTERRUPTED:
        future = rpc.rpc_async("worker1", echo_when_told, (path, value))
        interruption = Interruption(moment, lambda: os.write(pipe, b"x"))
        try:
            with interruption:
                values.append(future.wait_for_answer())
            if interruption.waits:  # else another thread has, with fewer moments: once more
                uninterrupted += 1
                moment += 1
        except KeyboardInterrupt:
            uninterrupted = 0
            moment += 1
        values.append(future.wait())
        # In the same memory as the last one if that has been given back too early.
        values.append(rpc.rpc_sync("worker1", torch.neg, (value,)))
        assert torch.equal(values[-2], value)
        assert torch.equal(values[-1], -value)
        values.clear()
    os.close(pipe)
    return moment - uninterrupted


def nothing_is_left() -> bool:
    """Returns whether no call is in flight and no segment in use."""
    agent = current_agent()
    assert isinstance(agent, GrpcAgent)
    gc.collect()
    return nothing_is_pending() and not agent._calls.in_flight and segments_in_use() == (0, 0)


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc")], ids=lambda names: names[0])
@pytest.mark.parametrize("elements", [2, 100_000, ELEMENTS])  # the second follows its message between hosts
def test_a_wait_may_be_interrupted_at_any_moment(workers, transports, elements, tmp_path):
    a, b = workers.rpc(2, transports=transports, busy_poll=0)
    interrupts = a.run(interrupt_at_each_moment, str(tmp_path / "pipe"), torch.arange(elements))
    assert interrupts > 50
    for worker in (a, b):
        worker.run(wait_until, nothing_is_left)
        assert worker.run(used_bytes) <= 4 * 8 * ELEMENTS
