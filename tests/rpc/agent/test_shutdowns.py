"""A graceful shutdown can be ended by any thread, handler of a signal, remote function, callback or finalizer."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gradwire import compat, rpc
from gradwire.errors import LossCause, NotInitializedError, RpcTimeoutError, WorkerLostError

from tests.remote_functions import event, set_event, wait_for, wait_until
from tests.workers import Worker

MAX_SECONDS = 30.0
"""Within which what ends at once has ended, on a busy machine."""


def end_now(*_: object) -> None:
    rpc.shutdown(graceful=False)


def end_by_timeout(*_: object) -> None:
    with contextlib.suppress(RpcTimeoutError):
        rpc.shutdown(timeout=0.2)


class EndsTheAgent:
    """An object in a cycle, which ends the agent when it is collected."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        rpc.shutdown(graceful=False)


def make_garbage() -> None:
    EndsTheAgent()
    gc.collect()


def prepare(how: str) -> None:
    """Sets up what ends worker1 when it gets SIGUSR2, or "end" is set on a worker."""
    match how:
        case "handler":
            signal.signal(signal.SIGUSR2, end_now)
        case "handler, timeout":
            signal.signal(signal.SIGUSR2, end_by_timeout)
        case "thread":
            threading.Thread(target=lambda: (wait_for("end"), end_now()), daemon=True).start()
        case "thread, timeout":
            threading.Thread(target=lambda: (wait_for("end"), end_by_timeout()), daemon=True).start()
        case "callback":
            rpc.rpc_async("worker0", wait_for, ("end",), timeout=0).then(end_now)


def end(how: str, a: Worker, b: Worker) -> None:
    match how:
        case "handler" | "handler, timeout":
            os.kill(b.pid, signal.SIGUSR2)
        case "thread" | "thread, timeout":
            a.run(call_and_lose, partial(set_event, "end"))
        case "callback":
            a.run(set_event, "end")
        case "remote call":
            a.run(call_and_lose, end_now)
        case "finalizer":
            a.run(call_and_lose, make_garbage)


def call_and_lose(function: Callable[..., object]) -> None:
    with contextlib.suppress(WorkerLostError):  # it may have answered before
        rpc.rpc_sync("worker1", function)


def is_shutting_down() -> bool:
    return any(each["operation"] == "shutdown" for each in rpc.debug_info()["collectives"])


def wait_until_it_shuts_down() -> None:
    wait_until(lambda: rpc.rpc_sync("worker1", is_shutting_down))


def shut_down() -> float:
    began = time.monotonic()
    rpc.shutdown()
    assert not rpc.is_initialized()
    return time.monotonic() - began


WAYS = ["handler", "handler, timeout", "thread", "thread, timeout", "callback", "remote call", "finalizer"]


@pytest.mark.parametrize("how", WAYS)
def test_a_graceful_shutdown_is_ended(workers, how):
    a, b = workers.rpc(2)
    b.run(prepare, how)
    leaving = b.start(shut_down)
    if how != "callback":  # for whose call it waits first
        a.run(wait_until_it_shuts_down)
    end(how, a, b)
    assert leaving.result(MAX_SECONDS) < MAX_SECONDS

    def check_end() -> None:
        with pytest.raises(WorkerLostError) as caught:
            wait_until(lambda: rpc.rpc_sync("worker1", abs, (1,)) == -1)
        assert caught.value.cause is LossCause.SHUTDOWN

    a.run(check_end)
    for again in (rpc.shutdown, end_now):  # which do nothing
        b.run(again)
    assert "Traceback" not in b.log.read_text()


def shut_down_as_in_torch() -> None:
    import torch.distributed.rpc

    torch.distributed.rpc.shutdown()


def test_torchs_shutdown_is_ended(workers):
    a, b = workers.rpc(2)
    for worker in (a, b):
        worker.run(compat.install)
    b.run(prepare, "handler")
    leaving = b.start(shut_down_as_in_torch)
    a.run(wait_until, lambda: rpc.rpc_sync("worker1", rpc.debug_info)["collectives"])
    end("handler", a, b)
    leaving.result(MAX_SECONDS)


def test_threads_that_shut_down_together(workers):
    """Some wait for others, one does not: all return, and none raises."""
    (a,) = workers.rpc(1)

    def leave() -> list[BaseException]:
        raised: list[BaseException] = []
        pending = rpc.rpc_async("worker0", wait_for, ("never",), timeout=0)

        def shut_down_in_thread(**options: float) -> None:
            try:
                rpc.shutdown(**options)
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=shut_down_in_thread) for _ in range(3)]
        threads.append(threading.Thread(target=shut_down_in_thread, kwargs={"timeout": 60}))
        for thread in threads:
            thread.start()
        rpc.shutdown(graceful=False)
        for thread in threads:
            thread.join()
        with pytest.raises(NotInitializedError):
            pending.wait()
        return raised

    assert a.run(leave) == []


def test_a_remote_function_begins_a_graceful_shutdown(workers):
    """It does not wait for its own call, whose answer arrives."""
    (a,) = workers.rpc(1)

    def leave() -> None:
        assert rpc.rpc_sync("worker0", rpc.shutdown) is None
        wait_until(lambda: not rpc.is_initialized())

    a.run(leave)


def test_a_handler_that_interrupts_a_call(workers):
    """It does not wait, since the interrupted code may hold a lock; the call fails when the agent has ended."""
    a, b = workers.rpc(2)

    def call() -> None:
        signal.signal(signal.SIGUSR2, end_now)
        with pytest.raises(NotInitializedError):
            rpc.rpc_sync("worker1", wait_for, ("never",), timeout=0)
        rpc.shutdown()  # which waits for the end
        assert not rpc.is_initialized()

    calling = a.start(call)
    b.run(wait_until, lambda: rpc.debug_info()["agent.server_active_calls"])
    os.kill(a.pid, signal.SIGUSR2)
    calling.result(MAX_SECONDS)


def test_a_worker_that_has_ended_joins_again(workers):
    (a,) = workers.rpc(1)

    def leave_and_join(url: str) -> int:
        signal.signal(signal.SIGUSR2, end_now)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with contextlib.suppress(NotInitializedError):
            while True:
                rpc.rpc_sync("worker0", abs, (1,))
        options = rpc.RpcBackendOptions(init_method=url)
        rpc.init_rpc("again", rank=0, world_size=1, rpc_backend_options=options)  # which waits for the end
        return rpc.rpc_sync("again", abs, (-1,))

    assert a.run(leave_and_join, f"file://{workers.folder}/again") == 1


# Calls whose answers nobody waits for.


@rpc.functions.async_execution
def never() -> torch.futures.Future[None]:
    future: torch.futures.Future[None] = torch.futures.Future()
    event("deferred").set()
    kept.append(future)
    return future


kept: list[torch.futures.Future[None]] = []


def complete() -> None:
    kept[0].set_result(None)


def has_begun() -> bool:
    return event("deferred").is_set()


def call_in_vain() -> None:
    while not rpc.rpc_sync("worker1", has_begun):  # on a busy machine, its time may be up before it begins
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", never, timeout=0.2)


def create_in_vain() -> None:
    while not rpc.rpc_sync("worker1", has_begun):
        with pytest.raises(RpcTimeoutError):
            rpc.remote("worker1", never, timeout=0.2).to_here(timeout=0.1)


def cancel() -> None:
    future = rpc.rpc_async("worker1", never, timeout=0)
    rpc.rpc_sync("worker1", wait_for, ("deferred",))
    future.cancel()


@rpc.functions.async_execution
def never_after(name: str) -> torch.futures.Future[None]:
    """Never has a result, which it says when another event is set."""
    event("running").set()
    wait_for(name)
    return never()


def cancel_while_it_runs() -> None:
    future = rpc.rpc_async("worker1", never_after, ("cancelled",), timeout=0)
    rpc.rpc_sync("worker1", wait_for, ("running",))
    future.cancel()
    rpc.rpc_sync("worker1", set_event, ("cancelled",))


@pytest.mark.parametrize("call", [call_in_vain, create_in_vain, cancel, cancel_while_it_runs])
def test_shutdown_does_not_wait_for_a_future_that_nobody_waits_for(workers, call):
    a, b = workers.rpc(2)
    a.run(call)
    if call is not create_in_vain:
        flow = "calls_in_flight"  # for it is answered when it is given up
        a.run(wait_until, lambda: rpc.debug_info()["flow_control"]["worker1"][flow] == 0)
    workers.each([a, b], rpc.shutdown)
    b.run(complete)


def test_shutdown_does_not_wait_for_the_future_of_a_lost_caller(workers):
    a, b, c = workers.rpc(3)
    a.start(rpc.rpc_sync, "worker1", never, timeout=0)
    b.run(wait_for, "deferred")
    a.kill()
    workers.each([b, c], rpc.shutdown)


def test_a_signal_that_comes_as_a_wait_begins(workers):
    """While other threads want the interpreter, Python may miss such a signal until its main thread wakes up."""
    (a,) = workers.rpc(1)

    def wait_again_and_again() -> float:
        about_to_wait, names, is_over = threading.Event(), iter(map(str, range(30))), threading.Event()
        name = longest = 0.0

        def interrupt() -> None:
            while about_to_wait.wait() and not is_over.is_set():
                about_to_wait.clear()
                os.kill(os.getpid(), signal.SIGUSR2)

        def compute() -> None:
            while not is_over.is_set():
                pass

        threads = [threading.Thread(target=each, daemon=True) for each in (interrupt, compute)]
        signal.signal(signal.SIGUSR2, lambda *_: set_event(name))
        for thread in threads:
            thread.start()
        for name in names:
            future = rpc.rpc_async("worker0", wait_for, (name,), timeout=0)
            began = time.monotonic()
            about_to_wait.set()
            future.wait()
            longest = max(longest, time.monotonic() - began)
        is_over.set()
        about_to_wait.set()
        return longest

    assert a.run(wait_again_and_again) < MAX_SECONDS
