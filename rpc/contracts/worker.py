"""The workers of a group: who they are, what the others know of them, how they end, and who is told of that."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import current_process, parent_process
from types import CodeType
from typing import Any, Self, final

import torch

from ...errors import LossCause, WorkerLostError, WorkerNameError
from ...net.host_identity import network_id
from ...net.peer_text import problem_of_name
from ...net.security import printable
from ...net.user_sockets import UNIX_SCHEME
from ...proto.v1 import agent_pb2
from ..execution.futures import text_of
from .policy import message_value

__all__ = [
    "MAX_ID",
    "PROCESS_ENDED",
    "SHUT_DOWN",
    "Member",
    "RosterVersion",
    "WorkerEnd",
    "WorkerInfo",
    "WorkerWatcher",
    "check_worker_name",
    "last_uncaught_error",
    "noting_error_of_child",
]

MAX_ID = (1 << 31) - 1

MAX_TEXT_CHARACTERS = 4096
"""Characters of an address, or of another text about a member."""

MAX_SHOWN = 200
"""Characters that are shown of a record that is malformed."""

MAX_REASON = 500
"""Characters of a reason at most: it may come from another worker, and goes into log lines."""

TOOL_IDS = (4, 3)
"""Numbers of `sys.monitoring` that it reserves for nobody, in the order in which they are tried."""

_errors_of_child: list[BaseException] = []
"""What the function of this process has raised: one error at most."""

_KINDS = {
    LossCause.SHUTDOWN: agent_pb2.Departure.SHUTDOWN,
    LossCause.EXCEPTION: agent_pb2.Departure.EXCEPTION,
    LossCause.EXIT: agent_pb2.Departure.EXIT,
}
"""The causes that a worker can tell in its goodbye."""


@message_value
@dataclass(frozen=True, slots=True, order=True, repr=False)
class WorkerInfo:
    """A worker of the group: its name, and its id, which is the rank in a static group.

    wire_id: tells the incarnations of a worker apart. A worker that is started again in a static group has the id
    that it had, and a new wire_id; tables are kept by wire_id. By default it is the id.

    Raises:
        WorkerNameError: the name is not allowed; see `check_worker_name`.
    """

    name: str
    id: int
    wire_id: int = -1

    def __post_init__(self) -> None:
        check_worker_name(self.name)
        if self.wire_id == -1:
            object.__setattr__(self, "wire_id", self.id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def check_worker_name(name: object) -> str:
    """Returns the name, if it is allowed.

    Raises:
        WorkerNameError: it is not a string of 1 to 127 letters, digits, `-`, `_`, `:` or `.`.
    """
    if problem := problem_of_name(name):
        raise WorkerNameError(name, problem)
    return str(name)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group, with what the other members need to know about it.

    info: its name and id.
    address: at which the others dial its agent: host:port, or unix: and the path of a socket.
    device_count: the number of its CUDA devices.
    network: identifies its network namespace: equal on two workers if they reach each other on the loopback
        address.
    process: its process and host, for messages.
    device_maps: by the name of a called worker, which of its devices become which of the called worker's.
    directory: identifies the directory of its unix socket; empty if it listens on TCP.
    """

    info: WorkerInfo
    address: str
    device_count: int = field(default_factory=torch.cuda.device_count)
    network: str = field(default_factory=network_id)
    process: str = ""
    device_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    directory: str = ""

    @property
    def has_unix_socket(self) -> bool:
        """Whether it listens on a unix socket, and not on TCP."""
        return self.address.startswith(UNIX_SCHEME)

    @property
    def host(self) -> str:
        """The address without its port, of a worker that listens on TCP."""
        return self.address.rpartition(":")[0].strip("[]")

    def __str__(self) -> str:
        return f"{self.info.name!r} (rank {self.info.id}{self.process and ', ' + self.process})"

    @classmethod
    def from_record(cls, record: Any) -> "Member":
        """Returns the member that `dataclasses.asdict` has made a record of. Raises ValueError if it is none."""
        try:
            member = cls(**{**record, "info": WorkerInfo(**record["info"])})
        except (TypeError, KeyError, AttributeError, WorkerNameError) as error:
            raise ValueError(f"it describes no worker: {str(error)[:MAX_SHOWN]}") from None
        if not member._is_sound():
            raise ValueError(f"it describes no worker: {str(record)[:MAX_SHOWN]!r}")
        return member

    def _is_sound(self) -> bool:
        """Returns whether what another worker has told has the right types and limits."""
        return (
            all(type(each) is int and 0 <= each <= MAX_ID for each in (self.info.id, self.info.wire_id))
            and bool(self.address)
            and all(map(_is_text, (self.address, self.network, self.process, self.directory)))
            and type(self.device_count) is int
            and isinstance(self.device_maps, dict)
            and all(_is_device_map(each) for each in self.device_maps.values())
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS and (value.isprintable() or not value)


def _is_device_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(device, str) for device in value.values())


@final
@dataclass(frozen=True, slots=True)
class RosterVersion:
    """How much of the log of joins, leaves and evictions a worker knows: tells whether two know the same entries.

    length: the number of entries.
    digest: 32 bytes, of all of them in order.
    """

    length: int = 0
    digest: bytes = bytes(32)

    def followed_by(self, text: str) -> "RosterVersion":
        """Returns the version with one more entry."""
        return RosterVersion(self.length + 1, hashlib.sha256(self.digest + text.encode()).digest())


@final
@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended.

    cause: the kind of end.
    reason: the end in words that go on with "worker 'a' is lost:", such as "it has shut down". One line of bounded
        length, whatever is given.
    """

    cause: LossCause
    reason: str

    def __post_init__(self) -> None:
        words = self.reason[: 4 * MAX_REASON].split()  # a peer may send megabytes
        object.__setattr__(self, "reason", printable(" ".join(words), MAX_REASON))

    @property
    def orderly(self) -> bool:
        """Whether the worker left on purpose."""
        return self.cause is LossCause.SHUTDOWN

    def as_error(self, worker: str) -> WorkerLostError:
        """Returns the error of a call to the worker with this name."""
        return WorkerLostError(worker, self.reason, self.cause)

    @classmethod
    def by_error(cls, error: BaseException) -> Self:
        """Returns the end of a program by an exception that was not caught."""
        if isinstance(error, SystemExit):
            return cls._by_exit(error)
        text = text_of(error)
        return cls(LossCause.EXCEPTION, f"it ended by {type(error).__qualname__}{': ' * bool(text)}{text}")

    @classmethod
    def _by_exit(cls, error: SystemExit) -> Self:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        # Launchers catch what a function raises, report it, and exit with a status.
        cause = error.__cause__ or error.__context__
        if status and isinstance(cause, Exception):
            return cls.by_error(cause)
        return cls(LossCause.EXIT, f"it exited{f' with status {status}' * bool(status)} without calling shutdown")

    @classmethod
    def of_this_process(cls, stale: BaseException | None) -> Self:
        """Returns how this process ends; called while it ends.

        `stale` is the result of `last_uncaught_error` while the program still ran; that error did not end it.
        """
        # Until Python 3.12, children of multiprocessing end while their exception is handled; a script after that.
        error = sys.exception() or next(iter(_errors_of_child), None)
        last = last_uncaught_error()
        if error is None and last is not stale and not hasattr(sys, "ps1"):  # in a prompt, errors end nothing
            error = last
        return cls.by_error(error if error is not None else SystemExit())

    @classmethod
    def from_proto(cls, departure: agent_pb2.Departure) -> "WorkerEnd":
        """Returns the end that a goodbye tells."""
        cause = next((cause for cause, kind in _KINDS.items() if kind == departure.kind), LossCause.EXIT)
        if cause is LossCause.SHUTDOWN:
            return SHUT_DOWN
        return cls(cause, departure.reason.strip() or "it ended without calling shutdown")

    def to_proto(self) -> agent_pb2.Departure:
        """Returns the message of a goodbye."""
        return agent_pb2.Departure(kind=_KINDS[self.cause], reason=self.reason)


def last_uncaught_error() -> BaseException | None:
    """Returns the uncaught exception that Python printed last, which it does before the hooks of atexit run."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


@contextmanager
def noting_error_of_child() -> Iterator[None]:
    """Context manager: notes what the function of this process raises, if that is a child of multiprocessing.

    Its exit handlers run while the exception is handled, and find it by `sys.exception()`. From Python 3.13 on it
    is gone by then.
    """
    if sys.version_info >= (3, 13) and parent_process() is not None:
        run: CodeType | None = getattr(type(current_process()).run, "__code__", None)
        tool = next((number for number in TOOL_IDS if sys.monitoring.get_tool(number) is None), None)
        if run is not None and tool is not None:

            def on_unwind(code: CodeType, _offset: int, error: BaseException) -> None:
                if code is run:
                    _errors_of_child[:] = [error]

            sys.monitoring.use_tool_id(tool, "gradwire")
            sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, on_unwind)
            sys.monitoring.set_events(tool, sys.monitoring.events.PY_UNWIND)
            try:
                yield
            finally:
                sys.monitoring.set_events(tool, sys.monitoring.events.NO_EVENTS)
                sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, None)
                sys.monitoring.free_tool_id(tool)
            return
    yield


SHUT_DOWN = WorkerEnd(LossCause.SHUTDOWN, "it has shut down")
"""The end of a worker that leaves on purpose."""

PROCESS_ENDED = WorkerEnd(LossCause.DISCONNECTED, "its process has ended without a goodbye")
"""The end of a worker that was killed, or has crashed: nobody listens at its address any more."""


class WorkerWatcher:
    """Is told what becomes of the other workers. What a class does not override does nothing.

    - `note_…` is called at once, on the agent's event loop. For a suspect worker that is before anything comes by
      its next connection. It must not block. If `note_suspect` or `note_back` returns a function, that is run on a
      thread of the executor, after all watchers have noted the change; it may wait until the worker is back.
    - `on_worker_…` is called later, on a thread of the executor, when the earlier changes of the same worker are
      handled. It must not wait for other workers.
    """

    def note_joined(self, worker: WorkerInfo) -> None:
        """Notes a worker that has joined the group, maybe in the place of a lost one."""

    def note_suspect(self, worker: WorkerInfo, reason: str) -> Callable[[], None] | None:
        """Notes a worker that does not answer, for this reason, and may come back.

        What this worker has sent it until now, and what it has sent, may not have arrived.
        """

    def note_back(self, worker: WorkerInfo) -> Callable[[], None] | None:
        """Notes a suspect worker that answers again."""

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Notes the loss of a worker, and how it ended."""

    def on_worker_joined(self, worker: WorkerInfo) -> None:
        """Handles a worker that has joined."""

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Handles a worker that does not answer. `on_worker_back` or `on_worker_lost` follows.

        What the worker holds here, and what this worker holds there, stays valid until it is lost.
        """

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Handles a suspect worker that answers again."""

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Handles the loss of a worker."""
