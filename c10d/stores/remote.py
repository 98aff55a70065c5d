"""The connection of a process to the server of a TCPStore in another process.

A server that can be started again says so when a client joins. Then the client numbers its operations, and sends
those again that were in flight when the connection was lost: the server does each of them once (durable.py).
"""

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, final

import grpc

from ...errors import StoreError, StoreNetworkError
from ...net.addresses import allows_insecure, format_address, is_loopback, resolve
from ...net.inheritance import note_grpc, note_peer, why_grpc_is_unusable
from ...net.security import NO_CREDENTIALS_THERE, SHARED_HOST_NAME, Credentials, Identity, printable, tls_problem
from ...net.socket_owners import users_listening
from ...net.user_sockets import UNIX_SCHEME, SocketDirectory, is_listening, store_socket_name
from ...net.waiting import wait_with_warnings
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .limits import parse_outcome
from .server import CLOCK, EXECUTE, IDLE_TIMEOUT_S, MESSAGE_OPTIONS, POP

__all__ = ["ANSWER_TIMEOUT_S", "ClockOffset", "RemoteServer", "clock_offset", "offset_by"]

ANSWER_TIMEOUT_S = 60.0
"""Seconds within which a server must answer, in addition to what the operation may wait for keys."""

RESTART_TIMEOUT_S = 60.0
"""Seconds for which operations wait at most for a store that can be started again, each time that it is gone."""

RETRY_PAUSE_S = 0.05
"""Seconds before an operation is sent again: a server that is about to end still accepts connections."""

FIND_INTERVALS_S = (0.001, 0.05)
"""Seconds between the first two looks for the socket of a store on this host, and between two looks at most."""

DIAGNOSIS_INTERVAL_S = 2.0
"""Seconds without a connection after which a client checks that its credentials are those of the master."""

CLOCK_ROUNDS = 5
"""Times that a clock is read: the quickest answer says most."""

MAX_DETAILS = 1000
"""Characters of the message of a gRPC error that are shown."""

_CLIENT_OPTIONS = [
    *MESSAGE_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # a retry could run an operation twice
    # One connection per client: with a shared one, a new client would wait for the backoff of an older client.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # An operation in flight fails about 30 s after the master's host has become unreachable.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # An idle client disconnects long before the server would, which could hit an operation that it just sends.
    ("grpc.client_idle_timeout_ms", round(500 * IDLE_TIMEOUT_S)),
]

_NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""The statuses of a call that the server has not answered."""


class _GoneError(Exception):
    """The connection is lost, or cannot be made."""


@final
class _Calls:
    def __init__(self, channel: grpc.Channel) -> None:
        kinds: Any = {
            "request_serializer": Operation.SerializeToString,
            "response_deserializer": parse_outcome,
        }
        self.channel = channel
        self.execute = channel.unary_unary(EXECUTE, **kinds)
        self.clock = channel.unary_unary(CLOCK, **kinds)
        self.pop = channel.stream_stream(POP, **kinds)


@final
class RemoteServer:
    """A gRPC connection to the server in another process; without credentials, on this host by its unix socket."""

    def __init__(self, host: str, port: int, identity: Identity | None, *, insecure: bool = False) -> None:
        """Connects to nobody yet. With `insecure`, a server on this host may be another user's."""
        if why := why_grpc_is_unusable():
            raise StoreError(why)
        self._host, self._port, self._identity = host, port, identity
        self._address = format_address(host, port)
        self._is_local = identity is None and is_loopback(host)
        self._insecure = allows_insecure(insecure)
        self._directory: SocketDirectory | None = None
        """That of the socket of a server on this host, once it is there."""
        self._calls = None if self._is_local else self._connect(self._address)
        self._store = b""
        """The identity of a server that can be started again; empty for others."""
        self._client = secrets.randbits(63) + 1
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._next_number = 0
        self._unanswered: set[int] = set()
        """The numbers of the operations in flight."""

    def _connect(self, address: str) -> _Calls:
        if self._identity is None:
            return _Calls(note_grpc(grpc.insecure_channel(address, options=_CLIENT_OPTIONS)))
        options = [*_CLIENT_OPTIONS, ("grpc.ssl_target_name_override", SHARED_HOST_NAME)]
        return _Calls(note_grpc(grpc.secure_channel(address, self._identity.grpc_channel_credentials(), options)))

    def _open(self, seconds: float = 0.0) -> _Calls:
        """Returns what calls the server; waits `seconds` for the socket of one on this host."""
        if self._calls is not None:
            return self._calls
        deadline, interval = time.monotonic() + seconds, FIND_INTERVALS_S[0]
        while True:
            with self._lock:
                if self._closed.is_set():
                    raise self._closed_error()
                if self._calls is None and (found := _find_store(self._port)) is not None:
                    self._directory, address = found
                    self._calls = self._connect(address)
                if self._calls is None and self._insecure and self._listens():
                    self._calls = self._connect(self._address)
                if self._calls is not None:
                    return self._calls
            if (left := deadline - time.monotonic()) <= 0:
                raise StoreNetworkError(f"no store of this user is on {self._address}{self._who_else()}")
            self._closed.wait(min(interval, left))
            interval = min(2 * interval, FIND_INTERVALS_S[1])

    def _listens(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), DIAGNOSIS_INTERVAL_S).close()
        except OSError:
            return False
        return True

    def _who_else(self) -> str:
        """Returns, for messages, which other user listens on the port; empty if none does."""
        with suppress(OSError):
            for user in sorted(users_listening(self._port) - {os.geteuid()}):
                return f": user {user} listens on {self._address}, and a store of another user is not used"
        return ""

    def join(self, seconds: float) -> None:
        """Connects, and registers this process as a user of the store. Raises StoreError."""
        started = time.monotonic()
        # If there is no connection in time, the JOIN below fails, unless there is not even a socket.
        wait_with_warnings(
            self._wait_until_ready,
            seconds,
            lambda: (
                f"no store answers on {self._address}, where rank 0 or another process should host it"
                f"{self._who_else() if self._is_local else ''}"
            ),
        )
        if self._calls is None:
            raise self._no_answer_error(seconds, f"there is no store of this user{self._who_else()}")
        deadline = started + seconds
        while True:
            remaining = max(0.001, deadline - time.monotonic())
            try:
                joined = self._open().execute(
                    Operation(kind=store_pb2.JOIN), timeout=remaining, wait_for_ready=True
                )
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise StoreError(
                        f"the store on {self._address} refuses this process: {_details(error)}"
                    ) from error
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() >= deadline:
                    raise self._no_answer_error(seconds, _details(error)) from error
                time.sleep(RETRY_PAUSE_S)  # it ended before it answered, and may be started again
            else:
                self._store = joined.store
                self.keep_from_children()
                return

    def _no_answer_error(self, seconds: float, details: str) -> StoreNetworkError:
        return StoreNetworkError(
            f"no store answered on {self._address} within {seconds:g} s: connect() timed out. Is the master "
            f"running, with this address and port? ({details})"
        )

    def clock(self, seconds: float) -> float:
        """Returns the time of the server's host in seconds since 1970; needs no `join`."""
        try:
            told: Outcome = self._open(seconds).clock(Operation(), timeout=seconds, wait_for_ready=True)
        except (grpc.RpcError, StoreNetworkError) as error:
            problem = tls_problem(self._host, self._port, self._identity, DIAGNOSIS_INTERVAL_S)
            details = str(error) if isinstance(error, StoreNetworkError) else _details(error)
            raise StoreError(
                f"the store on {self._address} does not tell its time: {problem or details}"
            ) from error
        return told.number / 1e9

    def join_as(self, other: "RemoteServer") -> None:
        """Uses the store that another connection of this process has joined, without counting as another user."""
        self._store = other._store

    def keep_from_children(self) -> None:
        """Notes that the connection is not for the children of this process."""
        with suppress(StoreError):  # the name has been resolved before
            note_peer(self, self._port, *resolve(self._host))

    def _wait_until_ready(self, seconds: float) -> bool:
        """Waits at most `seconds` for the connection; returns whether it is made.

        Raises StoreError as soon as it is known that the server has other credentials.
        """
        deadline = time.monotonic() + seconds
        while not self._is_ready_within(max(0.0, min(DIAGNOSIS_INTERVAL_S, deadline - time.monotonic()))):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            if problem := self._problem(min(left, DIAGNOSIS_INTERVAL_S)):
                raise StoreError(f"the store on {self._address} cannot be used: {problem}")
        return True

    def _is_ready_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        try:
            connected = grpc.channel_ready_future(self._open(seconds).channel)
        except StoreNetworkError:
            return False
        try:
            connected.result(max(0.0, deadline - time.monotonic()))
        except grpc.FutureTimeoutError:
            return False
        finally:
            connected.cancel()
        return True

    def _problem(self, seconds: float) -> str:
        """Returns why this process cannot use the server, as far as its credentials are the reason."""
        if self._identity is not None and is_loopback(self._host) and _find_store(self._port) is not None:
            return NO_CREDENTIALS_THERE
        return tls_problem(self._host, self._port, self._identity, seconds)

    def execute(self, operation: Operation, seconds: float, restart_timeout: float) -> Outcome:
        """Runs an operation on the server, which may wait for keys for `seconds`; see ANSWER_TIMEOUT_S, too.

        Waits `restart_timeout` seconds, at most, until a server that is gone is started again. Raises StoreError
        if the server has ended or does not answer, or this connection is closed.
        """
        if not self._store:
            try:
                return self._execute_once(operation, seconds)
            except _GoneError as error:
                raise StoreNetworkError(f"the store on {self._address} is gone: {error}") from error.__cause__
        with self._lock:
            number = self._next_number
            self._next_number += 1
            self._unanswered.add(number)
            operation.acknowledged_below = min(self._unanswered)
        operation.client, operation.number, operation.store = self._client, number, self._store
        try:
            return self._execute_until_done(operation, seconds, min(restart_timeout, RESTART_TIMEOUT_S))
        finally:
            with self._lock:
                self._unanswered.discard(number)

    def _execute_until_done(self, operation: Operation, seconds: float, restart_timeout: float) -> Outcome:
        """Runs an operation, again if the server is started again within `restart_timeout` seconds."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            operation.timeout_ms = math.ceil(1000 * left)
            try:
                return self._execute_once(operation, left)
            except _GoneError as error:
                gone = error
            if self._closed.wait(RETRY_PAUSE_S):
                raise self._closed_error()
            try:
                is_back = self._is_ready_within(restart_timeout)
            except ValueError as error:
                raise self._closed_error() from error
            if not is_back:
                raise StoreNetworkError(
                    f"the store on {self._address} is gone, and was not started again within "
                    f"{restart_timeout:g} s: {gone}"
                ) from gone.__cause__

    def _execute_once(self, operation: Operation, seconds: float) -> Outcome:
        """Sends an operation once. Raises _GoneError if the connection is lost; else as `execute`."""
        try:
            call = self._pop if operation.kind == store_pb2.QUEUE_POP else self._open().execute
            outcome: Outcome = call(operation, timeout=seconds + ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise _GoneError(f"Connection closed by peer ({_details(error)})") from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise StoreNetworkError(
                    f"the store on {self._address} did not answer within {seconds + ANSWER_TIMEOUT_S:g} s"
                ) from error
            raise StoreError(f"the store on {self._address} failed ({_details(error)})") from error
        except ValueError as error:  # raised by gRPC after another thread has closed the channel
            raise self._closed_error() from error
        return outcome

    def _closed_error(self) -> StoreError:
        return StoreError(f"the connection to {self._address} is closed")

    def close(self) -> None:
        """Closes the connection."""
        self._closed.set()
        with self._lock:
            calls = self._calls
        if calls is not None:
            calls.channel.close()

    def _pop(self, operation: Operation, timeout: float) -> Outcome:
        """Pops an item, and confirms that it was received; the server puts back what is not confirmed."""
        requests: SimpleQueue[Operation | None] = SimpleQueue()
        requests.put(operation)
        call: Any = self._open().pop(iter(requests.get, None), timeout=timeout)
        try:
            outcome: Outcome = next(call)
            requests.put(Operation())
            for _ in call:  # until the server has the confirmation
                pass
        finally:
            requests.put(None)
            call.cancel()  # has no effect on a call that is done
        return outcome


def _find_store(port: int) -> tuple[SocketDirectory, str] | None:
    """Returns where this user's store that has a port listens; None without one.

    That is an address of gRPC, which is good as long as the directory is open that comes with it. A store that was
    killed has left its socket, maybe in another directory than that of the one that runs.
    """
    name = store_socket_name(port)
    for directory in SocketDirectory.all_of_this_user():
        with suppress(OSError):  # it is missing, or has just been bound and is not restricted yet
            path = directory.reach(f"{directory.path}/{name}")
            if is_listening(path):
                return directory, UNIX_SCHEME + path
    return None


def _details(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {printable(error.details(), MAX_DETAILS)}"


@final
@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the clock of another host is ahead.

    seconds: by how much; negative if it is behind.
    error: seconds by which this may be wrong: half of the round trip.
    """

    seconds: float
    error: float


def clock_offset(host: str, port: int, timeout: float = 5.0) -> ClockOffset:
    """Returns how far the clock of the host of a gradwire store is ahead of this host's.

    The credentials are those in the environment. Each answer may take `timeout` seconds.

    Raises:
        StoreError: the store does not answer, refuses this process, or is of a release that has no clock.
        CredentialsError: the credentials in the environment are not valid.
    """
    credentials = Credentials.from_environment()
    server = RemoteServer(host, port, credentials.identity() if credentials is not None else None)
    try:
        server.clock(timeout)  # which also connects
        return offset_by(lambda: server.clock(timeout))
    finally:
        server.close()


def offset_by(
    read: Callable[[], float], now: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic
) -> ClockOffset:
    """Returns how far another clock is ahead, which `read` asks for its time, in seconds."""
    best = ClockOffset(0.0, math.inf)
    for _ in range(CLOCK_ROUNDS):
        began, before = ticks(), now()
        theirs = read()
        error = (ticks() - began) / 2
        if error < best.error:
            best = ClockOffset(theirs - (before + error), error)
    return best
