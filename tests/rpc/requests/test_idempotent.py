"""Idempotent calls are sent again when their connection fails; all others run at most once."""

import asyncio
import os
import secrets
import signal
import threading
from pathlib import Path

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.c10d import Credentials, TCPStore
from gradwire.errors import NotInitializedError, Outcome, RpcCancelledError, RpcTimeoutError, WorkerLostError

from tests import remote_functions
from tests.remote_functions import add, assert_clean, keep, multiply, set_event, wait_for, wait_until
from tests.rpc.peers import links
from tests.stopped import stopped


def join(name: str, url: str, **options) -> None:
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(init_method=url, **options))


@pytest.fixture
def join_one(workers, tmp_path):
    """Starts a worker that joins a dynamic group."""
    url = f"file://{tmp_path / 'dynamic'}"

    def start(name, **options):
        (worker,) = workers(1)
        worker.run(join, name, url, **options)
        return worker

    return start


def note_run(path: str) -> int:
    """Notes in a file that it has run in this process; returns the process id."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return os.getpid()


def note_run_and_die(path: str) -> int:
    """Notes that it has run, and is killed before it can answer, the first time."""
    pid = note_run(path)
    if len(Path(path).read_text().splitlines()) == 1:
        os.kill(pid, signal.SIGKILL)
    return pid


def note_run_and_wait(path: str) -> int:
    pid = note_run(path)
    wait_for("seen twice")
    return pid


def note_run_and_raise(path: str) -> None:
    note_run(path)
    raise WorkerLostError("somebody", "as if a nested call had failed")


def runs(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def start_call(path: str, *, idempotent: bool, timeout: float = 60.0) -> None:
    rpc.rpc_sync("b", add, (1, 1))
    future = rpc.rpc_async("b", note_run_and_die, (path,), timeout=timeout, idempotent=idempotent)
    remote_functions.kept.append(future)


def test_it_runs_again_on_the_next_worker_of_the_name(join_one, tmp_path):
    log = tmp_path / "runs"
    a, b = join_one("a"), join_one("b")
    a.run(start_call, str(log), idempotent=True)
    b.process.join(20)
    again = join_one("b")
    assert a.run(lambda: remote_functions.kept.pop().wait()) == again.pid
    assert runs(log) == 2
    a.run(assert_clean)


def test_without_it_a_call_runs_at_most_once(join_one, tmp_path):
    log = tmp_path / "runs"
    a, b = join_one("a"), join_one("b")
    a.run(start_call, str(log), idempotent=False)
    b.process.join(20)
    join_one("b")

    def check() -> None:
        with pytest.raises(WorkerLostError, match="it may have run") as caught:
            remote_functions.kept.pop().wait()
        assert caught.value.outcome is Outcome.UNKNOWN
        assert rpc.rpc_sync("b", add, (1, 1)) == 2

    a.run(check)
    assert runs(log) == 1


@pytest.mark.parametrize("how", ["rpc_sync", "aio"])
def test_a_call_to_a_worker_that_is_lost_waits_for_the_next_one(join_one, how):
    a, b = join_one("a"), join_one("b")

    def lose(pid: int) -> None:
        rpc.rpc_sync("b", add, (1, 1))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: rpc.debug_info()["lost_workers"])

    def call() -> int:
        if how == "aio":
            return asyncio.run(rpc.aio.call("b", os.getpid, timeout=60, idempotent=True))
        return rpc.rpc_sync("b", os.getpid, timeout=60, idempotent=True)

    a.run(lose, b.pid)
    pending = a.start(call)
    again = join_one("b")
    assert pending.result() == again.pid


def test_it_fails_when_its_time_is_over(join_one, tmp_path):
    log = tmp_path / "runs"
    a, b = join_one("a"), join_one("b")
    a.run(start_call, str(log), idempotent=True, timeout=5)  # in which it must run
    b.process.join(20)

    def check() -> None:
        with pytest.raises((WorkerLostError, RpcTimeoutError), match="it may have run") as caught:
            remote_functions.kept.pop().wait()
        assert caught.value.outcome is Outcome.UNKNOWN  # of the first attempt, whatever became of the others
        with pytest.raises(WorkerLostError) as caught:
            rpc.rpc_sync("b", add, (1, 1), timeout=0.3, idempotent=True)
        assert caught.value.outcome is Outcome.NOT_SENT

    a.run(check)
    a.run(assert_clean)
    assert runs(log) == 1


def test_what_a_function_raises_is_not_tried_again(workers, tmp_path):
    a, _ = workers.rpc(2)
    log = tmp_path / "runs"

    def check() -> None:
        with pytest.raises(WorkerLostError) as caught:
            rpc.rpc_sync("worker1", note_run_and_raise, (str(log),), idempotent=True)
        assert caught.value.outcome is Outcome.RAN
        with pytest.raises(RpcTimeoutError) as timed_out:
            rpc.rpc_sync("worker1", wait_for, ("timed out",), timeout=2, idempotent=True)  # in which it must begin
        assert timed_out.value.outcome is Outcome.UNKNOWN
        rpc.rpc_sync("worker1", set_event, ("timed out",))

    a.run(check)
    assert runs(log) == 1


def test_it_can_be_cancelled_while_it_pauses(join_one):
    a, b = join_one("a"), join_one("b")

    def check(pid: int) -> None:
        rpc.rpc_sync("b", add, (1, 1))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: rpc.debug_info()["lost_workers"])
        future = rpc.rpc_async("b", add, (1, 1), timeout=60, idempotent=True)
        wait_until(lambda: not rpc.debug_info()["agent.client_active_calls"])
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(RpcCancelledError) as caught:
            future.wait()
        assert caught.value.outcome is Outcome.NOT_SENT
        assert_clean()

    a.run(check, b.pid)


def test_shutdown_fails_it_while_it_pauses(join_one):
    a, b = join_one("a"), join_one("b")

    def check(pid: int) -> None:
        rpc.rpc_sync("b", add, (1, 1))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: rpc.debug_info()["lost_workers"])
        future = rpc.rpc_async("b", add, (1, 1), timeout=0, idempotent=True)
        rpc.shutdown(graceful=False)
        with pytest.raises(NotInitializedError):
            future.wait()

    a.run(check, b.pid)


def test_calls_that_wait_for_capacity_are_sent_to_the_next_worker(join_one):
    options = rpc.FlowControlOptions(max_in_flight=1)
    a, b = join_one("a", flow_control=options), join_one("b")

    def start() -> None:
        rpc.rpc_sync("b", add, (1, 1))
        remote_functions.kept.append(rpc.rpc_async("b", wait_for, ("never",)))

        def call() -> None:
            future = rpc.rpc_async("b", os.getpid, timeout=60, idempotent=True)
            remote_functions.kept.append(future.wait())

        threading.Thread(target=call, daemon=True).start()
        wait_until(lambda: rpc.debug_info()["flow_control"]["b"]["waiting_calls"] == 1)

    a.run(start)
    b.kill()
    again = join_one("b")
    a.run(wait_until, lambda: len(remote_functions.kept) == 2)
    assert a.run(lambda: remote_functions.kept[1]) == again.pid


def test_inside_a_context_it_is_sent_once(join_one, tmp_path):
    """Another attempt would leave the graph without the call."""
    log = tmp_path / "runs"
    a, _ = join_one("a"), join_one("b")

    def check() -> None:
        with autograd.context(), pytest.raises(WorkerLostError):
            rpc.rpc_sync("b", multiply, (torch.ones(2, requires_grad=True), torch.ones(2)), idempotent=True)
            rpc.rpc_sync("b", note_run_and_die, (str(log),), timeout=60, idempotent=True)

    a.run(check)
    assert runs(log) == 1


def test_references_among_its_arguments_arrive_with_each_attempt(join_one, tmp_path):
    a, b = join_one("a"), join_one("b")

    def call(pid: int) -> None:
        mine = rpc.RRef(torch.ones(3))
        rpc.rpc_sync("b", add, (1, 1))
        os.kill(pid, signal.SIGKILL)
        remote_functions.kept.append(rpc.rpc_async("b", keep, (mine,), timeout=60, idempotent=True))

    a.run(call, b.pid)
    again = join_one("b")
    assert a.run(lambda: remote_functions.kept.pop().wait()) == 1
    assert again.run(lambda: remote_functions.kept[0].to_here().tolist()) == [1, 1, 1]
    again.run(lambda: remote_functions.kept.clear())
    a.run(assert_clean)


SECURE = {
    "host": "127.0.0.1",
    "credentials": Credentials(token=secrets.token_hex(32)),
    "transports": ("tcp", "grpc"),
}


def join_static(rank: int, port: int, **options) -> None:
    store = TCPStore("127.0.0.1", port, credentials=options.get("credentials"))
    settings = rpc.RpcBackendOptions(init_timeout=50, **options)
    rpc.init_rpc("ab"[rank], rank=rank, world_size=2, rpc_backend_options=settings, store=store)


@pytest.mark.parametrize("options", [{}, SECURE], ids=["local", "tls"])
def test_in_a_static_group_it_runs_again_on_the_worker_that_is_started_again(workers, tmp_path, options):
    log = tmp_path / "runs"
    with TCPStore("127.0.0.1", 0, is_master=True, credentials=options.get("credentials")) as store:
        a, b = workers(2)
        for each in [worker.start(join_static, rank, store.port, **options) for rank, worker in enumerate((a, b))]:
            each.result()
        a.run(start_call, str(log), idempotent=True)
        b.process.join(20)
        later = a.start(rpc.rpc_sync, "b", os.getpid, timeout=60, idempotent=True)
        (again,) = workers(1)
        again.run(join_static, 1, store.port, **options)
        assert later.result() == again.pid
        assert a.run(lambda: remote_functions.kept.pop().wait()) == again.pid
        assert runs(log) == 2
        a.run(assert_clean)
        assert again.run(rpc.rpc_sync, "a", os.getpid) == a.pid
        transport = "tcp" if options else "unix"
        a.run(wait_until, lambda: rpc.debug_info()["transports"]["b"] == transport)
        workers.each([a, again], rpc.shutdown)


def test_it_runs_again_on_a_suspect_worker_that_comes_back(workers, tmp_path):
    """A call in flight has begun, and runs twice; one that is made meanwhile runs once."""
    first, second = tmp_path / "first", tmp_path / "second"
    a, b = workers.rpc(2, liveness=links.LIVENESS)

    def begin() -> None:
        remote_functions.kept.append(
            rpc.rpc_async("worker1", note_run_and_wait, (str(first),), timeout=60, idempotent=True)
        )
        wait_until(lambda: runs(first))

    def while_stopped() -> None:
        links.suspect_after(1.0)
        wait_until(lambda: links.state_of("worker1") == "suspect")
        links.suspect_after(links.LIVENESS.suspect_after)
        remote_functions.kept.append(
            rpc.rpc_async("worker1", note_run, (str(second),), timeout=60, idempotent=True)
        )
        assert not any(future.done() for future in remote_functions.kept)

    def after() -> list[int]:
        answers = [future.wait() for future in remote_functions.kept]
        remote_functions.kept.clear()
        return answers

    a.run(begin)
    with stopped(b):
        a.run(while_stopped)
    a.run(wait_until, lambda: runs(first) == 2)
    b.run(set_event, "seen twice")
    assert a.run(after) == [b.pid, b.pid]
    assert (runs(first), runs(second)) == (2, 1)
    a.run(assert_clean)
