"""The NCCL engine on fakes: which calls it makes, in which order, and their results."""

import threading

import pytest
import torch
from gradwire.c10d.engines.nccl.plans import NativeReduction, NcclCapability
from gradwire.c10d.engines.reductions import Reduction
from gradwire.errors import UnsupportedOperationError

from tests.c10d.engines.nccl_ranks import SUM, Rank, all_reduce, everywhere, running_ranks, start_stalled

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

BYTES, INT32, FLOAT32 = 1, 2, 7


@pytest.fixture
def ranks():
    """Creates ranks; `ranks(2, interval=0.01)` passes options to the engines."""
    with running_ranks() as make:
        yield make


# Calls


def test_a_collective_is_one_call_on_a_stream_that_waits_for_the_callers(ranks):
    members = ranks(2)
    assert [result.tolist() for result in everywhere(members, all_reduce)] == [[1, 3, 5, 7]] * 2
    stream = members[1].gpus.streams[0].cuda_stream
    assert members[1].calls() == [("NcclCommunicator", 2, 1), ("allReduce", 1, 4, FLOAT32, 0, stream)]
    commands = members[1].gpus.commands
    assert commands[0] == ("record", 0)  # the caller's work
    assert commands[3] == ("wait", stream, 0)
    assert commands[-2:] == [("record", stream), ("wait", 0, stream)]  # the caller's stream waits, not the caller
    assert [command for command in commands if command[0] == "on"] == [
        ("on", stream)
    ] * 3  # to create the communicator, and before and after the call


def test_communicators_are_made_once(ranks):
    members = ranks(2)
    everywhere(members, all_reduce)
    members[0].calls()
    everywhere(members, all_reduce)
    assert [call[0] for call in members[0].calls()] == ["allReduce"]


def test_several_operations_are_one_group_and_copies_are_written_back_on_the_stream(ranks):
    def several(member: Rank) -> list[torch.Tensor]:
        tensors = [torch.full((2,), float(member.rank + i)) for i in range(3)]
        steps = [lambda t=t: member.engine.all_reduce(t, SUM, 30) for t in tensors]
        finish = lambda: member.gpus.commands.append(("finish",))  # noqa: E731
        pending = member.engine.start(steps, finish)
        pending.wait(None)
        return tensors

    members = ranks(2)
    for tensors in everywhere(members, several):
        assert [tensor.tolist() for tensor in tensors] == [[1, 1], [3, 3], [5, 5]]
    names = [call[0] for call in members[0].calls()]
    assert names == ["NcclCommunicator", "groupStart", "allReduce", "allReduce", "allReduce", "groupEnd"]
    stream = members[0].gpus.streams[0].cuda_stream
    commands = members[0].gpus.commands
    at = commands.index(("finish",))
    assert commands[at - 1 : at + 3] == [("on", stream), ("finish",), ("off", stream), ("record", stream)]


def test_uneven_all_to_all_is_messages_in_one_group(ranks):
    def exchange(member: Rank) -> list[list[float]]:
        inputs = [torch.full((member.rank + to,), float(10 * member.rank + to)) for to in range(3)]
        outputs = [torch.zeros(source + member.rank) for source in range(3)]
        member.engine.all_to_all(outputs, inputs, 30).wait(None)
        return [output.tolist() for output in outputs]

    members = ranks(3)
    results = everywhere(members, exchange)
    assert results[2] == [[2.0] * 2, [12.0] * 3, [22.0] * 4]
    assert results[0] == [[], [10.0], [20.0] * 2]
    stream = members[0].gpus.streams[0].cuda_stream
    assert members[0].calls()[1:] == [
        ("groupStart",),
        ("send", 0, 4, BYTES, 1, stream),
        ("send", 0, 8, BYTES, 2, stream),
        ("recv", 0, 4, BYTES, 1, stream),
        ("recv", 0, 8, BYTES, 2, stream),
        ("groupEnd",),
    ]


def test_uneven_all_gather_is_a_broadcast_of_each_rank(ranks):
    def gather(member: Rank) -> list[list[int]]:
        outputs = [torch.zeros(rank, dtype=torch.int16) for rank in range(3)]
        tensor = torch.full((member.rank,), member.rank, dtype=torch.int16)
        member.engine.all_gather(outputs, tensor, 30).wait(None)
        return [output.tolist() for output in outputs]

    members = ranks(3)
    assert everywhere(members, gather) == [[[], [1], [2, 2]]] * 3
    calls = members[0].calls()[1:]
    assert [call[:4] for call in calls[1:-1]] == [("broadcast", 0, 2, BYTES), ("broadcast", 0, 4, BYTES)]


def test_uneven_reduce_scatter_is_a_reduction_for_each_rank(ranks):
    def scatter(member: Rank) -> list[float]:
        inputs = [torch.full((to + 1,), float(member.rank + to)) for to in range(2)]
        output = torch.zeros(member.rank + 1)
        member.engine.reduce_scatter(output, inputs, SUM, 30).wait(None)
        return output.tolist()

    members = ranks(2)
    assert everywhere(members, scatter) == [[1.0], [3.0, 3.0]]
    assert [call[0] for call in members[0].calls()[1:]] == ["groupStart", "reduce", "reduce", "groupEnd"]


def test_factors_are_applied_first_and_inputs_stay(ranks):
    def scatter(member: Rank) -> tuple[list[float], list[float]]:
        whole, output = torch.arange(4.0), torch.zeros(2)
        member.engine.reduce_scatter_single(output, whole, Reduction("premul_sum", 0.5), 30).wait(None)
        return output.tolist(), whole.tolist()

    members = ranks(2)
    assert everywhere(members, scatter) == [([0.0, 1.0], [0, 1, 2, 3]), ([2.0, 3.0], [0, 1, 2, 3])]
    assert members[0].calls()[-1][:5] == ("reduceScatter", 0, 2, FLOAT32, 0)


def test_what_nccl_cannot_reduce_is_gathered_and_combined(ranks):
    def bits(member: Rank) -> list[int]:
        tensor = torch.tensor([1, 2, 4], dtype=torch.int32) << member.rank
        member.engine.all_reduce(tensor, Reduction("bxor"), 30).wait(None)
        return tensor.tolist()

    members = ranks(2)
    assert everywhere(members, bits) == [[3, 6, 12]] * 2
    assert [call[:4] for call in members[0].calls()[1:]] == [("allGather", 0, 12, BYTES)]


NEW, OLD = NcclCapability(22703, (9, 0)), NcclCapability(22304, (8, 0))


@pytest.mark.parametrize(
    ("dtype", "name", "native"),
    [
        (torch.int8, "sum", NativeReduction(0, 0)),
        (torch.uint8, "product", NativeReduction(1, 1)),
        (torch.int32, "max", NativeReduction(2, 2)),
        (torch.uint32, "min", NativeReduction(3, 3)),
        (torch.int64, "avg", NativeReduction(4, 4)),
        (torch.uint64, "sum", NativeReduction(5, 0)),
        (torch.float16, "sum", NativeReduction(6, 0)),
        (torch.float32, "premul_sum", NativeReduction(7, 0)),
        (torch.float64, "sum", NativeReduction(8, 0)),
        (torch.bfloat16, "avg", NativeReduction(9, 4)),
        (torch.float8_e4m3fn, "sum", NativeReduction(10, 0)),
        (torch.float8_e5m2, "max", NativeReduction(11, 2)),
        (torch.bool, "sum", NativeReduction(1, 2)),
        (torch.bool, "band", NativeReduction(1, 3)),
        (torch.complex64, "sum", NativeReduction(7, 0, 2)),
        (torch.complex128, "avg", NativeReduction(8, 4, 2)),
        (torch.complex64, "product", None),
        (torch.float8_e4m3fn, "avg", None),
        (torch.float8_e4m3fnuz, "sum", None),
        (torch.bool, "bxor", None),
        (torch.int16, "sum", None),
        (torch.int32, "bor", None),
    ],
)
def test_numbers_of_dtypes_and_reductions(dtype, name, native):
    assert NEW.native(dtype, Reduction(name)) == native


def test_older_libraries_and_gpus_do_not_reduce_float8():
    assert OLD.native(torch.float8_e5m2, SUM) is None
    assert OLD.native(torch.float32, SUM) == NativeReduction(7, 0)


# Messages


def test_messages_pass_each_other_in_any_order(ranks):
    """Every rank of a ring sends first, which would deadlock with one communicator."""

    def ring(member: Rank) -> list[float]:
        received = torch.zeros(2)
        after, before = (member.rank + 1) % 3, (member.rank - 1) % 3
        sends = [member.engine.send(torch.full((2,), float(member.rank)), after, 0, 30) for _ in range(2)]
        receives = [member.engine.recv(received, before, 7, 30) for _ in range(2)]
        for pending in sends + receives:
            pending.wait(None)
        assert receives[0].source() == before
        return received.tolist()

    members = ranks(3)
    assert everywhere(members, ring) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    calls = sorted(call[:5] for call in members[0].calls())
    assert calls == sorted(
        [
            ("NcclCommunicator", 2, 0),
            ("NcclCommunicator", 2, 1),
            *[("send", 0, 8, BYTES, 1)] * 2,
            *[("recv", 1, 8, BYTES, 0)] * 2,
        ]
    )
    assert len({stream.cuda_stream for stream in members[0].gpus.streams}) == 2


def test_what_nccl_cannot_do_is_refused(ranks):
    (member,) = ranks(1)
    with pytest.raises(UnsupportedOperationError, match="recv from any rank: name the rank"):
        member.engine.recv(torch.zeros(1), None, 0, 30)
    with pytest.raises(UnsupportedOperationError, match="send to the rank itself"):
        member.engine.send(torch.zeros(1), 0, 0, 30)
    member.gpus.is_captured = True
    with pytest.raises(UnsupportedOperationError, match="capture all_reduce into a CUDA graph"):
        all_reduce(member)
    member.gpus.is_captured = False
    assert all_reduce(member).tolist() == [0, 1, 2, 3]


# Waiting


def test_wait_blocks_the_stream_and_a_wait_with_a_timeout_the_caller(ranks):
    (member,) = ranks(1)
    pending = start_stalled(member)
    pending.wait(None)
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(0.01)
    member.gpus.streams[0].is_stalled = False
    pending.wait(30)
    assert pending.done()


def test_a_callback_runs_when_a_wait_would_not_block(ranks):
    (member,) = ranks(1, interval=0.005)
    pending = start_stalled(member)
    called = threading.Event()
    pending.on_done(called.set)
    assert called.is_set()  # streams can wait for it already
    barrier = member.engine.barrier(30)
    over = threading.Event()
    barrier.on_done(over.set)
    assert not over.is_set()  # the other ranks are not known to have called it
    member.gpus.streams[0].is_stalled = False
    assert over.wait(30)
    barrier.wait(None)


def test_blocking_wait_blocks_until_the_operation_is_done(ranks):
    (member,) = ranks(1, blocking_wait=True)
    pending = start_stalled(member)
    waiting = threading.Thread(target=pending.wait, args=(None,))
    waiting.start()
    assert waiting.is_alive()
    member.gpus.streams[0].is_stalled = False
    waiting.join()
    assert pending.done()


def test_tensors_live_until_the_operation_is_done(ranks):
    (member,) = ranks(1)
    pending = start_stalled(member)
    member.gpus.current_streams[0] = member.gpus.new_stream(0)
    pending.wait(None)  # on another stream than the one that the tensors belong to
    assert pending._tensors
    member.gpus.streams[0].is_stalled = False
    assert pending.done()
    assert not pending._tensors


def test_tensors_may_go_once_their_own_stream_waits(ranks):
    (member,) = ranks(1)
    pending = start_stalled(member)
    assert pending._tensors
    pending.wait(None)
    assert not pending._tensors
    assert not pending.done()


def test_drain_waits_for_all_operations(ranks):
    (member,) = ranks(1)
    pending = start_stalled(member)
    draining = threading.Thread(target=member.engine.drain)
    draining.start()
    assert not pending.done()
    member.gpus.streams[0].is_stalled = False
    draining.join()
    assert pending.done()
