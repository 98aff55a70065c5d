"""Starts several processes of a script on this host, without a launcher such as torchrun.

    def work(rank: int, text: str) -> None:
        rpc.init_rpc(f"worker{rank}")          # reads rank, world size and address from the environment
        ...
        rpc.shutdown()

    if __name__ == "__main__":
        launch.spawn(work, 4, ("hello",))

Each process gets the environment variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), so the same function also runs under torchrun, with gradwire or torch.distributed.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from .c10d.torch_types import TorchTCPStore

__all__ = ["spawn"]

LOOPBACK = "127.0.0.1"


def spawn(
    fn: Callable[..., object],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    start_method: str = "spawn",
    grace_period: float = 10.0,
) -> None:
    """Runs `fn(rank, *args)` in `nprocs` new processes on this host and waits for them.

    When one fails, the others have `grace_period` seconds to exit on their own, for example to report the lost
    worker. Those that are left get SIGTERM, and after another `grace_period` SIGKILL. All of them die with this
    process.

    Args:
        fn: a function at the top level of a module, so that the new processes can import it.
        nprocs: the number of processes.
        args: arguments of `fn` after the rank; they are pickled.
        start_method: `"spawn"`, `"forkserver"` or `"fork"`, as in multiprocessing.
        grace_period: see above, in seconds.

    Raises:
        ValueError: `nprocs` or `grace_period` is out of range.
        torch.multiprocessing.ProcessRaisedException: `fn` raised; the message has the first process's traceback.
        torch.multiprocessing.ProcessExitedException: a process was killed, or exited with a nonzero status.
    """
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"nprocs is {nprocs!r}: give the number of processes, at least 1")
    if not grace_period >= 0:
        raise ValueError(f"grace_period is {grace_period!r}: give seconds, at least 0")
    # The launcher hosts the store, as torchrun does, so no other program can take the port before worker 0 listens
    # on it. The store owns the socket from here on and closes it.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TorchTCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    context = start_processes(  # type: ignore[no-untyped-call]
        _run_worker, (nprocs, port, fn, args), nprocs, join=False, start_method=start_method
    )
    while not context.join(grace_period=grace_period):
        pass
    del store  # keeps the store alive until here: workers use it


def _run_worker(rank: int, nprocs: int, port: int, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if "OMP_NUM_THREADS" not in os.environ:  # else torch uses all cores in every process
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // nprocs))
    fn(rank, *args)
