"""What workers do in the tests of links."""

import ctypes
import socket
from typing import Any

import pytest
from gradwire import Outcome, rpc
from gradwire.errors import RpcError, WorkerSuspectError
from gradwire.rpc.transports.tls_socket import TlsSocket

from tests.remote_functions import add, wait_for
from tests.rpc.segments import network

futures: list[Any] = []
"""What a worker keeps from one step of a test to the next."""
seen: list[tuple[str, str]] = []
"""The events of workers that a worker has been told of."""


def state_of(name: str) -> str:
    return rpc.debug_info()["links"][name]["state"]


def record_events() -> None:
    rpc.on_worker_suspect(lambda worker, _reason: seen.append(("suspect", worker.name)))
    rpc.on_worker_back(lambda worker: seen.append(("back", worker.name)))
    rpc.on_worker_left(lambda worker, _reason: seen.append(("left", worker.name)))


def call_for_ever(name: str, event: str = "never") -> None:
    """Begins a call that ends by the event, and waits until it runs."""
    futures.append(rpc.rpc_async(name, wait_for, (event,), timeout=0))
    assert rpc.rpc_sync(name, add, (1, 1)) == 2


def cut(peer: int) -> None:
    """Cuts the connection under the agent's feet, as a reset by a router would."""
    stream: Any = network()._transports[peer]
    if stream.outbox.socket is not None:
        connection = stream.outbox.socket._connection
        (connection._socket if isinstance(connection, TlsSocket) else connection).shutdown(socket.SHUT_RDWR)
    else:
        network().call_soon(stream._runner.cancel)


def error_of_call(name: str) -> Exception | None:
    """Returns what a call to a worker fails with."""
    try:
        rpc.rpc_sync(name, add, (1, 1))
    except RpcError as error:
        return error
    return None


def assert_suspect(future: Any, outcome: Outcome = Outcome.UNKNOWN) -> None:
    with pytest.raises(WorkerSuspectError) as caught:
        future.wait()
    assert caught.value.outcome is outcome
    assert caught.value.worker == "worker1"


def stall_threads(seconds: float) -> None:
    """Keeps all other threads from running."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
