"""What a function returns of its arguments goes back in their segments, unless something else refers to them."""

import gc
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import AnswerFailedError, SendFailedError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.base import SegmentLimit
from gradwire.rpc.channels.segments import MAX_SEGMENTS, MappedSegments, Segment, SegmentPool

from tests.remote_functions import identity, wait_until
from tests.rpc.channels.segments import (
    MIB,
    kept,
    kept_sums,
    network,
    release_kept,
    segments_in_use,
    used_bytes,
    write_to_all,
)

FIRST = MIB // 2
"""Elements of a part that is large enough for a segment."""


@pytest.fixture
def pair(two_workers):
    """Two workers, of which the first has called the second: so there is a socket."""
    two_workers[0].run(rpc.rpc_sync, "worker1", os.getpid)
    return two_workers


def call(function: Callable[..., Any], number: float = 1.0) -> Any:
    return rpc.rpc_sync("worker1", function, (torch.full((MIB,), number),))


def first_part(x: torch.Tensor) -> torch.Tensor:
    return x[:FIRST]


def as_columns(x: torch.Tensor) -> torch.Tensor:
    return x.view(4, -1).t()


def in_a_dict(x: torch.Tensor) -> dict[str, Any]:
    return {"x": x, "more": [torch.ones(3), 5]}


def as_integers(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def twice(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, x]


def with_a_part(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, x[:100_000]]


@pytest.mark.parametrize(
    "function", [identity, torch.neg_, first_part, as_columns, in_a_dict, as_integers, twice, with_a_part]
)
def test_what_a_function_returns_of_its_arguments_is_not_copied(pair, function):
    def check():
        for number in range(5):
            x = torch.full((MIB,), float(number))
            expected = function(x.clone())
            received = rpc.rpc_sync("worker1", function, (x,))
            torch.testing.assert_close(received, expected, rtol=0, atol=0)
            assert torch.equal(x, torch.full((MIB,), float(number)))

    a, b = pair
    a.run(check)
    assert b.run(used_bytes) == 0


def small_part(x: torch.Tensor) -> torch.Tensor:
    return x[:100_000]


@rpc.functions.async_execution
def later(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(x)
    return future


@pytest.mark.parametrize(("function", "elements"), [(small_part, 100_000), (later, MIB)])
def test_a_small_part_and_what_a_future_keeps_are_copied(pair, function, elements):
    """A small part would keep all of its segment in use, at the expense of the caller."""

    def check():
        received = [call(function, float(number)) for number in range(4)]
        assert [float(each.sum()) for each in received] == [number * elements for number in range(4)]
        assert used_bytes() <= 2 * 4 * MIB

    a, b = pair
    a.run(check)
    assert b.run(used_bytes) > 0


def keep_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    kept.extend(tensors)
    return tensors


def fetch_many() -> None:
    sent = [torch.full((MIB // 64,), float(number)) for number in range(300)]
    kept.extend(rpc.rpc_sync("worker1", keep_all, (sent,)))


def test_many_tensors_that_the_function_keeps_are_copied(pair):
    a, b = pair
    a.run(fetch_many)
    b.run(write_to_all)
    assert a.run(kept_sums) == [float(number * (MIB // 64)) for number in range(300)]
    assert b.run(kept_sums) == [float((number + 1) * (MIB // 64)) for number in range(300)]
    for worker in pair:
        worker.run(release_kept)
    for worker in pair:
        worker.run(wait_until, lambda: gc.collect() >= 0 and segments_in_use() == (0, 0))


def keep_it(x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return x


def keep_a_view(x: torch.Tensor) -> torch.Tensor:
    kept.append(x[5:10])
    return x


def keep_the_other(x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return x[:FIRST]


def keep_an_array(x: torch.Tensor) -> torch.Tensor:
    kept.append(x.numpy())
    return x


def keep_the_memory(x: torch.Tensor) -> torch.Tensor:
    kept.append(x.untyped_storage())
    return x


def keep_for_backward(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(MIB, requires_grad=True)
    kept.append((weight * x, weight))
    return x


def keep_in_a_cycle(x: torch.Tensor) -> torch.Tensor:
    cycle = [x]
    cycle.append(cycle)
    return x


def first_of_kept() -> float:
    value = kept[-1]
    if isinstance(value, tuple):
        product, weight = value
        product.sum().backward()
        value = weight.grad
    if isinstance(value, torch.UntypedStorage):
        value = torch.empty(0).set_(value)
    return float(value[0])


@pytest.mark.parametrize(
    "function", [keep_it, keep_a_view, keep_the_other, keep_an_array, keep_the_memory, keep_for_backward]
)
def test_what_the_function_keeps_is_copied(pair, function):
    """So nobody sees what the other one writes."""

    def check():
        received = call(function, 7.0)
        received.zero_()
        assert rpc.rpc_sync("worker1", first_of_kept) == 7.0
        rpc.rpc_sync("worker1", release_kept)

    a, b = pair
    a.run(check)
    assert b.run(used_bytes) > 0


def test_what_the_garbage_collector_will_free_is_copied(pair):
    def check():
        gc.disable()  # here and, by the next line, there
        rpc.rpc_sync("worker1", gc.disable)
        received = [call(keep_in_a_cycle, float(number)) for number in range(3)]
        rpc.rpc_sync("worker1", gc.collect)
        assert [float(each.sum()) for each in received] == [0.0, MIB, 2 * MIB]

    a, b = pair
    a.run(check)
    assert b.run(used_bytes) > 0


def fetch_and_write() -> None:
    for number in range(10):
        kept.append(call(identity, float(number)))
    write_to_all()
    copies = [call(torch.clone, float(number))[:10] for number in range(10)]
    assert kept_sums() == [(number + 1) * MIB for number in range(10)]
    assert [float(each.sum()) for each in copies] == [10.0 * number for number in range(10)]
    release_kept(4)
    for _ in range(10):
        call(identity)
    assert used_bytes() <= 12 * 4 * MIB


def test_what_came_back_is_ordinary_memory(pair):
    """It is written to, kept while others come, and outlives the worker that returned it."""
    a, b = pair
    a.run(fetch_and_write)
    b.kill()
    a.run(wait_until, lambda: used_bytes() == 0)
    a.run(write_to_all)
    assert a.run(kept_sums) == [(number + 2) * MIB for number in range(4)]
    a.run(release_kept)


def keep_after_shutdown() -> None:
    kept.append(call(identity, 3.0))
    rpc.shutdown()
    write_to_all()
    assert kept_sums() == [4.0 * MIB]
    release_kept()


def test_the_last_reference_may_go_after_shutdown(pair):
    a, b = pair
    ended = b.start(rpc.shutdown)
    a.run(keep_after_shutdown)
    ended.result()


def forked_child_keeps_what_came_back() -> float:
    kept.append(call(identity, 2.0))
    go, told = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(go[0], 1)
        os.write(told[1], struct.pack("<d", kept[0][:100].sum()))  # OpenMP would not run after a fork
        os._exit(0)
    release_kept()
    for number in range(5):  # which would be in the same memory
        call(identity, float(number))
    os.write(go[1], b"x")
    (found,) = struct.unpack("<d", os.read(told[0], 8))
    os.waitpid(child, 0)
    return float(found)


def test_a_forked_child_keeps_what_came_back(pair):
    assert pair[0].run(forked_child_keeps_what_came_back) == 200.0


def fork_child_and_return(x: torch.Tensor) -> torch.Tensor:
    """Returns its argument, which a child has as well."""
    told = os.pipe()
    child = os.fork()
    if not child:
        os.read(told[0], 1)
        os._exit(0 if bool((x[:100] == 2.0).all()) else 1)
    kept.append((child, told[1]))
    return x


def child_is_well() -> bool:
    child, told = kept.pop()
    os.write(told, b"x")
    return os.waitpid(child, 0)[1] == 0


def test_a_child_of_the_function_keeps_its_argument(pair):
    def check():
        call(fork_child_and_return, 2.0).zero_()
        assert rpc.rpc_sync("worker1", child_is_well)

    pair[0].run(check)


def test_threads_that_return_the_same_tensor_send_copies(pair):
    def check():
        futures = [rpc.rpc_async("worker1", share, (torch.full((MIB,), float(n)),)) for n in range(20)]
        received = [future.wait() for future in futures]
        for number, tensor in enumerate(received):
            tensor.fill_(float(number))
        assert [float(tensor[-1]) for tensor in received] == [float(number) for number in range(20)]

    a, b = pair
    a.run(check)
    b.run(release_kept)
    for worker in pair:
        worker.run(wait_until, lambda: gc.collect() >= 0 and segments_in_use() == (0, 0))


_sharing = threading.Lock()


def share(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of the last call, or its own."""
    with _sharing:
        kept.append(x)
        return kept.pop(0) if len(kept) > 2 else kept[0]


def refuse_what_returns() -> None:
    """Has answers refused whose tensor goes back in its segment."""
    transport: Any = network().peers.by_id[0].transport
    send = transport.send

    def send_others(envelope: bytes, attached: Sequence[memoryview] = ()) -> int:
        if any(tensor.data.segment.sent_back for tensor in agent_pb2.Envelope.FromString(envelope).tensors):
            raise SendFailedError("worker0", "on purpose")
        return send(envelope, attached)

    transport.send = send_others


def send_and_fail() -> None:
    for _ in range(3):
        with pytest.raises(AnswerFailedError, match="on purpose"):
            call(identity)
    assert used_bytes() <= 2 * 4 * MIB


def test_nothing_is_left_of_an_answer_that_is_not_sent(pair):
    a, b = pair
    b.run(refuse_what_returns)
    a.run(send_and_fail)
    for worker in pair:
        worker.run(wait_until, lambda: segments_in_use() == (0, 0))


def test_only_the_receiver_gives_a_segment_back_and_once():
    pool = SegmentPool(SegmentLimit(1 << 20, MAX_SEGMENTS), ["receiver"])
    segment, _ = pool.put(memoryview(b"some bytes"))
    size = segment.size
    for number, nbytes in ((segment.number + 1, size), (segment.number, 0), (segment.number, size // 4 - 1)):
        assert pool.use("receiver", number, nbytes) is None
    assert pool.use("receiver", segment.number, size + 1) is None
    assert pool.use("another one", segment.number, size) is None
    used = pool.use("receiver", segment.number, size // 4)
    assert pool.use("receiver", segment.number, size) is None
    pool.take_back("receiver", [segment.number])
    other, _ = pool.put(memoryview(b"others"))
    assert other is not segment
    assert used[:4] == b"some"
    del used
    assert pool.put(memoryview(b"others")) == (segment, False)
    for each in (segment, other):
        os.close(each.descriptor)


def test_a_segment_goes_back_once():
    mapped = MappedSegments(1 << 20, lambda: None)
    segment = Segment(1, 1 << 17, memoryview(b"some bytes"))
    mapped.add(1, 1 << 17, segment.descriptor)
    os.close(segment.descriptor)
    address = mapped._maps[1].address
    assert mapped.begin_send_back(address, 1 << 16) is None  # not in use
    buffer = mapped.use(1, 10)
    assert mapped.begin_send_back(address + 1, 1 << 16) is None
    assert mapped.begin_send_back(address, (1 << 17) + 1) is None
    assert mapped.begin_send_back(address, (1 << 15) - 1) is None
    assert mapped.begin_send_back(address, 1 << 15) == 1
    assert mapped.begin_send_back(address, 1 << 16) is None  # for another message
    assert bytes(mapped.end_send_back(1)[:4]) == b"some"
    assert mapped.begin_send_back(address, 1 << 16) == 1
    del buffer
    assert mapped.end_send_back(1) is None
    assert not mapped.released
    buffer = mapped.use(1, 10)  # it has come again
    del buffer
    assert list(mapped.released) == [1]
