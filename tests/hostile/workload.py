"""A job with one of everything that listens: agents and their sockets, a store, a failure detector, and PMI.

Its workers call each other and reduce tensors all the while, until `finish`.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from gradwire import c10d, rpc
from gradwire.c10d import Credentials
from gradwire.c10d.groups.failure_detector import FailureDetector
from gradwire.net.user_sockets import store_socket_name
from gradwire.rpc.contracts.agent import current_agent

from tests.c10d.members import total
from tests.hostile.listeners import Listener, find_listeners
from tests.remote_functions import add, identity, wait_until
from tests.workers import Worker

__all__ = ["AGENT", "ENGINE", "FAILURE_DETECTOR", "PMI", "SOCKETS", "STORE", "UNKNOWN", "Place", "Workload"]

AGENT = "gRPC server of an agent"
SOCKETS = "sockets of an agent beside gRPC"
STORE = "store"
FAILURE_DETECTOR = "failure detector"
PMI = "PMI"
ENGINE = "the engine's own"
"""What MPI and Gloo open while they connect the ranks of a group."""
UNKNOWN = "unknown"

LARGE = (1 << 20) // 4 + 1
"""The number of floats that travel apart from envelopes."""

CALL_INTERVAL_S = 0.1
"""Seconds between calls, for which the processor is left to the attacks."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A listening socket of the job, the rank of its process, and its kind."""

    listener: Listener
    rank: int
    kind: str


class Workload:
    """Workers named worker0, worker1, … in an RPC group and a process group.

    Args:
        members: the workers.
        urls: of two stores, which worker 0 hosts: one for each group.
        backend: of the process group.
        credentials: those of each worker.
        insecure: whether the process group is allowed without credentials.
        options: of RpcBackendOptions.
    """

    def __init__(
        self,
        members: Sequence[Worker],
        urls: tuple[str, str],
        backend: str,
        credentials: Sequence[Credentials | None],
        *,
        insecure: bool = False,
        **options: Any,
    ) -> None:
        self.members = members
        ports = [int(url.rpartition(":")[2]) for url in urls]
        self._stores = {f":{port}": STORE for port in ports} | {store_socket_name(port): STORE for port in ports}
        self._engine: frozenset[Listener] = frozenset()
        size = len(members)
        starting = [
            each.start(_init_rpc, rank, size, urls[0], credentials[rank], options)
            for rank, each in enumerate(members)
        ]
        for pending in starting:
            pending.result()
        before = {place.listener for place in self.places()}
        starting = [
            each.start(_init_group, backend, rank, size, urls[1], credentials[rank], insecure)
            for rank, each in enumerate(members)
        ]
        for pending in starting:
            pending.result()
        self.on_all(dist.barrier)
        unknown = {place.listener for place in self.places() if place.kind == UNKNOWN}
        self._engine = frozenset(unknown - before)
        self.on_all(_start_calls)
        self.wait_for_calls()

    def on_all(self, function: Any, *args: Any) -> list[Any]:
        """Runs a function on all workers at once; returns its results."""
        return [each.result() for each in [member.start(function, *args) for member in self.members]]

    def places(self) -> list[Place]:
        """Returns what the workers listen on now."""
        found = []
        for rank, member in enumerate(self.members):
            kinds = member.run(_own_listeners) | (self._stores if rank == 0 else {})
            for listener in find_listeners(member.pid):
                kind = next((kind for end, kind in kinds.items() if listener.name.endswith(end)), UNKNOWN)
                found.append(Place(listener, rank, ENGINE if listener in self._engine else kind))
        return found

    def hello(self, rank: int) -> bytes:
        """Returns what a worker says of itself to others."""
        return self.members[rank].run(_own_hello)

    def wait_for_bulk_connection(self, rank: int, other: int) -> None:
        """Waits until a worker sends large tensors to another one by connections of their own."""
        self.members[rank].run(_wait_for_bulk_connection, other)

    def nonce(self, rank: int, other: int) -> bytes:
        """Returns what admits a worker to a socket of another one, on their host and within some seconds, once.

        Args:
            rank: the worker that accepts the socket.
            other: the worker that may connect.
        """
        return self.members[rank].run(_offer_socket, f"worker{other}")

    def memory(self) -> list[int]:
        """Returns how many MiB of memory each worker has resident."""
        return [psutil.Process(member.pid).memory_info().rss // MIB for member in self.members]

    def descriptors(self) -> list[int]:
        """Returns how many files each worker has open."""
        return [psutil.Process(member.pid).num_fds() for member in self.members]

    def wait_for_calls(self, count: int = 10) -> None:
        """Waits until each worker has called all others so many times more."""
        self.on_all(_wait_for_calls, count)

    def reduce(self) -> None:
        """Has the process group add up the ranks."""
        assert self.on_all(total) == [sum(range(len(self.members)))] * len(self.members)

    def finish(self) -> None:
        """Ends the calls, the groups and the processes, all of which have to end well."""
        self.on_all(_finish_calls)
        self.reduce()
        self.on_all(c10d.destroy_process_group)
        self.on_all(rpc.shutdown)
        for member in self.members:
            member.ask_to_exit()
        for member in self.members:
            member.process.join(60)
            assert member.process.exitcode == 0


# What follows runs on the workers.


def _init_rpc(rank: int, size: int, url: str, credentials: Credentials | None, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    settings = rpc.RpcBackendOptions(init_method=url, credentials=credentials, **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=settings)


def _init_group(
    backend: str, rank: int, size: int, url: str, credentials: Credentials | None, insecure: bool
) -> None:
    c10d.init_process_group(backend, url, 60, size, rank, insecure=insecure, credentials=credentials)


def _network() -> Any:
    agent: Any = current_agent()
    return agent._network


def _own_hello() -> bytes:
    return _network()._handshake.hello.SerializeToString()  # type: ignore[no-any-return]


_offers: list[Any] = []
"""An offer stands as long as somebody keeps it."""


def _offer_socket(worker: str) -> bytes:
    async def offer() -> bytes:
        offered = _network()._sockets.offer(rpc.get_worker_info(worker), same_host=True)
        _offers.append(offered)
        return bytes(offered.offer.nonce)

    return _network()._events.run(offer(), 20)  # type: ignore[no-any-return]


def _own_listeners() -> dict[str, str]:
    """Returns the kinds of the listening sockets of gradwire in this process but stores, by their names."""
    network = _network()
    kinds = {network.peers.of(network.me).member.address.removeprefix("unix:"): AGENT}
    for each in network._sockets._listeners.values():
        kinds[_name(each)] = SOCKETS
    for detector in FailureDetector._instances:
        for each in detector._server.sockets if detector._server is not None else ():
            kinds[_name(each)] = FAILURE_DETECTOR
    mpi = sys.modules.get("gradwire.c10d.engines.mpi.world")
    world = mpi.MpiWorld._current if mpi is not None else None
    if world is not None and world._server is not None:
        kinds[_name(world._server._listener)] = PMI
    return kinds


def _name(listening: Any) -> str:
    name = listening.getsockname()
    return f"@{name[1:].decode()}" if isinstance(name, bytes) else f"{name[0]}:{name[1]}"


class _Calls(threading.Thread):
    """Calls all other workers again and again, with small arguments and, now and then, with large ones."""

    def __init__(self) -> None:
        super().__init__(name="calls")
        me = rpc.get_worker_info()
        self._others = [each.name for each in rpc.get_worker_infos() if each.name != me.name]
        self._stopped = threading.Event()
        self.rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.wait(CALL_INTERVAL_S):
                self._call_all()
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def _call_all(self) -> None:
        for other in self._others:
            assert rpc.rpc_sync(other, add, (1, 2)) == 3
            if self.rounds % 5 == 0:
                assert rpc.rpc_sync(other, identity, (torch.ones(LARGE),)).sum() == LARGE

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self._stopped.set()
        self.join()
        self.check()


_calls: list[_Calls] = []


def _wait_for_bulk_connection(other: int) -> None:
    network = _network()
    wait_until(lambda: network.peers.by_id[other].channels.bulk.is_connected)


def _start_calls() -> None:
    _calls.append(_Calls())
    _calls[-1].start()


def _wait_for_calls(count: int) -> None:
    calls = _calls[-1]
    enough = calls.rounds + count
    wait_until(lambda: calls.rounds >= enough or calls.error is not None, 40)
    calls.check()


def _finish_calls() -> None:
    _calls.pop().finish()
    assert rpc.debug_info()["lost_workers"] == {}
