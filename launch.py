"""Starts the processes of a script that is run on its own.

    def work(rank: int, text: str) -> None:
        rpc.init_rpc(f"worker{rank}")          # rank, size and meeting point are in the environment
        ...
        rpc.shutdown()

    if __name__ == "__main__":
        launch.spawn(work, 4, ("hello",))

Each process finds in its environment what torchrun would put there (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so the same function runs under torchrun unchanged, on gradwire and on
torch.distributed.
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

    Once one fails, the others have `grace_period` seconds to end by themselves (to report a lost worker, say)
    before they are told to terminate, and as long again before they are killed. They end with this process.

    Args:
        fn: a function at the top level of a module, so that the new processes can import it.
        nprocs: how many processes.
        args: further arguments of `fn`; they are pickled.
        start_method: `"spawn"`, `"forkserver"` or `"fork"`, as in multiprocessing.
        grace_period: seconds.

    Raises:
        torch.multiprocessing.ProcessRaisedException: `fn` raised in a process; the first one's traceback is
            in the message.
        torch.multiprocessing.ProcessExitedException: a process was killed or called `sys.exit` with a status.
    """
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"nprocs is {nprocs!r}: give the number of processes, at least 1")
    if not grace_period >= 0:
        raise ValueError(f"grace_period is {grace_period!r}: give seconds, at least 0")
    # The launcher serves the store, as torchrun does: a port that is bound here cannot be taken by others before a
    # worker gets to it. The store has the socket from here on, and closes it.
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    store = TorchTCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    context = start_processes(  # type: ignore[no-untyped-call]
        _start, (nprocs, port, fn, args), nprocs, join=False, start_method=start_method
    )
    while not context.join(grace_period=grace_period):
        pass
    del store  # it must live as long as the workers do


def _start(rank: int, nprocs: int, port: int, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if "OMP_NUM_THREADS" not in os.environ:  # torch takes all cores for itself otherwise, in every process
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // nprocs))
    fn(rank, *args)
