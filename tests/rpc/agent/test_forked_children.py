"""Children that a worker forks: nothing of gradwire works in them, nothing hangs, and the worker goes on."""

import asyncio
import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from gradwire import autograd, launch, profile, rpc
from gradwire.errors import NotInitializedError, WorkerLostError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer
from gradwire.rpc import aio
from gradwire.rpc.channels import channels
from torch.utils.data import DataLoader, Dataset

from tests import remote_functions
from tests.remote_functions import add, identity, keep, process_id, set_event, wait_for, wait_until
from tests.rpc.channels.segments import MIB, mapped_files, segments_of, used_bytes

HANG_S = 20
"""Seconds after which a child that hangs is ended by the kernel."""

ADVICE = r"is a fork of worker 'worker0' \(process \d+\) and no worker: .*'spawn' or 'forkserver'"


def in_child(function: Callable[[], object]) -> Any:
    """Returns what a function returns in a child that this process forks, or raises its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANG_S)
        try:
            outcome: tuple[bool, object] = True, function()
        except BaseException as error:
            outcome = False, f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child has ended with status {status}"
    succeeded, value = pickle.loads(data)
    assert succeeded, value
    return value


def outcomes(cases: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Returns the error that each function raises here, and how long it took if that was long."""
    found = {}
    for name, function in cases.items():
        began = time.monotonic()
        try:
            found[name] = f"returned {function()!r}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if (seconds := time.monotonic() - began) > 5:
            found[name] += f" after {seconds:.1f} s"
    return found


def count_up(limit: int) -> Iterator[int]:
    yield from range(limit)


def make_leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


async def next_of(items: Any) -> object:
    return await anext(items)


def everything(folder: str) -> dict[str, Callable[[], object]]:
    """Returns functions that use all that a program may have of gradwire, made by the parent."""
    reference = rpc.remote("worker1", torch.ones, (2,))
    leaf = rpc.remote("worker1", make_leaf)
    reference.to_here()
    leaf.to_here()
    pending = rpc.rpc_async("worker1", wait_for, ("the children have ended",))
    stream, read = rpc.rpc_stream("worker1", count_up, (1 << 20,)), rpc.rpc_stream("worker1", count_up, (1 << 20,))
    assert (next(stream), next(read)) == (0, 0)
    events = aio.worker_events()
    module = RemoteModule("worker1", torch.nn.Linear, (2, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=0.1)
    opened = autograd.context()
    context = opened.__enter__()
    loss = rpc.rpc_sync("worker1", torch.sum, (make_leaf(),))

    def run_profile() -> None:
        with profile(f"{folder}/trace.json"):
            pass

    def open_context() -> None:
        with autograd.context():
            pass

    return {
        "rpc_sync": lambda: rpc.rpc_sync("worker1", process_id, timeout=3),
        "rpc_sync here": lambda: rpc.rpc_sync("worker0", process_id, timeout=3),
        "rpc_async": lambda: rpc.rpc_async("worker1", process_id),
        "remote": lambda: rpc.remote("worker1", process_id),
        "broadcast_call": lambda: rpc.broadcast_call(["worker1"], process_id),
        "rpc_stream": lambda: rpc.rpc_stream("worker1", count_up, (3,)),
        "stream": lambda: next(stream),
        "stream, async": lambda: asyncio.run(next_of(read)),
        "future": pending.wait,
        "future, async": lambda: asyncio.run(aio.wait(pending)),
        "all_gather": lambda: rpc.all_gather(1, timeout=3),
        "barrier": rpc.barrier,
        "aio.call": lambda: asyncio.run(aio.call("worker1", process_id)),
        "aio.worker_events": aio.worker_events,
        "events": lambda: asyncio.run(next_of(events)),
        "on_worker_left": lambda: rpc.on_worker_left(print),
        "get_worker_info": rpc.get_worker_info,
        "get_worker_infos": rpc.get_worker_infos,
        "set_rpc_timeout": lambda: rpc.set_rpc_timeout(1),
        "get_rpc_timeout": rpc.get_rpc_timeout,
        "debug_info": rpc.debug_info,
        "RRef": lambda: rpc.RRef(1),
        "to_here": lambda: reference.to_here(timeout=3),
        "to_here_async": lambda: asyncio.run(reference.to_here_async(timeout=3)),
        "RRef.rpc_sync": lambda: reference.rpc_sync().sum(),
        "RRef.rpc_async": lambda: reference.rpc_async().sum(),
        "RRef.remote": lambda: reference.remote().sum(),
        "RRef.backward": lambda: leaf.backward(context),
        "context": open_context,
        "backward": lambda: autograd.backward(context, [loss]),
        "get_gradients": lambda: autograd.get_gradients(context),
        "optimizer": lambda: DistributedOptimizer(torch.optim.SGD, [leaf], lr=0.1),
        "step": lambda: optimizer.step(context),
        "RemoteModule": lambda: RemoteModule("worker1", torch.nn.Linear, (2, 2)),
        "forward": lambda: module.forward(torch.ones(2)),
        "remote_parameters": module.remote_parameters,
        "profile": run_profile,
        "init_rpc": lambda: rpc.init_rpc("child", rank=0, world_size=1),
        "shutdown": rpc.shutdown,
        "shutdown at once": lambda: rpc.shutdown(graceful=False),
    }


def use_in_many_children(folder: str) -> None:
    """Forks while other threads call, and so hold the agent's locks now and then."""
    cases, is_over = everything(folder), threading.Event()

    def call_again_and_again() -> None:
        while not is_over.is_set():
            with autograd.context():
                rpc.rpc_sync("worker1", add, (make_leaf(), 1))
            rpc.remote("worker1", identity, (1,)).to_here()
            list(rpc.rpc_stream("worker1", count_up, (10,)))

    threads = [threading.Thread(target=call_again_and_again) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            found = in_child(lambda: outcomes(cases))
            wrong = {name: text for name, text in found.items() if not text.startswith("NotInitializedError: ")}
            assert not wrong, wrong
            for text in found.values():
                with pytest.raises(NotInitializedError, match=ADVICE):
                    raise NotInitializedError(text)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    rpc.rpc_sync("worker1", set_event, ("the children have ended",))
    assert cases["future"]() == "the children have ended"
    cases["step"]()
    assert cases["stream"]() == 1


def test_everything_raises_at_once_in_a_child(workers, tmp_path):
    a, b = workers.rpc(2)
    a.run(use_in_many_children, str(tmp_path))
    workers.each([a, b], rpc.shutdown)
    assert a.log.read_text() == b.log.read_text() == ""


def live_objects() -> dict[str, object]:
    gc.collect()
    info = rpc.debug_info()
    counted = [name for name in info if name.startswith(("num_", "links", "unanswered", "agent.client"))]
    return {name: info[name] for name in counted}


def drop_everything(held: list[Any]) -> None:
    """Drops references, streams and contexts in a child, which ends then."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANG_S)
        with contextlib.suppress(NotInitializedError):
            rpc.rpc_sync("worker1", process_id)
        with held.pop():  # the context
            pass
        held[-1].close()
        held.clear()
        gc.collect()
        atexit._run_exitfuncs()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Opened:
    """A context that has been entered."""

    def __init__(self) -> None:
        self.context = autograd.context()
        self.id = self.context.__enter__()
        rpc.rpc_sync("worker1", add, (make_leaf(), 1))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def notice_nothing() -> None:
    reference, own = rpc.remote("worker1", torch.ones, (2,)), rpc.RRef([1])
    rpc.rpc_sync("worker1", keep, (own,))
    reference.to_here()
    stream = rpc.rpc_stream("worker1", count_up, (1 << 20,))
    next(stream)
    opened = Opened()
    here, there = live_objects(), rpc.rpc_sync("worker1", live_objects)
    drop_everything([reference, own, stream, opened])
    assert live_objects() == here
    assert rpc.rpc_sync("worker1", live_objects) == there
    assert next(stream) == 1
    assert reference.rpc_sync().sum() == 2
    assert own.local_value() == [1]
    autograd.get_gradients(opened.id)
    opened.__exit__(None, None, None)


def test_the_parent_notices_nothing(workers):
    a, b = workers.rpc(2)
    a.run(notice_nothing)
    b.run(remote_functions.kept.clear)
    workers.each([a, b], rpc.shutdown)
    assert b.log.read_text() == ""


END_IN_CHILD = """
import os, sys
from gradwire import autograd, rpc
rank = 0 if os.fork() else 1
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    reference = rpc.remote("worker1", os.getpid)
    with autograd.context():
        child = os.fork()
        if not child:
            sys.exit(7)  # with all finalizers and handlers
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert rpc.rpc_sync("worker1", os.getpid) == reference.to_here()
rpc.shutdown()
if rank == 0:
    os.wait()
"""


def test_a_child_ends_as_any_process(python, free_port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    done = python.run("-c", END_IN_CHILD)
    assert (done.returncode, done.stderr) == (0, "")


class Remote(Dataset):  # type: ignore[type-arg]
    """Whose items another worker has, which is not for children to ask."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return rpc.rpc_sync("worker1", identity, (index,), timeout=3)


class Local(Remote):
    """Whose items are computed from a tensor that has come by RPC, and from a value of this worker."""

    def __init__(self) -> None:
        self.weights = rpc.rpc_sync("worker1", torch.ones, (1 << 18,))
        self.scale = rpc.RRef(2)

    def __getitem__(self, index: int) -> int:
        return int(self.weights[index]) * index * self.scale.local_value()


def square(number: int) -> int:
    return number * number


def call_in_child(_: int) -> str:
    return outcomes({"": lambda: rpc.rpc_sync("worker1", process_id, timeout=3)})[""]


def use_children() -> None:
    with pytest.raises(NotInitializedError, match="is a fork of worker 'worker0'"):
        list(DataLoader(Remote(), num_workers=2, multiprocessing_context="fork"))
    loaded = list(DataLoader(Local(), num_workers=2, multiprocessing_context="fork"))
    assert torch.cat(loaded).tolist() == [0, 2, 4, 6]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
        assert all("is a fork of worker 'worker0'" in text for text in pool.map(call_in_child, range(2)))


def return_in_child() -> int:
    """Forks, and returns in both processes."""
    child = os.fork()
    return child or os.getpid()


def has_ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG) != (0, 0)


def work_with_children(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        use_children()
    else:  # on a thread of the agent
        rpc.rpc_sync("worker0", use_children)
        child = rpc.rpc_sync("worker0", return_in_child)
        wait_until(lambda: rpc.rpc_sync("worker0", has_ended, (child,)))
    rpc.shutdown()


def test_data_loaders_and_pools():
    """In the program, and at the same time in a remote function."""
    launch.spawn(work_with_children, 2, start_method="forkserver")


def drop_idle_after(seconds: float) -> None:
    channels.IDLE_TIMEOUT_S = seconds


def sum_in_child(tensors: list[torch.Tensor], go: tuple[int, int], told: tuple[int, int]) -> int:
    """Forks a child that sums what this worker has now, when it is told to; returns its process id."""
    child = os.fork()
    if not child:
        os.read(go[0], 1)
        sums = [float(each[:100].sum()) for each in tensors]  # OpenMP would not run after a fork
        os.write(told[1], struct.pack(f"<{len(sums)}d", *sums))
        os._exit(0)
    return child


def receive_all(number: float) -> list[torch.Tensor]:
    """Returns tensors that have come in segments: of another worker, of this one, and of one that others share."""
    made = rpc.rpc_sync("worker1", torch.full, ((MIB,), number))
    back = rpc.rpc_sync("worker1", identity, (torch.full((MIB,), number),))
    (first, _) = rpc.rpc_sync("worker1", share_with_all, (number,))
    assert first.item() == number
    return [made, back, shared.pop()]


shared: list[torch.Tensor] = []


def take(tensor: torch.Tensor) -> torch.Tensor:
    shared[:] = [tensor]
    return tensor[0]


def forget_shared() -> None:
    shared.clear()


def share_with_all(number: float) -> list[torch.Tensor]:
    futures = rpc.broadcast_call(["worker0", "worker2"], take, (torch.full((MIB,), number),))
    return [each.wait() for each in futures]


def train_with_children(epochs: int) -> None:
    """Has a child in each epoch that reads what this worker has received, after it has dropped that."""
    go, told = os.pipe(), os.pipe()
    for epoch in range(epochs):
        received = receive_all(float(epoch))
        child = sum_in_child(received, go, told)
        received.clear()
        for number in range(3):  # which would be received into the same memory
            receive_all(number + 0.5)
        os.write(go[1], b"x")
        assert struct.unpack("<3d", os.read(told[0], 24)) == (100.0 * epoch,) * 3
        os.waitpid(child, 0)


def test_memory_that_children_have_read_is_given_back(workers):
    started = workers(3)
    workers.each(started, drop_idle_after, 0.2)
    workers.join_rpc(started, transports=["unix", "tcp", "grpc"])
    a, b, c = started
    for each in started:
        each.run(lambda: [rpc.rpc_sync(info.name, process_id) for info in rpc.get_worker_infos()])
    a.run(train_with_children, 8)
    wait_until(lambda: len(segments_of([a.pid, b.pid])) < 14)  # and not some for each epoch
    c.run(forget_shared)
    for each in started:
        each.run(wait_until, lambda: used_bytes() == 0 and mapped_files() == (0, 0))


# Killed workers.


def fork_a_helper() -> int:
    """Starts a process that outlives this one."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    return child


@pytest.mark.parametrize("transports", [["unix", "tcp", "grpc"], ["tcp", "grpc"], ["grpc"]], ids="/".join)
def test_a_killed_worker_is_noticed_that_has_forked_a_helper(workers, transports):
    a, b, c = workers.rpc(3, transports=transports)
    b.run(lambda: [rpc.rpc_sync(name, process_id) for name in ("worker0", "worker2")])
    helper = b.run(fork_a_helper)
    try:
        waiting = a.start(rpc.rpc_sync, "worker1", wait_for, ("never",))
        b.run(wait_until, lambda: "never" in remote_functions.events)
        b.kill()
        with pytest.raises(WorkerLostError, match="worker1"):
            waiting.result(20)
        for each in a, c:
            with pytest.raises(WorkerLostError, match="worker1"):
                each.run(rpc.rpc_sync, "worker1", process_id)
        workers.each([a, c], rpc.shutdown)
    finally:
        os.kill(helper, signal.SIGKILL)
