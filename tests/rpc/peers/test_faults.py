"""Workers that die."""

import atexit
import contextlib
import os
import signal
import socket

import psutil
import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.engine import PassCoordinator
from gradwire.errors import (
    AnswerFailedError,
    RendezvousError,
    RpcTimeoutError,
    WorkerLostError,
    WorkerSuspectError,
)

from tests import remote_functions
from tests.remote_functions import (
    add,
    assert_clean,
    identity,
    keep,
    multiply,
    set_event,
    wait_for,
    wait_until,
)


def test_pending_and_later_calls_fail_at_once(workers):
    a, b, c = workers.rpc(3, rpc_timeout=0)  # without a timeout only the loss can end the calls

    def start_calls() -> None:
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        for _ in range(3):
            remote_functions.keep(rpc.rpc_async("worker1", wait_for, ("never",)))

    a.run(start_calls)
    b.kill()

    def check() -> None:
        assert len(remote_functions.kept) == 3
        for future in remote_functions.kept:
            with pytest.raises(WorkerLostError, match="'worker1' is lost") as caught:
                future.wait()
            assert caught.value.worker == "worker1"
        for call in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(WorkerLostError, match="'worker1'"):
                result = call("worker1", add, (1, 1))
                result.wait()
        with pytest.raises(WorkerLostError, match="'worker1'"):
            rpc.remote("worker1", add, (1, 1)).to_here()
        assert "worker1" in rpc.debug_info()["lost_workers"]
        assert rpc.rpc_sync("worker2", add, (1, 1)) == 2

    a.run(check)
    assert c.run(rpc.rpc_sync, "worker0", add, (1, 1)) == 2


def test_a_worker_that_was_never_called_before(workers):
    a, b = workers.rpc(2, rpc_timeout=0)
    b.kill()
    with pytest.raises(WorkerLostError, match="cannot be reached"):
        a.run(rpc.rpc_sync, "worker1", add, (1, 1))


def test_a_worker_that_dies_within_a_large_transfer(workers):
    a, b = workers.rpc(2, rpc_timeout=0)

    def start() -> None:
        rpc.rpc_sync("worker1", add, (1, 1))
        os.kill(b_pid, signal.SIGSTOP)
        remote_functions.keep(rpc.rpc_async("worker1", identity, (torch.zeros(64 << 20, dtype=torch.uint8),)))

    b_pid = b.pid
    a.run(start)
    b.kill()

    def check() -> None:
        with pytest.raises(WorkerLostError):
            remote_functions.kept[-1].wait()

    a.run(check)


def test_a_transfer_connection_that_breaks_alone(workers):
    """Large payloads cannot be sent any more, so the workers connect again; nothing waits for ever."""
    a, _ = workers.rpc(2, rpc_timeout=0, transports=("grpc",))

    def connections() -> set[int]:
        return {c.fd for c in psutil.Process().net_connections("unix") if c.type == socket.SOCK_STREAM}

    def check() -> None:
        large = torch.zeros(1 << 20)
        rpc.rpc_sync("worker1", add, (1, 1))
        before = connections()
        rpc.rpc_sync("worker1", add, (large, 1))
        for fd in connections() - before:
            socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)
        with pytest.raises((WorkerSuspectError, AnswerFailedError)):
            for _ in range(100):
                rpc.rpc_sync("worker1", add, (large, 1))
        wait_until(lambda: rpc.debug_info()["links"]["worker1"]["state"] == "connected")
        assert rpc.rpc_sync("worker1", add, (large, 1)).numel() == 1 << 20

    a.run(check)


def refuse_large() -> rpc.ChannelOptions:
    return rpc.ChannelOptions(max_payload_bytes=1 << 20)


def test_a_refused_payload_harms_nobody(workers):
    a, _ = workers.rpc(2, channels=refuse_large())

    def check() -> None:
        rref = rpc.RRef(1)
        fits = torch.zeros(512 << 10, dtype=torch.uint8)
        with pytest.raises(ValueError, match="max_payload_bytes is 1048576"):
            rpc.rpc_sync("worker1", identity, ((rref, fits, torch.zeros(2 << 20, dtype=torch.uint8), fits),))
        with pytest.raises(ValueError, match="max_payload_bytes"):
            rpc.remote("worker1", identity, (torch.zeros(2 << 20, dtype=torch.uint8),)).to_here()
        assert rpc.rpc_sync("worker1", identity, (fits,)).numel() == fits.numel()
        del rref
        assert_clean()

    a.run(check)


def test_a_result_that_is_refused(workers):
    a, _ = workers.rpc(2, channels=refuse_large())

    def check() -> None:
        with pytest.raises(ValueError, match="max_payload_bytes"):
            rpc.rpc_sync("worker1", torch.zeros, (1 << 20,))
        assert rpc.rpc_sync("worker1", torch.zeros, (1 << 17,)).numel() == 1 << 17
        assert_clean()

    a.run(check)


def test_a_forked_child_leaves_its_parents_agent_alone(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        child = os.fork()
        if child == 0:
            try:
                atexit._run_exitfuncs()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2

    a.run(check)


def test_init_can_be_tried_again(workers, tmp_path):
    a, b = workers(2)

    def join(rank: int, seconds: float) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/again", init_timeout=seconds)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    with pytest.raises(RendezvousError, match="did not join"):
        a.run(join, 0, 0.2)
    pending = [a.start(join, 0, 30), b.start(join, 1, 30)]
    for p in pending:
        p.result()
    assert b.run(rpc.rpc_sync, "worker0", add, (1, 1)) == 2


def test_graceful_shutdown_does_not_wait_for_the_dead(workers):
    a, b, c = workers.rpc(3)
    b.kill()
    workers.each([a, c], rpc.shutdown)


@pytest.mark.parametrize("victim", [0, 2])
def test_graceful_shutdown_when_a_worker_dies_meanwhile(workers, victim):
    """This includes the worker that the others report to."""
    started = workers.rpc(3)
    others = [w for w in started if w is not started[victim]]
    pending = [w.start(rpc.shutdown) for w in others]
    started[victim].kill()
    for p in pending:
        p.result()


def test_graceful_shutdown_has_a_timeout(workers):
    a, b = workers.rpc(2)

    def leave_early() -> None:
        with pytest.raises(RpcTimeoutError):
            rpc.shutdown(timeout=0.2)
        assert not rpc.is_initialized()

    a.run(leave_early)
    with pytest.raises(WorkerLostError, match="has shut down"):
        b.run(rpc.rpc_sync, "worker0", add, (1, 1))


def test_shutdown_waits_for_calls_that_are_under_way(workers):
    a, b = workers.rpc(2)

    def call_and_leave() -> str:
        future = rpc.rpc_async("worker1", wait_for, ("release",))
        rpc.rpc_async("worker1", set_event, ("release",))
        rpc.shutdown()
        return future.value()

    pending = b.start(rpc.shutdown)
    assert a.run(call_and_leave) == "release"
    pending.result()


def test_references_to_and_from_a_dead_worker(workers):
    a, b, c = workers.rpc(3)

    def share() -> None:
        mine = rpc.RRef(torch.ones(3))
        assert rpc.rpc_sync("worker1", keep, (mine,)) == 1
        theirs = rpc.remote("worker1", add, (1, 2))
        assert theirs.to_here() == 3
        remote_functions.keep(theirs)
        assert rpc.debug_info()["num_owner_rrefs"] == 1

    a.run(share)
    c.run(lambda: remote_functions.keep(rpc.remote("worker1", add, (1, 2))))
    b.kill()

    def check() -> None:
        with pytest.raises(WorkerLostError, match="'worker1'"):
            remote_functions.kept[0].to_here()
        wait_until(lambda: rpc.debug_info()["num_owner_rrefs"] == 0)
        remote_functions.kept.clear()
        assert_clean()

    a.run(check)


def test_backward_when_a_worker_dies(workers):
    a, b, _ = workers.rpc(3, rpc_timeout=0)

    def forward_and_lose() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync("worker1", multiply, (x, x)) * rpc.rpc_sync("worker2", multiply, (x, x))).sum()
            os.kill(b_pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="'worker1'"):
                autograd.backward(context_id, [loss])
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker2", multiply, (x, x)).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)
        assert_clean()

    b_pid = b.pid
    a.run(forward_and_lose)


def test_backward_when_gradients_are_lost_with_their_sender(workers):
    """The third worker has done its part, but dies before its gradients reach the second."""
    a, b, c = workers.rpc(3, rpc_timeout=0)

    def lose_gradients() -> None:
        def send(self: BackwardPass, *_: object) -> None:
            """They never arrive."""

        BackwardPass.send_gradients = send

    def die_when_done() -> None:
        original = PassCoordinator._part_done

        def part_done(self: PassCoordinator, worker: int, part: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # the second part is over too
                os.kill(victim, signal.SIGKILL)
            original(self, worker, part)

        PassCoordinator._part_done = part_done

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", via_worker2, (x,))
            with pytest.raises(WorkerLostError, match="'worker2'"):
                autograd.backward(context_id, [loss])

    victim = c.pid
    c.run(lose_gradients)
    a.run(die_when_done)
    a.run(check)
    assert b.run(rpc.rpc_sync, "worker0", add, (1, 1)) == 2


def via_worker2(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", torch.sum, (x * 2,))


def test_contexts_of_a_dead_worker_end(workers):
    a, b = workers.rpc(2)

    def open_a_context() -> None:
        with autograd.context():
            rpc.rpc_sync("worker1", multiply, (torch.ones(2, requires_grad=True), torch.ones(2)))
            assert rpc.rpc_sync("worker1", rpc.debug_info)["num_autograd_contexts"] == 1
            os.kill(os.getpid(), signal.SIGKILL)

    a.start(open_a_context)
    b.run(wait_until_clean_of_contexts)


def wait_until_clean_of_contexts() -> None:
    wait_until(lambda: rpc.debug_info()["lost_workers"])
    assert_clean()
