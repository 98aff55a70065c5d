"""Detects when a process of a group dies or leaves, and tells every rank.

Engines detect a death late or never, because they do not read connections on which they expect nothing. So each
rank keeps one more connection to rank 0, which carries nothing but goodbyes and failures. However a process ends,
the kernel closes its connections. If a connection ends without a goodbye, the process has died, and rank 0 tells
the other ranks. A rank whose group has failed says so and keeps its connection, since its process may still die.
(Processes that a rank forks, such as a DataLoader's workers, may outlive it. So they close their copies of
the connections.)

Ranks of one user on one network are connected by a unix socket in the abstract namespace; both ends ask the kernel
whose process is at the other one, and who is a stranger is let go before anything of him is read. Else rank 0
listens on the address at which the others reach it (see rendezvous/hosts.py). Whoever connects must send a random
token, which the ranks read from their store. With credentials, the connections have TLS, and both ends show
certificates of the job. The process's event loop serves the connections.

After rank 0 has left, deaths of other ranks are no longer detected; but a group that lacks a rank can run no
collectives either.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, ClassVar, NamedTuple, final

from ...errors import ProcessGroupError
from ...net.event_loop import acquire_event_loop
from ...net.exchanged_values import parse_list, unexpected_value
from ...net.host_identity import HostIdentity, can_share_loopback
from ...net.inheritance import at_fork
from ...net.security import SHARED_HOST_NAME, Audit, Identity, certified_names, printable
from ...net.socket_peers import address_of_peer, half_of_descriptors, is_of_same_user, round_trip_s
from ..engines.base import DIED
from ..rendezvous.hosts import gather_consenting_hosts, listen
from ..torch_types import TorchStore

__all__ = ["DROPPED", "LEFT", "FailureDetector", "Message", "parse_message"]

KEEPALIVE_INTERVAL_S = 5
"""Seconds between the kernel's keepalive probes. An unreachable host counts as dead after four intervals."""

MESSAGE_TIMEOUT_S = 5.0
"""Seconds that this rank takes to say goodbye."""

GOODBYE_LINGER_S = 1.0
"""Seconds that the others have to read the goodbye. If they wrote to a connection that is closed, asyncio would
drop what they have not read of it, and they would take this rank for dead."""

TOKEN_TIMEOUT_S = 2.0
"""Seconds that a new connection may take to say its token, with the handshake of TLS, besides two round trips."""

MAX_UNADMITTED = 1024
"""Connections that may not have said their token yet; further ones are closed. All ranks may connect at once. If
half of the file descriptors that the process may have are fewer, that is the limit."""

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before those too many are closed, each of which takes a file descriptor."""

MAX_LINE_BYTES = 1024

MAX_REASON_BYTES = 512
"""Bytes of the text that says why a rank has left or failed; longer texts are cut."""

ABSTRACT = "@"
"""What the address of a unix socket in the abstract namespace begins with, in front of its name."""

OTHER_USER = "its process is of another user"

LISTENER = "failure_detector"
"""What the audit log calls it."""

LEFT = "left the group"

DROPPED = "dropped the group: nothing in its program refers to it any more"
"""How a rank has left, unless it says more."""

Callback = Callable[[int, str], None]


class Message(NamedTuple):
    """What one rank tells another: that a rank is `"lost"`, has `"left"`, or has `"failed"`, and why."""

    keyword: str
    rank: int
    reason: str

    def to_line(self) -> bytes:
        """Returns the line that is sent."""
        reason = " ".join(self.reason.split()).encode(errors="replace")[:MAX_REASON_BYTES]
        return f"{self.keyword} {self.rank} ".encode() + reason + b"\n"


def parse_message(line: bytes, size: int) -> Message:
    """Reads a line of a rank of a group of `size` ranks; raises ValueError for a line that is no message."""
    keyword, rank, *reason = line.decode(errors="replace").split(maxsplit=2)
    if keyword not in {"lost", "left", "failed"} or not 0 <= int(rank) < size:
        raise ValueError(f"{printable(keyword)} of rank {int(rank)} of {size} is no message")
    return Message(keyword, int(rank), printable(reason[0].strip() if reason else LEFT, MAX_REASON_BYTES))


@final
class FailureDetector:
    """The failure detector of one group on one rank. Owned by the group, which closes it.

    Args:
        store: shared by the ranks, and used by this failure detector alone.
        timeout_s: seconds within which all ranks must have connected.
        insecure: whether this rank allows connections to other hosts without credentials.
        identity: what this rank shows on its connections, and demands; None for connections without TLS.
        on_lost: called with a rank and the reason when its process has died. Runs on a thread of its own, once for
            each rank.
        on_left: called in the same way when a rank has closed its failure detector, or its interpreter has exited;
            and before that if its group has failed.

    Raises ProcessGroupError if some ranks did not connect in time, or are on other hosts without `insecure`.
    """

    _instances: ClassVar["weakref.WeakSet[FailureDetector]"] = weakref.WeakSet()
    """All of this process."""

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        insecure: bool = False,
        identity: Identity | None = None,
        on_lost: Callback,
        on_left: Callback,
    ) -> None:
        self.audit = Audit(f"rank {rank}")
        """Records who connects to rank 0."""
        self._identity = identity
        self._rank = rank
        self._size = size
        self._on_lost = on_lost
        self._on_left = on_left
        self._gone: set[int] = set()
        self._failed: set[int] = set()
        self._told: list[Message] = []
        """What rank 0 has told the ranks that were connected then, for those that connect later."""
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._unadmitted: set[asyncio.Task[Any]] = set()  # each serves a connection without a rank
        self._threads: list[threading.Thread] = []
        self._closing = False
        # Says goodbye at interpreter exit. Not by atexit, which children of multiprocessing do not run.
        self._at_exit = Finalize(None, self._leave, exitpriority=100)
        self._event_loop = acquire_event_loop()
        self._instances.add(self)
        try:
            hosts = gather_consenting_hosts(
                store,
                rank,
                size,
                lambda keys: store.wait(keys, timedelta(seconds=timeout_s)),
                insecure=insecure or identity is not None,
                what="the failure detector",
            )
            if rank == 0:
                self._serve(store, hosts, timeout_s)
            else:
                self._join(store, timeout_s)
        except OSError as error:  # includes TimeoutError
            self.close()
            missing = f"; these ranks have not connected: {self._missing()}" if rank == 0 else ""
            raise ProcessGroupError(
                f"the ranks did not connect to rank 0 within {timeout_s:g} s: {error!r}{missing}"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self, reason: str = LEFT) -> None:
        """Says goodbye and closes the connections. Further calls do nothing. The callbacks must not call it.

        The reason is LEFT or DROPPED, or a text that begins with LEFT.
        """
        self._at_exit.cancel()
        if not self._closing:
            self._leave(reason)
            self._event_loop.release()
            self.audit.close()
        for thread in self._threads:
            thread.join()
        # asyncio keeps this object alive for a while; the group that the callbacks refer to is released now.
        self._on_lost = self._on_left = lambda *_: None

    def _leave(self, reason: str = LEFT) -> None:
        self._closing = True
        with suppress(OSError):  # also on timeout: the other ranks see the connection end
            self._event_loop.run(self._say_goodbye(reason), MESSAGE_TIMEOUT_S)

    def announce_failure(self, reason: str) -> None:
        """Tells the other ranks, without waiting, why the group has failed here; the reason begins with LEFT."""
        self._event_loop.call_soon(partial(self._tell_others, Message("failed", self._rank, reason)))

    @classmethod
    def close_in_child(cls) -> None:
        """In a forked process, closes its copies of all connections."""
        null = os.open(os.devnull, os.O_RDONLY)
        for detector in cls._instances:
            sockets = [writer.get_extra_info("socket") for writer in detector._writers.values()]
            for each in [*sockets, *(detector._server.sockets if detector._server is not None else ())]:
                if each.fileno() >= 0:  # replaced, not closed: objects in this process may still close the number
                    os.dup2(null, each.fileno(), inheritable=False)
        os.close(null)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._size) if rank not in self._writers]

    # Connecting.

    def _serve(self, store: TorchStore, hosts: Sequence[HostIdentity], timeout_s: float) -> None:
        """On rank 0: listens, and waits until all other ranks have connected."""
        token = secrets.token_hex(16)
        try:
            if self._identity is None and can_share_loopback(hosts) and len({each.user for each in hosts}) == 1:
                listening, host, port = *_listen_for_user(), 0
            else:
                listening, host = listen(hosts, store)
                port = listening.getsockname()[1]
        except (OSError, ProcessGroupError) as error:
            store.set("address", json.dumps(["", 0, str(error)]))
            raise
        all_connected = asyncio.Event()
        self._event_loop.run(self._listen(listening, token, all_connected), timeout_s)
        store.set("address", json.dumps([host, port, token]))
        self._event_loop.run(asyncio.wait_for(all_connected.wait(), timeout_s))

    async def _listen(self, listening: socket.socket, token: str, all_connected: asyncio.Event) -> None:
        async def on_connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._closing:
                writer.close()
                return
            connection = writer.get_extra_info("socket")
            peer = address_of_peer(connection)
            self.audit.connect(LISTENER, peer)
            if not is_of_same_user(connection):
                self.audit.deny(LISTENER, OTHER_USER, peer=peer)
                writer.close()
                return
            if len(self._unadmitted) >= (limit := half_of_descriptors(MAX_UNADMITTED)):
                self.audit.limit(LISTENER, f"MAX_UNADMITTED={limit}", peer=peer)
                writer.close()
                return
            task = asyncio.current_task()
            assert task is not None
            self._unadmitted.add(task)
            try:
                rank = await self._find_rank(reader, writer, token)
            except (OSError, ValueError) as error:
                if not isinstance(error, ConnectionError):  # else it has left
                    reason = f"no token within {TOKEN_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error
                    self.audit.deny(LISTENER, reason, peer=peer)
                if isinstance(error, _RefusedError):
                    writer.write(f"{error}\n".encode())
                writer.close()
                return
            except asyncio.CancelledError:  # by _say_goodbye; Python 3.11 would log it if it were raised again
                writer.transport.abort()  # with TLS, close() would wait for the peer
                return
            finally:
                self._unadmitted.discard(task)
            self.audit.authenticate(LISTENER, peer, f"rank {rank}")
            self._writers[rank] = writer
            _enable_keepalive(writer)
            writer.write(b"welcome\n")
            writer.write(b"".join(each.to_line() for each in self._told))
            if not self._missing():
                all_connected.set()
            self._start_task(self._read_from(rank, reader))

        start: Any = asyncio.start_unix_server if listening.family == socket.AF_UNIX else asyncio.start_server
        self._server = await start(on_connected, sock=listening, limit=MAX_LINE_BYTES, backlog=ACCEPTED_AT_ONCE)
        listening.listen(socket.SOMAXCONN)  # asyncio has had as few wait as it accepts at a time

    async def _find_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> int:
        """Returns the rank that has made a new connection.

        Raises ValueError if it does not say who it is, the rank has a connection, or rank 0 is closing
        (_RefusedError if it may know that); OSError if it takes too long, the handshake of TLS fails, or the peer
        has left.
        """
        async with asyncio.timeout(TOKEN_TIMEOUT_S + 2 * round_trip_s(writer.get_extra_info("socket"))):
            if self._identity is not None:  # at once, before anything is read
                await writer.start_tls(self._identity.server_context())
                if SHARED_HOST_NAME not in certified_names(writer.get_extra_info("ssl_object").getpeercert()):
                    raise _RefusedError(f"its certificate is not for {SHARED_HOST_NAME}")
            rank = await _read_rank(reader, token, self._size)
        if rank in self._writers:
            raise _RefusedError(f"rank {rank} is connected already")
        if self._closing:
            raise _RefusedError("rank 0 has given up or left")
        return rank

    def _join(self, store: TorchStore, timeout_s: float) -> None:
        store.wait(["address"], timedelta(seconds=timeout_s))
        host, port, token = _parse_address(store.get("address"))
        if not host:
            raise ProcessGroupError(f"rank 0 cannot listen for the other ranks: {printable(token)}")
        self._event_loop.run(self._connect(host, port, token), timeout_s)

    async def _connect(self, host: str, port: int, token: str) -> None:
        answer = b""
        tls: dict[str, Any] = {}
        if self._identity is not None:
            tls = {"ssl": self._identity.client_context(), "server_hostname": SHARED_HOST_NAME}
        while not answer:
            began = time.monotonic()
            try:
                if host.startswith(ABSTRACT):
                    name = f"\0{host.removeprefix(ABSTRACT)}"
                    reader, writer = await asyncio.open_unix_connection(name, limit=MAX_LINE_BYTES)
                else:
                    reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES, **tls)
                self._writers[0] = writer
                if not is_of_same_user(writer.get_extra_info("socket")):
                    answer = OTHER_USER.encode()
                    raise ConnectionRefusedError(f"rank 0 is not there: {OTHER_USER}")
                _enable_keepalive(writer)
                writer.write(f"{token} {self._rank}\n".encode())
                if (answer := await reader.readline()) != b"welcome\n":
                    why = f": {printable(answer.decode(errors='replace').strip())}" if answer else ""
                    raise ConnectionRefusedError(f"rank 0 refused the connection of rank {self._rank}{why}")
            except OSError:
                if answer or time.monotonic() - began < TOKEN_TIMEOUT_S:
                    raise
                for each in self._writers.values():  # the token came late: this machine, or rank 0's, is too busy
                    each.close()
        self._start_task(self._read_from(0, reader))

    # Messages. All of this runs on the event loop.

    def _start_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_from(self, peer: int, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError):  # a broken connection, or a line that is no message
            while line := await reader.readline():
                message = parse_message(line, self._size)
                if peer != 0:  # only rank 0 speaks for others
                    message = message._replace(rank=peer)
                self._handle(message)
                if message.keyword == "left" and message.rank == peer:
                    break
        self._handle(Message("lost", peer, DIED))
        self._writers[peer].close()

    def _handle(self, message: Message) -> None:
        """Calls back that a rank is gone or has failed, and on rank 0 tells the other ranks."""
        rank, known = message.rank, self._failed if message.keyword == "failed" else self._gone
        if self._closing or rank in known or rank in self._gone or rank == self._rank:
            return
        known.add(rank)
        if self._rank == 0:
            self._told.append(message)
            self._tell_others(message)
        callback, reason = self._on_left, f"it {message.reason}"
        if message.keyword == "lost":
            callback, reason = self._on_lost, DIED
        # Not on the loop: the group makes its engines fail, which may take long.
        thread = threading.Thread(
            target=callback, args=(rank, reason), name="gradwire-failure-detector", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _tell_others(self, message: Message) -> None:
        """Sends a message to all that this rank is connected to, except the rank that it is about."""
        for rank, writer in self._writers.items():
            if rank != message.rank and rank not in self._gone and not writer.is_closing():
                writer.write(message.to_line())

    async def _say_goodbye(self, reason: str) -> None:
        if self._server is not None:
            self._server.close()
        unadmitted = list(self._unadmitted)
        for task in unadmitted:
            task.cancel()
        await asyncio.gather(*unadmitted, return_exceptions=True)
        self._tell_others(Message("left", self._rank, reason))
        if self._tasks:  # until the others have read it and closed their ends: what they write must find an end
            await asyncio.wait(set(self._tasks), timeout=GOODBYE_LINGER_S)
        for task in list(self._tasks):
            task.cancel()
        writers = list(self._writers.values())
        for writer in writers:
            writer.close()
        for writer in writers:
            with suppress(OSError):
                await writer.wait_closed()


class _RefusedError(ValueError):
    """Rank 0 refuses a process that has shown a certificate of the job's CA or the token, and tells it why."""


at_fork(in_child=FailureDetector.close_in_child)


def _parse_address(text: bytes) -> tuple[str, int, str]:
    """Returns the host, port and token that rank 0 has put into the store; raises ProcessGroupError for others."""
    try:
        host, port, token = parse_list(text, str, int, str)
        if not 0 <= port < 65536:
            raise ValueError("no port")
    except ValueError:
        raise ProcessGroupError(unexpected_value(text, "the address of rank 0's failure detector")) from None
    return host, port, token


async def _read_rank(reader: asyncio.StreamReader, token: str, size: int) -> int:
    """Returns the rank of a connection's first line, "TOKEN RANK". Raises ValueError for any other line."""
    line = await reader.readline()
    if not line:
        raise ConnectionResetError
    received, _, rank = line.strip().partition(b" ")
    if not hmac.compare_digest(received, token.encode()):
        raise ValueError("it has not said the token")
    if not rank.isdigit() or not 0 < int(rank) < size:
        raise ValueError("it has not said its rank")
    return int(rank)


def _listen_for_user() -> tuple[socket.socket, str]:
    """Opens a listening unix socket in the abstract namespace. Returns it, and what the other ranks are told."""
    listening = socket.socket(socket.AF_UNIX)
    name = f"gradwire-group-{secrets.token_hex(16)}"
    try:
        listening.bind(f"\0{name}")
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening, f"{ABSTRACT}{name}"


def _enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Has the kernel probe the peer's host while the connection is idle; see tcp(7)."""
    connection = writer.get_extra_info("socket")
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 4000 * KEEPALIVE_INTERVAL_S),  # milliseconds; for what is not acknowledged
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
