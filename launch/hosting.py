"""What processes that are started together need: a store that lets in nobody else, and environment variables."""

import multiprocessing
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from ..c10d.rendezvous.url import SPAWN_STORE_HOST, SpawnStore
from ..c10d.stores.tcp import TCPStore
from ..errors import StoreError
from ..net.addresses import ListenSettings
from ..net.security import Credentials

__all__ = ["credentials_or_token", "hosted_spawn_store", "worker_environment"]

TOKEN_BYTES = 32


def credentials_or_token() -> Credentials:
    """Returns the credentials in the environment; without any, a new token."""
    return Credentials.from_environment() or Credentials(token=secrets.token_urlsafe(TOKEN_BYTES))


@contextmanager
def hosted_spawn_store(start_method: str = "spawn") -> Iterator[SpawnStore]:
    """Context manager that hosts a store for processes that are started so; its value tells of it.

    Raises:
        CredentialsError: the credentials in the environment are not valid.
        StoreError: the store cannot be hosted.
    """
    credentials = credentials_or_token()
    with _hosted_store(credentials, start_method) as port, _reserved_port() as master_port:
        yield SpawnStore(port, master_port, credentials.token)


def worker_environment(store: SpawnStore, nprocs: int, restart: int, restarts: int) -> dict[str, str]:
    """Returns the variables that all ranks have alike: those that torchrun sets, and what tells of the store.

    A process has been started again `restart` times, of `restarts` that it can be.
    """
    return {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        **store.to_environment(),
    }


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
    return TCPStore(SPAWN_STORE_HOST, 0, is_master=True, credentials=credentials)


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
        reserved.bind((SPAWN_STORE_HOST, ListenSettings.from_environment().ports.last_free(SPAWN_STORE_HOST)))
        yield reserved.getsockname()[1]
