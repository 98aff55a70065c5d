"""Tells every process of a group when another one dies or leaves.

Engines notice a death late, or never: a connection that nobody reads says nothing. So each process keeps one
connection to rank 0, on which nothing is sent but a goodbye. When a process ends in whatever way, the kernel
closes its connections; the end of a connection without a goodbye is a death. (Children that a process forks, such
as a DataLoader's workers, let go of them, for they may live longer.) Rank 0 tells the others of those that
it sees; its own they see themselves.

Rank 0 listens on the loopback address if all ranks share it, else on the one that the others reach (hosts.py). Who
connects must say a random word that the ranks have from their store. The connections are served by the process's
event loop.

Once rank 0 has left, nobody watches the others any more; a group that lacks a rank has no collectives either.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import ClassVar, final

from ..errors import ProcessGroupError
from .event_loop import acquire_event_loop
from .host_identity import hosts_of, listen
from .torch_types import TorchStore

__all__ = ["FailureDetector"]

DIED = "its process died or ended without leaving the group, or its host cannot be reached"
LEFT = "left the group"
DROPPED = "dropped the group: nothing in its program refers to it any more"
"""Why a rank that said goodbye has gone; it says the first word."""

UNREACHABLE_SECONDS = 5
"""So often the kernel asks a host that says nothing. It is taken for dead after four times as long."""

GOODBYE_SECONDS = 5.0
LINE = 256
"""Bytes of the longest line that is read."""

Notice = Callable[[int, str], None]


@final
class FailureDetector:
    """This process's part in the watch over one group. Owned by the group, which closes it.

    Args:
        store: shared by the ranks, and used by this watch alone.
        rank: this process's number.
        size: how many ranks there are.
        seconds: how long they may take to come together.
        on_lost: called with a rank and why, when it died; on a thread of its own, once for each rank.
        on_left: called likewise when a rank closed its watch, or its interpreter came to its end.

    Raises:
        ProcessGroupError: the ranks did not come together.
    """

    _all: ClassVar["weakref.WeakSet[FailureDetector]"] = weakref.WeakSet()
    """Those of this process."""

    def __init__(
        self, store: TorchStore, rank: int, size: int, seconds: float, *, on_lost: Notice, on_left: Notice
    ) -> None:
        self._rank = rank
        self._size = size
        self._on_lost = on_lost
        self._on_left = on_left
        self._gone: set[int] = set()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._threads: list[threading.Thread] = []
        self._closing = False
        # A process that ends in order has left. Not atexit: children of multiprocessing do not run that.
        self._at_exit = Finalize(None, self._leave, exitpriority=100)
        self._loop = acquire_event_loop()
        self._all.add(self)
        try:
            if rank == 0:
                self._serve(store, seconds)
            else:
                self._join(store, seconds)
        except OSError as error:  # TimeoutError is one
            self.close()
            missing = f"; there is no connection to the ranks {self._missing()}" if rank == 0 else ""
            raise ProcessGroupError(
                f"the ranks did not come together within {seconds:g} s to watch over the group: {error!r}{missing}"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self, why: str = LEFT) -> None:
        """Says goodbye, and ends the watch. Repeating it does nothing; a notice may not do it.

        why: LEFT or DROPPED.
        """
        self._at_exit.cancel()
        if not self._closing:
            self._leave(why)
            self._loop.release()
        for thread in self._threads:
            thread.join()
        # asyncio keeps this object a while longer; what it told goes now.
        self._on_lost = self._on_left = _tell_nobody

    def _leave(self, why: str = LEFT) -> None:
        self._closing = True
        with suppress(OSError):  # or late; the others see the connection end
            self._loop.run(self._say_goodbye(_word(why)), GOODBYE_SECONDS)

    @classmethod
    def let_go_in_child(cls) -> None:
        """In a process that was forked: holds none of the connections open."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        for watch in cls._all:
            sockets = [writer.get_extra_info("socket") for writer in watch._writers.values()]
            for each in [*sockets, *(watch._server.sockets if watch._server is not None else ())]:
                if each.fileno() >= 0:  # which objects here may still close: so it is kept, for nothing
                    os.dup2(nothing, each.fileno(), inheritable=False)
        os.close(nothing)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._size) if rank not in self._writers]

    # How the ranks find each other.

    def _serve(self, store: TorchStore, seconds: float) -> None:
        word = secrets.token_hex(16)
        hosts = hosts_of(store, self._rank, self._size, seconds)
        try:
            listening, host = listen(hosts, store)
        except (OSError, ProcessGroupError) as error:
            store.set("address", json.dumps(["", 0, str(error)]))
            raise
        port = listening.getsockname()[1]
        everybody = asyncio.Event()
        self._loop.run(self._listen(listening, word, everybody), seconds)
        store.set("address", json.dumps([host, port, word]))
        self._loop.run(asyncio.wait_for(everybody.wait(), seconds))

    async def _listen(self, listening: socket.socket, word: str, everybody: asyncio.Event) -> None:
        async def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            rank = await _greeted(reader, word, self._size)
            if rank is None or rank in self._writers:
                writer.close()
                return
            self._writers[rank] = writer
            _keep_alive(writer)
            writer.write(b"welcome\n")
            if not self._missing():
                everybody.set()
            self._watch(self._hear(rank, reader))

        self._server = await asyncio.start_server(arrived, sock=listening, limit=LINE)

    def _join(self, store: TorchStore, seconds: float) -> None:
        hosts_of(store, self._rank, self._size, seconds)
        store.wait(["address"], timedelta(seconds=seconds))
        host, port, word = json.loads(store.get("address"))
        if not host:
            raise ProcessGroupError(f"rank 0 cannot listen to the others: {word}")
        self._loop.run(self._connect(host, port, word), seconds)

    async def _connect(self, host: str, port: int, word: str) -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=LINE)
        self._writers[0] = writer
        _keep_alive(writer)
        writer.write(f"{word} {self._rank}\n".encode())
        if await reader.readline() != b"welcome\n":
            raise ConnectionRefusedError("rank 0 does not know this rank")
        self._watch(self._hear(0, reader))

    # What they hear from each other. All of this runs on the loop.

    def _watch(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Reads what a peer says, until the connection ends."""
        with suppress(OSError, ValueError):  # a broken connection, or one on which something else is said
            while line := await reader.readline():
                what, rank = line.decode().split()
                self._note(int(rank) if peer == 0 else peer, _REASONS.get(what))
        self._note(peer, None)

    def _note(self, rank: int, left: str | None) -> None:
        """A rank is gone; the others must know."""
        if self._closing or rank in self._gone or rank == self._rank:
            return
        self._gone.add(rank)
        for other, writer in self._writers.items():
            if self._rank == 0 and other not in self._gone:
                writer.write(f"{_word(left) if left else 'lost'} {rank}\n".encode())
        notice, why = (self._on_left, f"it {left}") if left else (self._on_lost, DIED)
        # The group fails its engines, which may take long: not on the loop.
        thread = threading.Thread(target=notice, args=(rank, why), name="gradwire-liveness", daemon=True)
        self._threads.append(thread)
        thread.start()

    async def _say_goodbye(self, word: str) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            if not writer.is_closing():
                writer.write(f"{word} {self._rank}\n".encode())
                writer.close()
        for writer in self._writers.values():
            with suppress(OSError):
                await writer.wait_closed()


def _tell_nobody(rank: int, why: str) -> None:
    """Takes the notices of a watch that is closed; there are none."""


def _word(why: str) -> str:
    return why.partition(" ")[0]


_REASONS = {_word(why): why for why in (LEFT, DROPPED)}


os.register_at_fork(after_in_child=FailureDetector.let_go_in_child)


async def _greeted(reader: asyncio.StreamReader, word: str, size: int) -> int | None:
    """The rank of one that knows the word."""
    with suppress(OSError, ValueError, TimeoutError):
        line = await asyncio.wait_for(reader.readline(), GOODBYE_SECONDS)
        said, rank = line.decode().split()
        if hmac.compare_digest(said, word) and 0 < int(rank) < size:
            return int(rank)
    return None


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Has the kernel ask now and then whether the other host is still there."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", UNREACHABLE_SECONDS),
        ("TCP_KEEPINTVL", UNREACHABLE_SECONDS),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4000 * UNREACHABLE_SECONDS),  # in milliseconds; of a notice that is not confirmed
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
