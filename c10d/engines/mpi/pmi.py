"""Lets MPI processes find each other without mpiexec: the server's side of MPICH's PMI-1.

MPICH asks whoever listens at the address in PMI_PORT for its rank and for a place where all ranks leave their own
addresses. The protocol is lines of `cmd=name key=value ...`; a client is answered line by line. It is described in
MPICH's src/pmi (simple PMI, wire protocol version 1).

A client's PMI_ID is a random number that it has from the store, by which the server knows its rank; others are
sent away. Beyond PMI the server lets the ranks agree to finalize MPI: they ask to `leave` on a connection of their
own, and are answered when all have.
"""

import itertools
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

__all__ = ["PmiServer", "leave"]

LINE = 8192
"""Bytes of the longest line that is read; MPICH's are shorter than half of it, as its limits below say."""

_GOODBYE = "cmd=finalize_ack rc=0"

Fields = dict[str, str]


@final
class PmiServer:
    """Serves the ranks of one MPI world, on a thread of its own that ends with the last connection.

    Args:
        listening: a socket that listens.
        nodes: the number of each rank's node; ranks of one node share memory.
    """

    def __init__(self, listening: socket.socket, nodes: Sequence[int]) -> None:
        size = len(nodes)
        self.ids = [secrets.randbelow(2**31 - 1) for _ in range(size)]
        """The PMI_ID of each rank."""
        self.name = f"gradwire-{secrets.token_hex(8)}"
        """Of the world. MPICH makes the names of shared memory of it."""
        self._size = size
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._values: dict[str, str] = {"PMI_process_mapping": _mapping(nodes)}
        self._in_barrier: set[_Client] = set()
        self._leaving: set[_Client] = set()
        self._come: set[int] = set()
        self._alone = threading.Event()
        self._answers: dict[str, Callable[[_Client, Fields], str]] = {
            "initack": self._greet,
            "init": lambda *_: "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda *_: "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
            "get_appnum": lambda *_: "cmd=appnum appnum=0 rc=0",
            "get_my_kvsname": lambda *_: f"cmd=my_kvsname kvsname={self.name} rc=0",
            "get_universe_size": lambda *_: f"cmd=universe_size size={size} rc=0",
            "put": self._put,
            "get": self._get,
            "barrier_in": self._enter_barrier,
            "finalize": lambda *_: _GOODBYE,
            "leave": self._leave,
        }
        listening.settimeout(0.0)
        self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="gradwire-pmi", daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Waits until all ranks have gone but rank 0, whose process this is.

        MPICH says goodbye when the process exits, and waits for the answer. No thread is left to give it by then,
        so it is given ahead.
        """
        self._alone.wait(seconds)
        for client in list(self._clients):
            with suppress(OSError):
                client.connection.sendall(f"{_GOODBYE}\n".encode())

    def _serve(self) -> None:
        while len(self._come) < self._size or self._clients:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        connection.settimeout(1.0)  # of the answers, which are short
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _hear(self, client: "_Client") -> None:
        try:
            data = client.connection.recv(LINE)
            client.heard += data
            *lines, client.heard = client.heard.split(b"\n")
            if not data or len(client.heard) > LINE:
                self._drop(client)
            for line in lines:
                fields = dict(word.split("=", 1) for word in line.decode("ascii").split(" ") if word)
                command = fields["cmd"]
                if command not in {"initack", "leave"} and client.rank is None:
                    raise PermissionError("it has not said who it is")
                answer = self._answers[command](client, fields)
                if answer:
                    client.connection.sendall(f"{answer}\n".encode())
                if command == "finalize":
                    client.rank = None  # it is no loss to the others
                    self._drop(client)
        except (OSError, ValueError, KeyError):
            self._drop(client)

    def _drop(self, client: "_Client") -> None:
        """Ends a connection. If others wait in a barrier for it, MPI must end their processes: it cannot go on."""
        if client in self._clients:
            self._clients.discard(client)
            self._in_barrier.discard(client)
            self._leaving.discard(client)
            self._selector.unregister(client.connection)
            client.connection.close()
            if client.rank is not None:
                for other in list(self._in_barrier):
                    self._drop(other)
            if len(self._come) == self._size and all(each.rank == 0 for each in self._clients):
                self._alone.set()

    def _greet(self, client: "_Client", fields: Fields) -> str:
        rank = self.ids.index(int(fields["pmiid"]))
        if rank in self._come:
            raise ValueError("it is here already")
        self._come.add(rank)
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
        return self._when_all(self._in_barrier, "cmd=barrier_out rc=0")

    def _leave(self, client: "_Client", fields: Fields) -> str:
        self.ids.index(int(fields["pmiid"]))
        self._leaving.add(client)
        return self._when_all(self._leaving, "cmd=all_leave")

    def _when_all(self, come: "set[_Client]", answer: str) -> str:
        if len(come) == self._size:
            for client in come:
                client.connection.sendall(f"{answer}\n".encode())
            come.clear()
        return ""


def _mapping(nodes: Sequence[int]) -> str:
    """As PMI writes it, in blocks of (first node, how many nodes, ranks on each of them)."""
    blocks = [(node, len(list(ranks))) for node, ranks in itertools.groupby(nodes)]
    return f"(vector,{','.join(f'({node},1,{count})' for node, count in blocks)})"


@final
class _Client:
    """A connection to the server, and whose it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard = b""
        self.rank: int | None = None


def leave(address: str, pmi_id: int, seconds: float) -> bool:
    """Waits until all ranks are about to leave the world that is served at `address`; False if some are not."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), seconds) as connection:
            connection.sendall(f"cmd=leave pmiid={pmi_id}\n".encode())
            return connection.recv(64) != b""
    except OSError:
        return False
