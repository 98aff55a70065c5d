"""A PMI server, by which MPICH processes find each other without mpiexec.

MPICH connects to the address in PMI_PORT, asks for its rank, and exchanges the ranks' addresses through a
key-value space of the server. Requests are lines of `cmd=name key=value ...`, each answered by a line. The
protocol is version 1 of PMI's wire protocol, described in MPICH's src/pmi (simple PMI).

A client's PMI_ID is a random number that rank 0 has given it through the group's store. It tells the server the
client's rank, and clients without one are dropped; on one host, so are those of other users. Beyond PMI, the
server lets the ranks agree to finalize MPI: each sends the command `leave` on a connection of its own, and all are
answered when all have sent it.
"""

import itertools
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from ....net.addresses import format_address
from ....net.security import Audit
from ....net.socket_owners import user_of_peer

__all__ = ["PmiServer", "leave"]

MAX_LINE_BYTES = 8192
"""Longest line that is accepted. The limits in the answer to `get_maxes` keep MPICH's below half of it."""

MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 64, 1024
"""Characters of a key and of a value; MPICH splits longer values."""

MAX_VALUES_PER_RANK = 64
"""Values that the ranks of a world may put, on average."""

GREETING_TIMEOUT_S = 2.0
"""Seconds that a connection may take to say its PMI_ID."""

MAX_STRANGERS = 64
"""Connections, beyond one for each rank, that may be open without a PMI_ID; further ones are closed."""

ACCEPT_PAUSE_S = 0.1
"""Seconds after which a connection that could not be accepted is tried again."""

LISTENER = "pmi"
"""What the audit log calls the server."""

_FINALIZE_ANSWER = "cmd=finalize_ack rc=0"

Fields = dict[str, str]

log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """A client does not keep to the protocol, or is no rank of the world."""


@final
class PmiServer:
    """Serves the ranks of one MPI world, on a thread that ends with the last connection.

    `nodes` has for each rank the number of its node; ranks on one node share memory. With `is_of_user`, all ranks
    are processes of this user on this network, and nobody else is served.
    """

    def __init__(self, listener: socket.socket, nodes: Sequence[int], *, is_of_user: bool = False) -> None:
        size = len(nodes)
        self.ids = [secrets.randbelow(2**31 - 1) for _ in range(size)]
        """The PMI_ID of each rank."""
        self.audit = Audit("rank 0")
        """Records who connects."""
        self.name = f"gradwire-{secrets.token_hex(8)}"
        """Name of the world. MPICH derives the names of its shared memory from it."""
        self._size = size
        self._is_of_user = is_of_user
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
            "get_maxes": lambda *_: (
                f"cmd=maxes kvsname_max=256 keylen_max={MAX_KEY_LENGTH} vallen_max={MAX_VALUE_LENGTH} rc=0"
            ),
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

        MPICH in this process sends `finalize` when the process exits, and waits for the answer. The server's
        thread no longer runs by then, so the answer is sent in advance.
        """
        self._others_gone.wait(timeout)
        for client in list(self._clients):
            with suppress(OSError):
                client.connection.sendall(f"{_FINALIZE_ANSWER}\n".encode())

    def _serve(self) -> None:
        while len(self._joined) < self._size or self._clients:
            latest = time.monotonic() - GREETING_TIMEOUT_S  # what has come is read before
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None:
                    self._accept()
                elif key.data in self._clients:  # not dropped in this round
                    self._receive(key.data)
            self._drop_strangers(latest)
        self._selector.close()
        self._listener.close()
        self.audit.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:  # the client has gone, or no descriptors are left
            log.warning("cannot accept a connection to the PMI server: %s", error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        peer = format_address(*address[:2])
        self.audit.connect(LISTENER, peer)
        if self._is_of_user and (user := user_of_peer(connection)) != os.geteuid():
            whose = f"of user {user}" if user is not None else "of an unknown user"
            self.audit.deny(LISTENER, f"its process is {whose}", peer=peer)
            connection.close()
            return
        if sum(client.rank is None for client in self._clients) >= MAX_STRANGERS + self._size:
            self.audit.limit(LISTENER, f"MAX_STRANGERS={MAX_STRANGERS}", peer=peer)
            connection.close()
            return
        connection.settimeout(1.0)  # for sending answers, which are short
        client = _Client(connection, peer)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _strangers(self) -> "list[_Client]":
        """Returns the clients that have said nothing valid yet."""
        return [each for each in self._clients if each.rank is None and each not in self._finalizing]

    def _seconds_left(self) -> float | None:
        """Returns the time until the first stranger is dropped; None if there is none."""
        since = [each.connected for each in self._strangers()]
        return max(0.0, min(since) + GREETING_TIMEOUT_S - time.monotonic()) if since else None

    def _drop_strangers(self, latest: float) -> None:
        """Drops clients that have taken too long to say who they are: those that connected until `latest`."""
        for each in self._strangers():
            if each.connected <= latest:
                self._deny(each, f"no PMI_ID within {GREETING_TIMEOUT_S:g} s")

    def _receive(self, client: "_Client") -> None:
        try:
            data = client.connection.recv(MAX_LINE_BYTES)
            client.received += data
            *lines, client.received = client.received.split(b"\n")
            if len(client.received) > MAX_LINE_BYTES:
                raise _RefusedError(f"a line has more than {MAX_LINE_BYTES} bytes")
            if not data:
                self._drop(client)
            for line in lines:
                fields = dict(word.split("=", 1) for word in line.decode("ascii").split(" ") if word)
                command = fields["cmd"]
                if command not in {"initack", "leave"} and client.rank is None:
                    raise _RefusedError("the client has not sent initack")
                answer = self._handlers[command](client, fields)
                if answer:
                    client.connection.sendall(f"{answer}\n".encode())
                if command == "finalize":
                    client.rank = None  # leaves in good order, so a barrier need not fail
                    self._drop(client)
                    return  # whatever it says after that
        except OSError:  # it has gone
            self._drop(client)
        except _RefusedError as refusal:
            self._deny(client, refusal)
        except (ValueError, KeyError):  # whose texts may have the PMI_ID
            self._deny(client, "its request is malformed")

    def _deny(self, client: "_Client", reason: object) -> None:
        worker = f"rank {client.rank}" if client.rank is not None else ""
        self.audit.deny(LISTENER, reason, peer=client.peer, worker=worker)
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
            if len(self._joined) == self._size and not any(each.rank for each in self._clients):
                self._others_gone.set()

    def _greet(self, client: "_Client", fields: Fields) -> str:
        rank = self._rank_of(fields)
        if rank in self._joined:
            raise _RefusedError(f"rank {rank} is connected already")
        self._joined.add(rank)
        client.rank = rank
        self.audit.authenticate(LISTENER, client.peer, f"rank {rank}")
        return f"cmd=initack rc=0\ncmd=set size={self._size}\ncmd=set rank={client.rank}\ncmd=set debug=0"

    def _rank_of(self, fields: Fields) -> int:
        pmi_id = int(fields["pmiid"])
        if pmi_id not in self.ids:
            raise _RefusedError("its PMI_ID is of no rank")
        return self.ids.index(pmi_id)

    def _put(self, _: "_Client", fields: Fields) -> str:
        key, value = fields["key"], fields["value"]
        if len(key) > MAX_KEY_LENGTH or len(value) > MAX_VALUE_LENGTH:
            raise _RefusedError("a key or a value is longer than get_maxes says")
        if len(self._values) > MAX_VALUES_PER_RANK * self._size and key not in self._values:
            raise _RefusedError("there are too many values")
        self._values[key] = value
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
        self._rank_of(fields)
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
    """A connection to the server. `rank` is that of its client, once it is known."""

    def __init__(self, connection: socket.socket, peer: str = "") -> None:
        self.connection = connection
        self.peer = peer
        self.connected = time.monotonic()
        self.received = b""  # an incomplete line
        self.rank: int | None = None


def leave(address: str, pmi_id: int, timeout: float) -> bool:
    """Tells the server that a rank leaves the world. Returns whether all ranks do within `timeout` seconds."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout) as connection:
            connection.sendall(f"cmd=leave pmiid={pmi_id}\n".encode())
            return connection.recv(64) != b""
    except OSError:
        return False
