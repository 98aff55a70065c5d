"""The NCCL engine without a GPU: what it calls, in which order, and what comes of it. See fake_nccl."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradwire.c10d import HashStore
from gradwire.c10d.engines import Setup
from gradwire.c10d.engines.nccl import NcclEngine
from gradwire.c10d.engines.nccl.dtypes import NativeReduction, NcclCapability
from gradwire.c10d.reductions import Reduction
from gradwire.c10d.stores.prefix import PrefixStore
from gradwire.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    ProcessGroupError,
    UnsupportedOperationError,
)

from tests.c10d.fake_nccl import CpuGpus, StoreNccl

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

SUM = Reduction("sum")
BYTES, INT32, FLOAT32 = 1, 2, 7


class Rank:
    """One rank of a group that lives on a thread of this process, and its doubles."""

    def __init__(self, store: HashStore, rank: int, size: int, **options: Any) -> None:
        self.rank = rank
        self.size = size
        self.library = StoreNccl(PrefixStore("nccl", store))
        self.gpus = CpuGpus(f"process {rank}")
        self.failures: list[Exception] = []
        setup = Setup(
            store=PrefixStore("engine", store),
            rank=rank,
            size=size,
            timeout=30,
            device_type="cuda",
            global_ranks=tuple(range(size)),
            group_name="test",
            on_failure=self.failures.append,
        )
        self.engine = NcclEngine(setup, library=self.library, gpus=self.gpus, **options)

    def calls(self) -> list[Any]:
        """What was called since the last time."""
        calls, self.library.calls = self.library.calls, []
        return calls


@pytest.fixture
def ranks():
    """Makes ranks, and closes them; `ranks(2, interval=0.01)` passes options to the engines."""
    made: list[Rank] = []
    store = HashStore()

    def make(size: int, **options: Any) -> list[Rank]:
        made.extend(Rank(store, rank, size, **options) for rank in range(size))
        return made

    yield make
    for each in made:
        for stream in each.gpus.streams:
            stream.held = False
        each.engine.fail(GroupAbortedError("the test is over"))
        each.engine.close()
    store.close()


def everywhere(members: list[Rank], function: Callable[[Rank], Any]) -> list[Any]:
    """Calls it for every rank at once; the results, or the first error."""
    results: list[Any] = [None] * len(members)
    errors: list[BaseException] = []

    def run(member: Rank) -> None:
        try:
            results[member.rank] = function(member)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def all_reduce(member: Rank) -> torch.Tensor:
    tensor = torch.arange(4.0) + member.rank
    member.engine.all_reduce(tensor, SUM, 30).wait(None)
    return tensor


# What it calls.


def test_a_collective_is_one_call_on_a_stream_that_waits_for_the_callers(ranks):
    members = ranks(2)
    assert [result.tolist() for result in everywhere(members, all_reduce)] == [[1, 3, 5, 7]] * 2
    stream = members[1].gpus.streams[0].cuda_stream
    assert members[1].calls() == [("NcclCommunicator", 2, 1), ("allReduce", 1, 4, FLOAT32, 0, stream)]
    told = members[1].gpus.told
    assert told[0] == ("record", 0)  # what the caller had put there
    assert told[3] == ("wait", stream, 0)
    assert told[-2:] == [("record", stream), ("wait", 0, stream)]  # the caller's stream waits, not the caller
    assert [what for what in told if what[0] == "on"] == [("on", stream)] * 3  # to join; before and after the call


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
        finish = lambda: member.gpus.told.append(("finish",))  # noqa: E731
        pending = member.engine.start(steps, finish)
        pending.wait(None)
        return tensors

    members = ranks(2)
    for tensors in everywhere(members, several):
        assert [tensor.tolist() for tensor in tensors] == [[1, 1], [3, 3], [5, 5]]
    names = [call[0] for call in members[0].calls()]
    assert names == ["NcclCommunicator", "groupStart", "allReduce", "allReduce", "allReduce", "groupEnd"]
    stream = members[0].gpus.streams[0].cuda_stream
    told = members[0].gpus.told
    at = told.index(("finish",))
    assert told[at - 1 : at + 3] == [("on", stream), ("finish",), ("off", stream), ("record", stream)]


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


# Messages.


def test_messages_pass_each_other_in_any_order(ranks):
    """Every rank of a ring first sends, and waits for that; with one communicator they would wait for ever."""

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
    member.gpus.in_capture = True
    with pytest.raises(UnsupportedOperationError, match="capture all_reduce into a CUDA graph"):
        all_reduce(member)
    member.gpus.in_capture = False
    assert all_reduce(member).tolist() == [0, 1, 2, 3]


# Waiting.


def hold(member: Rank) -> None:
    """From here on, nothing that is on the engine's streams is over."""
    for stream in member.gpus.streams:
        stream.held = True


def begun(member: Rank, timeout: float = 30.0) -> Any:
    """An operation that is under way for as long as its streams are held."""
    all_reduce(member)
    hold(member)
    return member.engine.all_reduce(torch.ones(2), SUM, timeout)


def test_wait_blocks_the_stream_and_a_wait_with_a_timeout_the_caller(ranks):
    (member,) = ranks(1)
    pending = begun(member)
    pending.wait(None)
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(0.01)
    member.gpus.streams[0].held = False
    pending.wait(30)
    assert pending.done()


def test_a_callback_comes_when_a_wait_would_not_block(ranks):
    (member,) = ranks(1, interval=0.005)
    pending = begun(member)
    called = threading.Event()
    pending.on_done(called.set)
    assert called.is_set()  # streams can wait for it already
    barrier = member.engine.barrier(30)
    over = threading.Event()
    barrier.on_done(over.set)
    assert not over.is_set()  # nobody has waited for the other ranks yet
    member.gpus.streams[0].held = False
    assert over.wait(30)
    barrier.wait(None)


def test_blocking_wait_waits_for_the_end(ranks):
    (member,) = ranks(1, blocking_wait=True)
    pending = begun(member)
    waiting = threading.Thread(target=pending.wait, args=(None,))
    waiting.start()
    assert waiting.is_alive()
    member.gpus.streams[0].held = False
    waiting.join()
    assert pending.done()


def test_tensors_live_until_the_operation_is_over(ranks):
    (member,) = ranks(1)
    pending = begun(member)
    member.gpus.currents[0] = member.gpus.new_stream(0)
    pending.wait(None)  # on another stream: the one that the tensors belong to goes on
    assert pending._tensors
    member.gpus.streams[0].held = False
    assert pending.done()
    assert not pending._tensors


def test_tensors_may_go_once_their_own_stream_waits(ranks):
    (member,) = ranks(1)
    pending = begun(member)
    assert pending._tensors
    pending.wait(None)
    assert not pending._tensors
    assert not pending.done()


def test_drain_waits_for_what_nobody_waits_for(ranks):
    (member,) = ranks(1)
    pending = begun(member)
    draining = threading.Thread(target=member.engine.drain)
    draining.start()
    assert not pending.done()
    member.gpus.streams[0].held = False
    draining.join()
    assert pending.done()


# Failures.


def test_what_takes_too_long_ends_the_group(ranks):
    (member,) = ranks(1, interval=0.005)
    pending = begun(member, timeout=0.02)
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce timed out after 0\.02 s"):
        pending.wait(30)
    with pytest.raises(CollectiveTimeoutError):
        all_reduce(member)
    member.engine.close()  # waits for the watchdog, which is the last to know
    assert isinstance(member.failures[0], CollectiveTimeoutError)
    assert [communicator.ended for communicator in member.library.made] == [["abort"]]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled"), "NCCL_ERROR_SYSTEM_ERROR: unhandled"),
        (KeyError(6), "error 6: a process exited or the network failed"),  # cupy lacks its name
    ],
)
def test_an_asynchronous_error_ends_the_group(ranks, error, text):
    (member,) = ranks(1, interval=0.005)
    all_reduce(member)
    hold(member)
    member.library.made[0].error = error
    pending = member.engine.all_reduce(torch.ones(2), SUM, 30)
    with pytest.raises(ProcessGroupError, match=text):
        pending.wait(30)
    with pytest.raises(ProcessGroupError, match=text):
        member.engine.barrier(30)


def test_an_abort_wakes_all_who_wait(ranks):
    (member,) = ranks(1)
    pending = begun(member)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            pending.wait(60)
        except GroupAbortedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    error = GroupAbortedError("rank 0 aborted the group")
    member.engine.fail(error)
    waiting.join()
    assert raised == [error]
    assert not member.failures  # the group knows


def test_communicators_are_aborted_in_one_group(ranks):
    def use_two_communicators(member: Rank) -> None:
        all_reduce(member)
        tensor = torch.ones(1)
        call = member.engine.recv if member.rank else member.engine.send
        call(tensor, 1 - member.rank, 0, 30).wait(None)

    members = ranks(2)
    everywhere(members, use_two_communicators)
    members[0].calls()
    members[0].engine.fail(GroupAbortedError("rank 0 aborted the group"))
    assert members[0].calls() == [("groupStart",), ("groupEnd",)]
    assert [communicator.ended for communicator in members[0].library.made] == [["abort"]] * 2


def test_an_end_in_good_order_destroys_communicators(ranks):
    (member,) = ranks(1)
    all_reduce(member)
    member.engine.close()
    assert [communicator.ended for communicator in member.library.made] == [["destroy"]]


def test_an_abort_wakes_who_waits_for_ranks_that_do_not_come(ranks):
    members = ranks(2)
    pending = members[0].engine.send(torch.ones(2), 1, 0, 60)
    members[0].engine.fail(GroupAbortedError("rank 0 aborted the group"))
    with pytest.raises(GroupAbortedError):
        pending.wait(None)


def test_a_rank_that_does_not_come_is_named(ranks):
    members = ranks(3)
    with pytest.raises(CollectiveTimeoutError, match="waiting for ranks 1, 2"):
        members[0].engine.all_reduce(torch.ones(2), SUM, 0.02)
    assert members[0].failures
    with pytest.raises(CollectiveTimeoutError):
        all_reduce(members[0])


def test_two_ranks_on_one_gpu_are_refused_by_all(ranks):
    members = ranks(2)
    members[1].gpus.name = members[0].gpus.name
    errors = []

    def refused(member: Rank) -> None:
        with pytest.raises(ProcessGroupError, match=r"ranks 0 and 1 both use GPU process 0/0.*set_device") as info:
            all_reduce(member)
        errors.append(info.value)

    everywhere(members, refused)
    assert len(errors) == 2


def test_a_call_that_nccl_refuses_ends_the_group_and_the_group_of_calls(ranks):
    (member,) = ranks(1)
    all_reduce(member)
    member.calls()

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")

    member.library.made[0].allReduce = refuse
    steps = [lambda: member.engine.all_reduce(torch.ones(1), SUM, 30)] * 2
    with pytest.raises(ProcessGroupError, match=r"NCCL failed in all_reduce: NCCL_ERROR_INVALID_ARGUMENT"):
        member.engine.start(steps, None)
    assert member.calls() == [("groupStart",), ("groupEnd",)]
    assert len(member.failures) == 1


def test_without_a_gpu_or_cupy_it_says_what_is_missing(ranks, monkeypatch):
    setup = Setup(
        store=HashStore(),
        rank=0,
        size=1,
        timeout=1,
        device_type="cuda",
        global_ranks=(0,),
        group_name="",
        on_failure=print,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOperationError, match="torch finds no GPU here"):
        NcclEngine(setup)
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", None)
    with pytest.raises(UnsupportedOperationError, match=r"it needs cupy, pip install 'gradwire\[cuda\]'"):
        NcclEngine(setup, gpus=CpuGpus("here"))
    setup.store.close()
