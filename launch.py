"""Starts several processes of a script on this host, without a launcher such as torchrun.

    def work(rank: int, text: str) -> None:
        rpc.init_rpc(f"worker{rank}")          # reads rank, world size and store from the environment
        ...
        rpc.shutdown()

    if __name__ == "__main__":
        launch.spawn(work, 4, ("hello",))

Each process gets the environment variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), so the same function also runs under torchrun, with gradwire or torch.distributed.

With `restarts`, a process that dies is started again under its rank, with the same variables; torchrun's
TORCHELASTIC_RESTART_COUNT says how often it has been, and TORCHELASTIC_MAX_RESTARTS how often it can be.

gradwire's functions meet at a store that this process hosts. It lets in those who have a token, which each `spawn`
makes and gives to its processes in memory; or, if the environment has credentials, those who have these. torch's
own functions do not use it: with them rank 0 hosts a store at MASTER_PORT, which lets everybody in.
"""

import multiprocessing
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext, start_processes

from .c10d.security import Credentials
from .c10d.spawn_store import HOST, SpawnStore
from .c10d.stores.tcp import TCPStore
from .errors import StoreError
from .supervisor import Backoff, supervise

__all__ = ["Backoff", "spawn"]

TOKEN_BYTES = 32
DEFAULT_BACKOFF = Backoff()


def spawn(
    fn: Callable[..., object],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    start_method: str = "spawn",
    grace_period: float = 10.0,
    restarts: int = 0,
    backoff: Backoff = DEFAULT_BACKOFF,
) -> None:
    """Runs `fn(rank, *args)` in `nprocs` new processes on this host and waits for them.

    A process fails if `fn` raises, if it exits with a nonzero status, or if it is killed. It is started again, up
    to `restarts` times for each rank, while the others go on; a warning in the log says so in one line.

    When one fails that is not started again, the others have `grace_period` seconds to exit on their own, for
    example to report the lost worker. Those that are left get SIGTERM, and after another `grace_period` SIGKILL.
    All of them die with this process.

    Args:
        fn: a function at the top level of a module, so that the new processes can import it.
        nprocs: the number of processes.
        args: arguments of `fn` after the rank; they are pickled.
        start_method: `"spawn"`, `"forkserver"` or `"fork"`, as in multiprocessing.
        grace_period: see above, in seconds.
        restarts: how often the process of each rank is started again when it has failed.
        backoff: the pauses before that.

    Raises:
        ValueError: `nprocs`, `grace_period` or `restarts` is out of range.
        CredentialsError: the credentials in the environment are not valid.
        torch.multiprocessing.ProcessRaisedException: `fn` raised; the message has the first process's traceback.
        torch.multiprocessing.ProcessExitedException: a process was killed, or exited with a nonzero status.
    """
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"nprocs is {nprocs!r}: give the number of processes, at least 1")
    if not grace_period >= 0:
        raise ValueError(f"grace_period is {grace_period!r}: give seconds, at least 0")
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ValueError(f"restarts is {restarts!r}: give a number, 0 for no restarts")
    credentials = Credentials.from_environment() or Credentials(token=secrets.token_urlsafe(TOKEN_BYTES))
    with _hosted_store(credentials, start_method) as port, _reserved_port() as master_port:
        store = SpawnStore(port, master_port, credentials.token)

        def start(ranks: Sequence[int], restart: int) -> ProcessContext:
            environment = {
                "WORLD_SIZE": str(nprocs),
                "LOCAL_WORLD_SIZE": str(nprocs),
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                "TORCHELASTIC_MAX_RESTARTS": str(restarts),
                **store.to_environment(),
            }
            return start_processes(  # type: ignore[no-untyped-call,no-any-return]
                _run_worker, (ranks, environment, fn, args), len(ranks), join=False, start_method=start_method
            )

        supervise(
            start(range(nprocs), 0),
            lambda rank, restart: start([rank], restart),
            restarts=restarts,
            backoff=backoff,
            grace_period=grace_period,
        )


@contextmanager
def _hosted_store(credentials: Credentials, start_method: str) -> Iterator[int]:
    """Context manager that hosts the store of the processes; its value is the port."""
    if start_method != "fork":
        with _open_store(credentials) as store:
            yield store.port
        return
    # Processes that are forked from one that has used gRPC cannot use it. So another process hosts the store.
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    host = forking.Process(target=_host_store, args=(credentials, ours, theirs), daemon=True)
    host.start()
    theirs.close()
    try:
        with ours:
            try:
                port = ours.recv()
            except EOFError:
                raise StoreError("the process that hosts the store of the new processes has died") from None
            yield port
    finally:
        host.kill()
        host.join()


def _open_store(credentials: Credentials) -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, credentials=credentials)


def _host_store(credentials: Credentials, launcher: Connection, connection: Connection) -> None:
    """Hosts the store until the launcher kills this process, or has died together with its other processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    launcher.close()
    with _open_store(credentials) as store, suppress(EOFError):
        connection.send(store.port)
        connection.recv()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Context manager that reserves a port; its value is the port.

    Programs that take any free port do not get it, but rank 0 of torch.distributed can listen on it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those do that may listen on it
        reserved.bind((HOST, 0))
        yield reserved.getsockname()[1]


def _run_worker(
    index: int,
    ranks: Sequence[int],
    environment: Mapping[str, str],
    fn: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    rank = ranks[index]
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # if torchrun has started the launcher
    if "OMP_NUM_THREADS" not in os.environ:  # else torch uses all cores in every process
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(environment["LOCAL_WORLD_SIZE"])))
    fn(rank, *args)
