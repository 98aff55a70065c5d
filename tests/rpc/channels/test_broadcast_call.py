"""One call on several workers, whose large tensors are broadcast."""

import os
import threading
import zlib

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import SerializationError, UnknownWorkerError
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import add, assert_clean, identity, wait_until
from tests.rpc.channels.broadcasts import (
    BETWEEN_HOSTS,
    LARGE,
    MIB,
    ONE_HOST,
    OTHERS,
    bytes_sent,
    each_result,
    group_count,
    ramp,
    total,
)
from tests.workers import Workers


@pytest.fixture(params=[BETWEEN_HOSTS, ONE_HOST], ids=["process group", "shared memory"])
def transports(request):
    return request.param


def raise_on(name: str, tensor: torch.Tensor) -> float:
    if rpc.get_worker_info().name == name:
        raise KeyError(name)
    return total(tensor)


def change_first(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    first.zero_()
    return total(first), total(second)


def name_and_sum(rref: rpc.RRef, tensor: torch.Tensor) -> float:
    return float(rref.to_here()) + total(tensor)


def describe(value):
    """Returns what a worker has received."""
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.is_sparse else value
        # No sum, whose rounding depends on the number of threads, which may differ between threads of a worker.
        elements = dense.detach().resolve_conj().contiguous().view(torch.uint8).numpy()
        checksum = zlib.crc32(elements)
        return type(value).__name__, value.dtype, value.shape, value.is_sparse, value.requires_grad, checksum
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    return value


def make_values() -> dict:
    whole = torch.randn(512, 512)
    return {
        "dense": whole,
        "again": whole,
        "view": whole[256:],
        "transposed": whole.t(),
        "with gaps": torch.randn(512, 512, 8)[..., 0],
        "expanded": torch.randn(512, 1).expand(512, 512),
        "conjugate": torch.randn(256, 512, dtype=torch.complex64).conj(),
        "half": whole.bfloat16(),
        "sparse": torch.randn(512, 300).to_sparse(),
        "leaf": torch.randn(512, 512, requires_grad=True),
        "strided leaf": torch.randn(512, 512, 8)[..., 0].requires_grad_(),
        "parameter": torch.nn.Parameter(torch.randn(512, 512)),
        "empty": torch.empty(0, 7),
        "small": torch.ones(3),
        "array": torch.randn(512 * 512).numpy(),
        "text": "x" * MIB,
    }


def describe_all(**values):
    values["array"] = torch.from_numpy(values["array"].copy())
    return describe(values)


def test_results_are_those_of_rpc_async(workers, transports):
    a, *_ = workers.rpc(4, transports=transports, broadcasts=rpc.BroadcastOptions(threshold=256 * 1024))
    a.run(each_result, OTHERS, os.getpid)  # connects them

    def compare() -> None:
        values = make_values()
        names = [*OTHERS, "worker0"]
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                broadcasts = each_result(names, describe_all, (), values)
                one_by_one = [rpc.rpc_async(name, describe_all, (), values).wait() for name in names]
                assert broadcasts == one_by_one
        assert group_count() == (transports == BETWEEN_HOSTS)

    a.run(compare)
    workers.each(workers.all, rpc.shutdown)


def test_workers_can_be_named_in_every_way_and_must_be_right(workers):
    a, *_ = workers.rpc(3, transports=BETWEEN_HOSTS)

    def call() -> None:
        names = ["worker2", 0, rpc.get_worker_info("worker1")]
        assert each_result(names, rpc.get_worker_info) == [rpc.get_worker_info(name) for name in (2, 0, 1)]
        assert each_result([], add, (1, 2)) == []
        assert each_result(["worker1", "worker2"], add, (1, torch.ones(2)))[1].tolist() == [2, 2]
        assert group_count() == 0
        before = rpc.debug_info()["messages_sent"]
        large = ramp()
        with pytest.raises(ValueError, match="'worker1' is named more than once"):
            rpc.broadcast_call(["worker1", 1], total, (large,))
        with pytest.raises(UnknownWorkerError, match="nobody"):
            rpc.broadcast_call(["worker1", "nobody"], total, (large,))
        with pytest.raises(TypeError, match="give a list of workers"):
            rpc.broadcast_call("worker1", total, (large,))
        with pytest.raises(SerializationError, match="args"):
            rpc.broadcast_call(["worker1", "worker2"], total, (large, lambda: 0))
        with pytest.raises(ValueError, match="timeout"):
            rpc.broadcast_call(["worker1", "worker2"], total, (large,), timeout=-2)
        assert rpc.debug_info()["messages_sent"] == before

    a.run(call)


def test_each_worker_fails_for_itself(workers, transports):
    a, *_ = workers.rpc(4, transports=transports)
    a.run(each_result, OTHERS, os.getpid)  # connects them

    def call() -> None:
        tensor = ramp()
        first, second, third = rpc.broadcast_call(OTHERS, raise_on, ("worker2", tensor))
        assert first.wait() == third.wait() == total(tensor)
        with pytest.raises(KeyError, match="worker2"):
            second.wait()

    a.run(call)


def test_tensors_that_share_memory_share_it_at_each_receiver(workers, transports):
    a, *_ = workers.rpc(3, transports=transports)
    a.run(each_result, OTHERS[:2], os.getpid)  # connects them

    def call() -> None:
        tensor = ramp()
        args = (tensor, tensor.view(-1))
        assert each_result(["worker0", "worker1", "worker2"], change_first, args) == [(0.0, 0.0)] * 3
        assert tensor.sum() > 0

    a.run(call)


def named_segments(workers: Workers) -> list[str]:
    """Shared memory of these workers that has a name. Other files come and go with tests beside this one."""
    of_torch = tuple(f"torch_{worker.pid}_" for worker in workers.all)
    return [name for name in os.listdir("/dev/shm") if "gradwire" in name or name.startswith(of_torch)]


def test_a_large_tensor_leaves_its_worker_once(workers):
    a, b, c, d = workers.rpc(4, transports=BETWEEN_HOSTS)

    def call() -> None:
        tensor = ramp(4 * MIB)  # 16 MiB
        for _ in range(3):
            start = bytes_sent()
            assert each_result(OTHERS, total, (tensor,)) == [total(tensor)] * 3
            assert 16 * MIB < bytes_sent() - start < 16 * MIB + 10_000
        assert group_count() == 1
        start = bytes_sent()
        [future.wait() for future in [rpc.rpc_async(name, total, (tensor,)) for name in OTHERS]]
        assert bytes_sent() - start > 48 * MIB

    a.run(call)
    for receiver in (b, c, d):
        received = receiver.run(rpc.debug_info)
        assert received["bytes_received"] > 64 * MIB
        assert received["broadcast_groups"] == 1
    workers.each(workers.all, rpc.shutdown)
    for worker in workers.all:
        worker.run(wait_until, lambda: not any("broadcast" in thread.name for thread in threading.enumerate()))
    assert not named_segments(workers)


def scaled(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * (weight + rpc.get_worker_info().id)).sum(dim=0)


def test_gradients_from_all_workers_add_up(workers, transports):
    a, *_ = workers.rpc(4, transports=transports)

    def train() -> None:
        leaf = torch.randn(256, 1024, dtype=torch.float64).requires_grad_()
        strided = torch.randn(512, 512, 8, dtype=torch.float64)[..., 0].requires_grad_()
        parameter = torch.nn.Parameter(torch.randn(256, 1024, dtype=torch.float64))
        weight = torch.randn(1024, dtype=torch.float64, requires_grad=True)
        leaves = [leaf, strided, parameter, weight]
        with autograd.context() as context:
            loss = torch.zeros((), dtype=torch.float64)
            for tensor, factor in ((leaf * 2, weight), (strided, weight[:512]), (parameter, weight)):
                for result in each_result(OTHERS, scaled, (factor, tensor)):
                    loss = loss + result.square().sum()
            autograd.backward(context, [loss])
            found = autograd.get_gradients(context)
            assert group_count() == (transports == BETWEEN_HOSTS)
        loss = torch.zeros((), dtype=torch.float64)
        for tensor, factor in ((leaf * 2, weight), (strided, weight[:512]), (parameter, weight)):
            for identifier in (1, 2, 3):
                loss = loss + (tensor * (factor + identifier)).sum(dim=0).square().sum()
        for tensor, wanted in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(found[tensor], wanted)

    a.run(train)


def test_references_are_forked_for_each_worker(workers, transports):
    a, *_ = workers.rpc(4, transports=transports)
    a.run(each_result, OTHERS, os.getpid)  # connects them

    def call() -> None:
        mine, other = rpc.RRef(5), rpc.remote("worker1", identity, (7,))
        tensor = ramp()
        assert each_result(OTHERS, name_and_sum, (mine, tensor)) == [5 + total(tensor)] * 3
        assert each_result(OTHERS, name_and_sum, (other, tensor)) == [7 + total(tensor)] * 3

    a.run(call)
    for worker in workers.all:
        worker.run(assert_clean)


def broadcast_to_others(rounds: int) -> None:
    me = rpc.get_worker_info()
    others = [worker for worker in current_agent().workers() if worker != me]
    for number in range(rounds):
        tensor = torch.full((LARGE // 4,), float(me.id + number))
        for future in rpc.broadcast_call(others, total, (tensor,)):
            assert future.wait() == total(tensor)


def test_all_workers_broadcast_at_once(workers, transports):
    started = workers.rpc(3, transports=transports)

    def several_threads() -> None:
        threads = [threading.Thread(target=broadcast_to_others, args=(5,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rpc.barrier()  # the others may have begun later
        assert group_count() == (3 if transports == BETWEEN_HOSTS else 0)

    workers.each(started, several_threads)
    workers.each(started, rpc.shutdown)


def test_least_recently_used_groups_end(workers):
    a, b, *_ = workers.rpc(4, transports=BETWEEN_HOSTS, broadcasts=rpc.BroadcastOptions(max_groups=1))

    def call() -> None:
        for _ in range(3):
            for names in (OTHERS, OTHERS[1:], OTHERS[:2]):
                assert each_result(names, total, (ramp(),)) == [total(ramp())] * len(names)
                assert group_count() == 1

    a.run(call)
    b.run(lambda: wait_until(lambda: group_count() == 1))
    for worker in workers.all:
        worker.run(assert_clean)


def test_where_nothing_is_broadcast(workers, tmp_path):
    a, *_ = workers.rpc(3, transports=BETWEEN_HOSTS, broadcasts=rpc.BroadcastOptions(enabled=False))
    others = ["worker1", "worker2"]
    a.run(each_result, others, total, (ramp(),))
    assert a.run(group_count) == 0
    workers.each(workers.all, rpc.shutdown)

    def join(name: str, **options) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/dynamic", **options)
        rpc.init_rpc(name, rpc_backend_options=options)

    for worker in workers.all:
        worker.run(join, worker.name)
    assert a.run(each_result, others, total, (ramp(),)) == [a.run(total, ramp())] * 2
    assert a.run(group_count) == 0


def test_options():
    assert rpc.RpcBackendOptions().broadcasts == rpc.BroadcastOptions(enabled=True, threshold=MIB, max_groups=8)
    for wrong in ({"threshold": 0}, {"threshold": 1.5}, {"max_groups": 0}, {"max_groups": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rpc.BroadcastOptions(**wrong)
    with pytest.raises(TypeError, match="enabled"):
        rpc.BroadcastOptions(enabled="yes")
    with pytest.raises(TypeError, match="unexpected"):
        rpc.BroadcastOptions(always=True)
    with pytest.raises(TypeError, match="broadcasts"):
        rpc.RpcBackendOptions(broadcasts=True)
