"""What workers do in the tests of links."""

import ctypes
import socket
from dataclasses import replace
from typing import Any

import pytest
from gradwire import Outcome, rpc
from gradwire.errors import RpcError, WorkerSuspectError
from gradwire.rpc.transports.tls_socket import TlsSocket

from tests.remote_functions import add, wait_for
from tests.rpc.channels.segments import network

LIVENESS = rpc.Liveness(heartbeat=0.2, suspect_after=60.0, lease=60.0)
"""Nobody is suspect because a busy machine has stalled it; see `suspect_after`."""

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
    stream: Any = network().peers.by_id[peer].transport
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


def suspect_after(seconds: float) -> None:
    """Has this worker suspect others after so many seconds of silence."""
    heartbeats = network()._streams.heartbeats
    heartbeats._liveness = replace(heartbeats._liveness, suspect_after=seconds)


def assert_silent(future: Any) -> None:
    """Checks that a call fails because its worker is silent, after a second."""
    suspect_after(1.0)
    assert_suspect(future)
    suspect_after(LIVENESS.suspect_after)


def stall_threads(seconds: float) -> None:
    """Keeps all other threads from running."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
