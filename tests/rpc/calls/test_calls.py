"""Calls that go well."""

import contextvars
import ctypes
import operator
import os
import threading

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcTimeoutError

from tests.remote_functions import add, identity, process_id, set_event, wait_for


class Point:
    def __init__(self, x: int, y: int = 0) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None

    @staticmethod
    def origin() -> "Point":
        return Point(0, 0)


def threads_of_operations() -> int:
    """Returns the number of threads that OpenMP gives to an operation on this thread."""
    return ctypes.CDLL(torch._C.__file__).omp_get_max_threads()


def descend(depth: int) -> int:
    """Calls back and forth between two workers; the number of threads at the bottom."""
    if depth == 0:
        return threading.active_count()
    other = 1 - rpc.get_worker_info().id
    return rpc.rpc_sync(other, descend, (depth - 1,))


def descend_async(depth: int) -> int:
    """The same through futures that the executor is not told of."""
    if depth == 0:
        return 0
    other = 1 - rpc.get_worker_info().id
    future = rpc.rpc_async(other, descend_async, (depth - 1,))
    return 1 + torch.futures.collect_all([future]).wait()[0].wait()


def test_functions_run_on_the_other_worker(workers):
    a, b = workers.rpc(2)
    assert a.run(rpc.rpc_sync, "worker1", process_id) == b.pid
    assert a.run(rpc.rpc_sync, "worker0", process_id) == a.pid
    assert b.run(rpc.rpc_sync, "worker0", process_id) == a.pid


def test_destinations_are_names_ids_and_infos(workers):
    a, b = workers.rpc(2)

    def call_all_ways() -> list[int]:
        info = rpc.get_worker_info("worker1")
        assert (info.name, info.id) == ("worker1", 1)
        assert rpc.get_worker_info().name == "worker0"
        return [rpc.rpc_sync(to, process_id) for to in ("worker1", 1, info)]

    assert a.run(call_all_ways) == [b.pid] * 3


def test_arguments_and_results(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
        assert rpc.rpc_sync("worker1", add, args=(1,), kwargs={"b": 2}) == 3
        assert rpc.rpc_sync("worker1", add, [1, 2]) == 3
        assert rpc.rpc_sync("worker1", Point, (3,), {"y": 4}) == Point(3, 4)
        assert rpc.rpc_sync("worker1", Point.origin) == Point(0)
        assert rpc.rpc_sync("worker1", operator.methodcaller("upper"), ("abc",)) == "ABC"
        nested = {"a": [(1, {2}), None], ("k",): b"bytes" * 100_000}
        assert rpc.rpc_sync("worker1", identity, (nested,)) == nested

    a.run(check)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_tensors_of_all_kinds(workers, to):
    a, _ = workers.rpc(2)

    def check() -> None:
        dtypes = [
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        ]
        dtypes += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.uint16]
        for dtype in dtypes:
            for shape in [(), (0,), (3,), (2, 0, 3), (2, 3, 4)]:
                tensor = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
                got = rpc.rpc_sync(to, identity, (tensor,))
                assert got.dtype == dtype
                assert got.shape == tensor.shape
                assert torch.equal(got, tensor)
        matrix = torch.randn(4, 6)
        conjugate = torch.randn(3, dtype=torch.complex64).conj()
        one = torch.ones(()).expand(1)  # as the gradient of a sum; its stride is 0
        for tensor in (matrix.t(), matrix[:, ::2], matrix.expand(2, 4, 6), conjugate, conjugate.imag, one):
            assert torch.equal(rpc.rpc_sync(to, identity, (tensor,)), tensor)
        sparse = torch.eye(5).to_sparse()
        got = rpc.rpc_sync(to, identity, (sparse,))
        assert got.is_sparse
        assert torch.equal(got.to_dense(), torch.eye(5))
        parameter = torch.nn.Parameter(torch.ones(2))
        got = rpc.rpc_sync(to, identity, (parameter,))
        assert isinstance(got, torch.nn.Parameter)
        assert got.requires_grad
        module = torch.nn.Linear(3, 4)
        got = rpc.rpc_sync(to, identity, (module,))
        assert torch.equal(got.weight, module.weight)
        assert isinstance(got.weight, torch.nn.Parameter)

    a.run(check)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("threshold", [1, 1000, 128 * 1024])
def test_large_and_many_tensors(workers, to, threshold):
    channels = rpc.ChannelOptions(inline_threshold=threshold, max_inline_bytes=4 * threshold, chunk_bytes=100_000)
    a, _ = workers.rpc(2, channels=channels)

    def check() -> None:
        tensors = [torch.randn(size) for size in (1, 10, 300, 33_000, 1_000_000)] * 3
        futures = [rpc.rpc_async(to, identity, (tensors,)) for _ in range(4)]
        for future in futures:
            assert all(torch.equal(x, y) for x, y in zip(future.wait(), tensors, strict=True))

    a.run(check)


def test_the_same_tensor_twice_stays_one(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        tensor = torch.ones(3)
        first, second = rpc.rpc_sync("worker1", identity, ([tensor, tensor],))
        assert first is second

    a.run(check)


def test_arguments_are_copies_also_on_this_worker(workers):
    (a,) = workers.rpc(1)

    def check() -> None:
        tensor = torch.zeros(100_000)
        got = rpc.rpc_sync("worker0", identity, (tensor,))
        got.fill_(1)
        assert not tensor.any()

    a.run(check)


def test_futures_are_those_of_torch(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        futures = [rpc.rpc_async("worker1", add, (i, 1)) for i in range(50)]
        assert all(isinstance(future, torch.futures.Future) for future in futures)
        assert [f.wait() for f in torch.futures.collect_all(futures).wait()] == list(range(1, 51))
        assert futures[0].then(lambda f: f.wait() * 10).wait() == 10
        called = threading.Event()
        futures[0].add_done_callback(lambda f: called.set())
        assert called.wait(60)
        assert futures[0].done()
        assert futures[0].value() == 1
        contextvars.ContextVar("any").set(1)  # callbacks run with it
        for take in futures[0].then, futures[0].add_done_callback:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                take(None)

    a.run(check)


def test_calls_run_side_by_side(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        waiting = [rpc.rpc_async("worker1", wait_for, (f"event {i}",)) for i in range(5)]
        for i in range(5):
            rpc.rpc_sync("worker1", set_event, (f"event {i}",))
        assert [f.wait() for f in waiting] == [f"event {i}" for i in range(5)]

    a.run(check)


def test_nested_calls_to_depth_64(workers):
    a, _ = workers.rpc(2, num_worker_threads=4)
    assert a.run(rpc.rpc_sync, "worker1", descend, (64,)) >= 32


def test_nested_calls_through_foreign_futures(workers):
    a, _ = workers.rpc(2, num_worker_threads=2)
    assert a.run(rpc.rpc_sync, "worker1", descend_async, (12,)) == 12


def test_more_waiting_calls_than_threads(workers):
    """Calls that block on something the executor cannot see do not keep others from running."""
    a, _ = workers.rpc(2, num_worker_threads=2)

    def check() -> None:
        waiting = [rpc.rpc_async("worker1", wait_for, ("gate",)) for _ in range(6)]
        rpc.rpc_sync("worker1", set_event, ("gate",))
        assert [f.wait() for f in waiting] == ["gate"] * 6

    a.run(check)


def test_init_again_after_shutdown(workers, tmp_path):
    a, b = workers.rpc(2)
    workers.each([a, b], rpc.shutdown)

    def again(rank: int) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/second")
        rpc.init_rpc(f"again{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        assert rpc.rpc_sync(f"again{1 - rank}", add, (1, 1)) == 2
        rpc.shutdown()

    for pending in [worker.start(again, rank) for rank, worker in enumerate((a, b))]:
        pending.result()


def test_the_number_of_threads_of_operations_holds_in_calls(workers):
    a, b = workers.rpc(2)
    threads = os.cpu_count() + 1  # not what a thread begins with
    b.run(torch.set_num_threads, threads)
    assert a.run(rpc.rpc_sync, "worker1", threads_of_operations) == threads


def test_a_future_says_what_was_asked_of_whom(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        waiting = rpc.rpc_async("worker1", wait_for, ("go",))
        assert repr(waiting) == "Future(rpc_async wait_for on 'worker1', pending)"
        assert rpc.debug_info()["unanswered_calls"] == {"worker1": 1}
        (many,) = rpc.broadcast_call(["worker1"], torch.add, (torch.ones(1), 1))
        many.wait()
        assert repr(many) == "Future(broadcast_call add on 'worker1', done)"
        rpc.rpc_sync("worker1", set_event, ("go",))
        waiting.wait()
        assert repr(waiting) == "Future(rpc_async wait_for on 'worker1', done)"
        timed_out = rpc.rpc_async("worker1", wait_for, ("never",), timeout=0.01)
        with pytest.raises(RpcTimeoutError):
            timed_out.wait()
        assert repr(timed_out) == "Future(rpc_async wait_for on 'worker1', failed: RpcTimeoutError)"
        point = rpc.remote("worker1", Point, (1,))
        method = point.rpc_async().origin()
        method.wait()
        assert repr(method) == "Future(rpc_async origin on 'worker1', done)"
        created = point._get_future()
        created.wait()
        assert repr(created) == "Future(remote Point on 'worker1', done)"
        rpc.rpc_sync("worker1", set_event, ("never",))

    a.run(check)


def test_a_callback_does_not_hold_up_the_thread_that_waits(two_workers):
    """Also at a high rate, at which a thread that is waited for is woken last."""

    def check() -> None:
        for _ in range(100):
            rpc.rpc_sync("worker1", add, (1, 1))
        for number in range(20):
            has_waited, is_over = threading.Event(), threading.Event()

            def callback(_: object, has_waited: threading.Event = has_waited, is_over: threading.Event = is_over):
                assert has_waited.wait(60)
                is_over.set()

            call = rpc.rpc_async("worker1", wait_for, (f"go {number}",))
            torch.futures.collect_all([call]).add_done_callback(callback)
            rpc.rpc_async("worker1", set_event, (f"go {number}",))
            call.wait()
            has_waited.set()
            assert is_over.wait(60)

    two_workers[0].run(check)
