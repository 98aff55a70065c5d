"""Broadcasts to workers that die, hang, refuse payloads, or cannot form a process group."""

import os
import signal
import threading

import pytest
import torch
from gradwire import rpc
from gradwire.c10d.groups import membership as group_membership
from gradwire.errors import RpcCancelledError, RpcTimeoutError, SendFailedError, WorkerLostError
from gradwire.rpc.channels import broadcast, broadcast_group
from gradwire.rpc.contracts.agent import current_agent

from tests import remote_functions
from tests.remote_functions import assert_clean, identity, set_event, wait_for, wait_until
from tests.rpc.channels.broadcasts import (
    BETWEEN_HOSTS,
    LARGE,
    MIB,
    OTHERS,
    bytes_sent,
    each_result,
    group_count,
    ramp,
    total,
)
from tests.rpc.test_fault_injection import faulty
from tests.stopped import has_stopped, stopped


def wait_on(name: str, tensor: torch.Tensor) -> float:
    if rpc.get_worker_info().name == name:
        wait_for("go")
    return total(tensor)


def start_and_keep(names, function, args, timeout=0) -> None:
    remote_functions.kept.extend(rpc.broadcast_call(names, function, args, timeout=timeout))


def result_of(index: int):
    return remote_functions.kept[index].wait()


def test_a_receiver_is_killed_in_the_middle(workers):
    a, b, c, d = workers.rpc(4, transports=BETWEEN_HOSTS)
    tensor_sum = a.run(lambda: total(ramp()))
    a.run(each_result, OTHERS, identity, (1,))
    os.kill(c.pid, signal.SIGSTOP)  # so that the broadcast hangs in the middle
    wait_until(lambda: has_stopped(c.pid))
    a.run(lambda: start_and_keep(OTHERS, total, (ramp(),)))
    c.kill()
    assert a.run(result_of, 0) == tensor_sum
    assert a.run(result_of, 2) == tensor_sum
    with pytest.raises(WorkerLostError, match="'worker2'"):
        a.run(result_of, 1)

    def later() -> None:
        futures = rpc.broadcast_call(OTHERS, total, (ramp(),))
        with pytest.raises(WorkerLostError, match="'worker2'"):
            futures[1].wait()
        assert futures[0].wait() == futures[2].wait() == total(ramp())
        before = bytes_sent()
        assert each_result(["worker1", "worker3"], total, (ramp(),)) == [total(ramp())] * 2
        assert bytes_sent() - before < 4 * LARGE + 10_000
        wait_until(lambda: group_count() == 1)

    a.run(later)
    for receiver in (b, d):
        receiver.run(lambda: wait_until(lambda: group_count() == 1))


def test_the_sender_is_killed_in_the_middle(workers):
    a, b, c, d = workers.rpc(4, transports=BETWEEN_HOSTS)
    a.run(each_result, OTHERS, total, (ramp(),))
    with stopped(c):
        a.run(lambda: start_and_keep(OTHERS, total, (ramp(),)))
        a.kill()
    for worker in (b, c, d):
        worker.run(lambda: wait_until(lambda: group_count() == 0))
    for worker in (b, c):
        other = "worker2" if worker is b else "worker1"
        assert worker.run(each_result, [other, "worker3"], total, (torch.ones(LARGE),)) == [LARGE] * 2


def set_timeouts(seconds: float) -> None:
    """Sets how long this worker waits for the others to form a group, and to take part in a broadcast."""
    group_membership.FORM_TIMEOUT_S = broadcast_group.START_TIMEOUT_S = seconds
    broadcast_group.MIN_BYTES_PER_S = 1 << 40


def test_a_receiver_that_hangs_delays_no_other(workers):
    a, b, c, d = workers.rpc(4, transports=BETWEEN_HOSTS)
    tensor_sum = a.run(lambda: total(ramp()))
    for rounds in range(2):  # first before the group has formed, then after
        remaining = 3 * rounds
        workers.each([a, b, c, d], set_timeouts, 0.3)
        with stopped(c):
            a.run(lambda: start_and_keep(OTHERS, total, (ramp(),)))
            assert a.run(result_of, remaining) == a.run(result_of, remaining + 2) == tensor_sum
            assert not a.run(lambda index: remote_functions.kept[index].done(), remaining + 1)
        assert a.run(result_of, remaining + 1) == tensor_sum
        a.run(retry_forming)
        workers.each([a, b, c, d], set_timeouts, 30.0)  # a busy machine may take a second to form a group
        assert a.run(each_result, OTHERS, total, (torch.ones(LARGE),)) == [LARGE] * 3
        assert a.run(group_count) == 1
    workers.each(workers.all, rpc.shutdown)


def wait_until_no_group_forms() -> None:
    wait_until(lambda: not any("broadcast" in thread.name for thread in threading.enumerate()))


def retry_forming() -> None:
    """Makes a worker try again to form groups that could not be formed, once it knows which these are."""
    wait_until_no_group_forms()
    current_agent()._network.channels.broadcasts._unformable.clear()


def no_engine(_setup: object) -> None:
    raise RuntimeError("there is no memory to share")


@pytest.mark.parametrize("who", [0, 2])
def test_workers_that_cannot_form_a_group(workers, who):
    started = workers.rpc(4, transports=BETWEEN_HOSTS)
    workers.each(started, set_timeouts, 0.3)

    def break_engine() -> None:
        group_membership.best_engine = no_engine

    started[who].run(break_engine)

    def call() -> None:
        tensor = ramp()
        for _ in range(3):
            assert each_result(OTHERS, total, (tensor,)) == [total(tensor)] * 3
        wait_until(lambda: group_count() == 0)
        before = bytes_sent()
        assert each_result(OTHERS, total, (tensor,)) == [total(tensor)] * 3
        assert bytes_sent() - before > 3 * tensor.nbytes

    started[0].run(call)
    for worker in started:
        worker.run(lambda: wait_until(lambda: group_count() == 0))
    workers.each(started, rpc.shutdown)


def test_a_payload_that_one_worker_refuses(workers, tmp_path):
    started = workers(4)

    def join(rank: int) -> None:
        channels = rpc.ChannelOptions(max_payload_bytes=4 * MIB if rank == 2 else 64 * MIB)
        options = rpc.RpcBackendOptions(
            init_method=f"file://{tmp_path}/meet", channels=channels, transports=BETWEEN_HOSTS
        )
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=4, rpc_backend_options=options)

    for pending in [worker.start(join, rank) for rank, worker in enumerate(started)]:
        pending.result()

    def call() -> None:
        for _ in range(2):
            first, second, third = rpc.broadcast_call(OTHERS, total, (ramp(),))
            assert first.wait() == third.wait() == total(ramp())
            with pytest.raises(ValueError, match=f"a payload of {4 * LARGE} bytes is refused"):
                second.wait()
            small = torch.ones(MIB // 2)
            assert each_result(OTHERS, total, (small,)) == [MIB // 2] * 3

    started[0].run(call)


def expire(future: rpc.Future) -> None:
    """Has the time of a call be up."""
    agent = current_agent()
    (identifier,) = [each for each, pending in agent._caller.in_flight.items() if pending.future is future]
    agent._caller.time_out(identifier)


def test_cancelling_and_timing_out_one_of_them(workers):
    a, b, *_ = workers.rpc(4, transports=BETWEEN_HOSTS, num_worker_threads=1)
    with_b = ["worker1", "worker2"]

    def call() -> None:
        blocked = rpc.rpc_async("worker1", wait_for, ("first",))
        one, two = rpc.broadcast_call(with_b, wait_on, ("worker1", ramp()))
        assert two.wait() == total(ramp())
        assert one.cancel()
        with pytest.raises(RpcCancelledError):
            one.wait()
        rpc.rpc_sync("worker1", set_event, ("first",))
        blocked.wait()
        one, two = rpc.broadcast_call(with_b, wait_on, ("worker1", ramp()))
        assert two.wait() == total(ramp())
        expire(one)
        with pytest.raises(RpcTimeoutError, match="'worker1'"):
            one.wait()
        rpc.rpc_sync("worker1", set_event, ("go",))
        assert each_result(with_b, wait_on, ("worker1", ramp())) == [total(ramp())] * 2
        assert group_count() == 1

    a.run(call)
    b.run(assert_clean)
    workers.each(workers.all, rpc.shutdown)


def test_a_message_that_is_not_sent_fails_its_call_only(workers):
    started = faulty(workers, 4, messages_to_fail=["CALL"], num_fail_sends=1, transports=BETWEEN_HOSTS)

    def call() -> None:
        first, *others = rpc.broadcast_call(OTHERS, total, (ramp(),))
        with pytest.raises(SendFailedError, match="'worker1'"):
            first.wait()
        assert [future.wait() for future in others] == [total(ramp())] * 2
        before = bytes_sent()
        assert each_result(OTHERS, total, (ramp(),)) == [total(ramp())] * 3
        assert bytes_sent() - before < 4 * LARGE + 10_000

    started[0].run(call)


def test_a_group_forms_again_after_a_message_was_not_sent(workers):
    """Its members could not join it, since one of them was not told of it."""
    started = faulty(workers, 4, messages_to_fail=["CALL"], num_fail_sends=1, transports=BETWEEN_HOSTS)
    started[0].run(set_timeouts, 0.3)

    def call() -> None:
        first, *others = rpc.broadcast_call(OTHERS, total, (ramp(),))
        with pytest.raises(SendFailedError, match="'worker1'"):
            first.wait()
        assert [future.wait() for future in others] == [total(ramp())] * 2
        wait_until_no_group_forms()
        set_timeouts(30.0)
        before = bytes_sent()
        assert each_result(OTHERS, total, (ramp(),)) == [total(ramp())] * 3
        assert bytes_sent() - before < 4 * LARGE + 10_000

    started[0].run(call)


def test_a_worker_outside_the_group_receives_chunks(workers):
    """A worker joins no group that it is not a member of, nor too many groups."""
    a, b, c = workers.rpc(3, transports=BETWEEN_HOSTS)

    def join_no_groups() -> None:
        broadcast.MAX_RECEIVING_GROUPS = 0

    b.run(join_no_groups)
    workers.each([a, b, c], set_timeouts, 0.3)
    assert a.run(each_result, ["worker1", "worker2"], total, (torch.ones(LARGE),)) == [LARGE] * 2
