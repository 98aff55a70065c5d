"""Members send values of wrong types and sizes in gradwire's own messages, which breaks those messages only."""

import tracemalloc
from functools import partial

import pytest
import torch
from gradwire import rpc
from gradwire.autograd.graph import MAX_HEADER_SENDS, closure_from_proto
from gradwire.errors import RemoteUnpicklableError, RpcError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import Handler, MessageType
from gradwire.rpc.profiling import extension as profiling
from gradwire.rpc.profiling.sessions import events_to_tensor
from gradwire.rpc.wire.failures import decode_failure

from tests.remote_functions import add
from tests.rpc.calls.generators import count_to

MIB = 1 << 20


def answer_with(agent, kind: MessageType.ValueType, answer: object) -> None:
    """Has an agent answer all requests of a type with a value."""
    agent._extensions.handlers[kind] = Handler(lambda _message: answer)


@pytest.mark.parametrize(
    "failure",
    [1 << 40, b"\xff", [1], "text", memoryview(b"\xff")],
    ids=["size", "bytes", "list", "text", "memory"],
)
def test_what_is_no_error_is_reported_as_one(failure):
    """Of an int, `bytes` made as many zeros."""
    tracemalloc.start()
    try:
        error = decode_failure(failure, "peer")
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert isinstance(error, RemoteUnpicklableError)
    assert "malformed" in str(error)


@pytest.mark.parametrize("outcome", [None, 3, ("3", b""), (None, b""), (1, b"", 2), (1, 2**40)], ids=repr)
def test_a_stream_ends_with_any_outcome(agents, outcome):
    a, b = agents(2)
    answer_with(b, MessageType.STREAM_OPEN, outcome)
    with holder.using(a), pytest.raises(RpcError, match="'agent1' ends the stream with a malformed answer"):
        next(iter(rpc.rpc_stream(b.info, count_to, (3,))))


def send_events(*times: int) -> None:
    """Has this worker add an event with each of these times to its answers."""
    events = [agent_pb2.ProfileEvent(name="event", start_ns=time, end_ns=time) for time in times]
    profiling.events_to_tensor = lambda _events: events_to_tensor(events)


@pytest.mark.parametrize("times", [[(1 << 63) - 1], [-(1 << 63)], [0, 1 << 62], [-1]], ids=repr)
def test_a_profiled_call_ends_whenever_its_events_were(two_workers, times):
    """It waited for ever."""
    a, b = two_workers

    def call() -> None:
        with torch.autograd.profiler.profile(), pytest.raises(ValueError, match="an event of an impossible time"):
            rpc.rpc_sync("worker1", add, (1, 2))

    b.run(send_events, *times)
    a.run(call)
    b.run(send_events, 0, (1 << 62) - 1)
    a.run(partial(profiled, 3))


def profiled(result: int) -> None:
    with torch.autograd.profiler.profile():
        assert rpc.rpc_sync("worker1", add, (1, 2)) == result


def test_a_closure_in_a_header_is_small():
    """A tuple in memory for each byte of the header."""
    sends = agent_pb2.WorkerSends(worker_id=1, message_ids=range(MAX_HEADER_SENDS - 1), omitted=[5])
    closure = closure_from_proto([sends])
    assert len(closure.sends) + len(closure.omitted) == MAX_HEADER_SENDS
    sends.message_ids.append(7)
    with pytest.raises(ValueError, match="its closure has more than 256 sends"):
        closure_from_proto([sends])
