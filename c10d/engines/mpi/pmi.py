"""A PMI server, by which MPICH processes find each other without mpiexec.

MPICH connects to the address in PMI_PORT, asks for its rank, and exchanges the ranks' addresses through a
key-value space of the server. Requests are lines of `cmd=name key=value ...`, each answered by a line. The
protocol is version 1 of PMI's wire protocol, described in MPICH's src/pmi (simple PMI).

A client's PMI_ID is a random number that it has from the group's store; the server knows its rank by it, and drops
clients without one. Beyond PMI, the server lets the ranks agree to finalize MPI: each sends the command `leave` on
a connection of its own, and all are answered when all have sent it.
"""

import itertools
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

__all__ = ["PmiServer", "leave"]

MAX_LINE_BYTES = 8192
"""Longest line that is accepted. The limits in the answer to `get_maxes` keep MPICH's below half of it."""

GREETING_TIMEOUT_S = 2.0
"""Seconds that a connection may take to say its PMI_ID."""

MAX_STRANGERS = 64
"""Connections, beyond one of each rank, that may not have said it yet; further ones are closed."""

ACCEPT_PAUSE_S = 0.1
"""Seconds after which a connection that could not be accepted is tried again."""

_FINALIZE_ANSWER = "cmd=finalize_ack rc=0"

Fields = dict[str, str]

log = logging.getLogger(__name__)


@final
class PmiServer:
    """Serves the ranks of one MPI world, on a thread that ends with the last connection.

    Args:
        listener: a listening socket.
        nodes: for each rank the number of its node; ranks on one node share memory.
    """

    def __init__(self, listener: socket.socket, nodes: Sequence[int]) -> None:
        size = len(nodes)
        self.ids = [secrets.randbelow(2**31 - 1) for _ in range(size)]
        """The PMI_ID of each rank."""
        self.name = f"gradwire-{secrets.token_hex(8)}"
        """Name of the world. MPICH derives the names of its shared memory from it."""
        self._size = size
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._values: dict[str, str] = {"PMI_process_mapping": _mapping(nodes)}
        self._in_barrier: set[_Client] = set()
        self._finalizing: set[_Client] = set()
        self._joined: set[int] = set()  # ranks that have connected
        self._others_gone = threading.Event()
        self._handlers: dict[str, Callable[[_Client, Fields], str]] = {
            "initack": self._greet,
            "init": lambda *_: "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda *_: "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
            "get_appnum": lambda *_: "cmd=appnum appnum=0 rc=0",
            "get_my_kvsname": lambda *_: f"cmd=my_kvsname kvsname={self.name} rc=0",
            "get_universe_size": lambda *_: f"cmd=universe_size size={size} rc=0",
            "put": self._put,
            "get": self._get,
            "barrier_in": self._enter_barrier,
            "finalize": lambda *_: _FINALIZE_ANSWER,
            "leave": self._leave,
        }
        listener.settimeout(0.0)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="gradwire-pmi", daemon=True)
        self._thread.start()

    def finish(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until all ranks but rank 0, which runs in this process, have disconnected.

        MPICH sends `finalize` when the process exits, and waits for the answer. No thread can answer it by then,
        so the answer is sent in advance.
        """
        self._others_gone.wait(timeout)
        for client in list(self._clients):
            with suppress(OSError):
                client.connection.sendall(f"{_FINALIZE_ANSWER}\n".encode())

    def _serve(self) -> None:
        while len(self._joined) < self._size or self._clients:
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None:
                    self._accept()
                elif key.data in self._clients:  # not dropped in this round
                    self._receive(key.data)
            self._drop_strangers()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the client has gone, or no descriptors are left
            log.warning("cannot accept a connection to the PMI server: %s", error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        if sum(client.rank is None for client in self._clients) >= MAX_STRANGERS + self._size:
            connection.close()
            return
        connection.settimeout(1.0)  # for sending answers, which are short
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _strangers(self) -> "list[_Client]":
        """Returns the clients that have said nothing valid yet, in the order in which they have connected."""
        return [each for each in self._clients if each.rank is None and each not in self._finalizing]

    def _seconds_left(self) -> float | None:
        """Returns the time until the first stranger is dropped; None if there is none."""
        since = [each.connected for each in self._strangers()]
        return max(0.0, min(since) + GREETING_TIMEOUT_S - time.monotonic()) if since else None

    def _drop_strangers(self) -> None:
        """Drops clients that have taken too long to say who they are."""
        latest = time.monotonic() - GREETING_TIMEOUT_S
        for each in self._strangers():
            if each.connected <= latest:
                self._drop(each)

    def _receive(self, client: "_Client") -> None:
        try:
            data = client.connection.recv(MAX_LINE_BYTES)
            client.received += data
            *lines, client.received = client.received.split(b"\n")
            if not data or len(client.received) > MAX_LINE_BYTES:
                self._drop(client)
            for line in lines:
                fields = dict(word.split("=", 1) for word in line.decode("ascii").split(" ") if word)
                command = fields["cmd"]
                if command not in {"initack", "leave"} and client.rank is None:
                    raise PermissionError("the client has not sent initack")
                answer = self._handlers[command](client, fields)
                if answer:
                    client.connection.sendall(f"{answer}\n".encode())
                if command == "finalize":
                    client.rank = None  # leaves in good order, so a barrier need not fail
                    self._drop(client)
        except (OSError, ValueError, KeyError):
            self._drop(client)

    def _drop(self, client: "_Client") -> None:
        """Closes a connection, and those of ranks that wait for it in a barrier: MPI then ends their processes."""
        if client in self._clients:
            self._clients.discard(client)
            self._in_barrier.discard(client)
            self._finalizing.discard(client)
            self._selector.unregister(client.connection)
            client.connection.close()
            if client.rank is not None:
                for other in list(self._in_barrier):
                    self._drop(other)
            if len(self._joined) == self._size and all(each.rank == 0 for each in self._clients):
                self._others_gone.set()

    def _greet(self, client: "_Client", fields: Fields) -> str:
        rank = self.ids.index(int(fields["pmiid"]))
        if rank in self._joined:
            raise ValueError("this rank is connected already")
        self._joined.add(rank)
        client.rank = rank
        return f"cmd=initack rc=0\ncmd=set size={self._size}\ncmd=set rank={client.rank}\ncmd=set debug=0"

    def _put(self, _: "_Client", fields: Fields) -> str:
        self._values[fields["key"]] = fields["value"]
        return "cmd=put_result rc=0 msg=success"

    def _get(self, _: "_Client", fields: Fields) -> str:
        value = self._values.get(fields["key"])
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _enter_barrier(self, client: "_Client", _: Fields) -> str:
        self._in_barrier.add(client)
        return self._answer_when_complete(self._in_barrier, "cmd=barrier_out rc=0")

    def _leave(self, client: "_Client", fields: Fields) -> str:
        self.ids.index(int(fields["pmiid"]))
        self._finalizing.add(client)
        return self._answer_when_complete(self._finalizing, "cmd=all_leave")

    def _answer_when_complete(self, clients: "set[_Client]", answer: str) -> str:
        if len(clients) == self._size:
            for client in clients:
                client.connection.sendall(f"{answer}\n".encode())
            clients.clear()
        return ""


def _mapping(nodes: Sequence[int]) -> str:
    """Returns PMI's notation for nodes: blocks of (first node, number of nodes, ranks on each node)."""
    blocks = [(node, len(list(ranks))) for node, ranks in itertools.groupby(nodes)]
    return f"(vector,{','.join(f'({node},1,{count})' for node, count in blocks)})"


@final
class _Client:
    """A connection to the server, and the rank of its client once that is known."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connected = time.monotonic()
        self.received = b""  # an incomplete line
        self.rank: int | None = None


def leave(address: str, pmi_id: int, timeout: float) -> bool:
    """Tells the server at `address` that a rank is about to leave the world, and waits until all ranks are.

    Returns:
        Whether all ranks were about to leave within `timeout` seconds.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout) as connection:
            connection.sendall(f"cmd=leave pmiid={pmi_id}\n".encode())
            return connection.recv(64) != b""
    except OSError:
        return False
