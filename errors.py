"""Every error gradwire raises on purpose; all are RuntimeErrors, so code written for torch keeps catching them.

GradwireError
├── StoreError                    a store refused an operation, or its server cannot be reached
│   ├── StoreNetworkError         the server cannot be reached, or cannot listen where it should
│   ├── StoreTimeoutError         .missing: the keys that did not appear in time
│   └── QueueEmptyError           a queue has nothing to take, and the caller does not want to wait
├── RendezvousError               workers cannot find each other: a bad URL, a missing variable, ranks that clash
│   ├── DeviceMapError            device maps name workers or devices that are not there (a ValueError as well)
│   └── RendezvousNetworkError    the place where they meet cannot be reached, or is taken
├── ProcessGroupError             an operation of a process group failed
│   ├── UnsupportedOperationError .engine, .operation: the engine cannot do this
│   ├── CollectiveTimeoutError    .operation, .seconds: the other ranks did not take part in time
│   ├── CollectiveMismatchError   .ranks: which ranks called something else than the others
│   ├── RankLostError             .rank, .reason: a rank died in the middle
│   └── GroupAbortedError         the group was aborted or shut down, by this rank
└── RpcError
    ├── NotInitializedError       a call before init_rpc or after shutdown
    ├── WorkerNameError           .name: no worker can be called so (a ValueError as well)
    ├── UnknownWorkerError        .name: no worker of the group is called so
    ├── RpcTimeoutError           .worker, .seconds
    ├── RpcCancelledError         .worker: the caller cancelled the call
    ├── SendFailedError           .worker, .reason: a message has not left, so it may be sent again
    ├── AnswerFailedError         .worker, .reason: a call has run, but its answer could not be sent
    ├── WorkerLostError           .worker, .reason, .cause: the peer died, left, or cannot be reached
    ├── SerializationError        .path: where in the arguments or the result it went wrong
    ├── RemoteError               .worker, .remote_traceback: a function raised on another worker
    │   └── RemoteUnpicklableError  its exception could not be rebuilt here; the text is kept
    ├── RRefError                 a reference used where, or after, it cannot be
    └── AutogradError             a backward pass that cannot run
        └── UnknownContextError   .context_id: no such context on this worker

Those of stores, rendezvous and process groups are also of the class that torch.distributed raises in their place:
DistStoreError, DistNetworkError, QueueEmptyError or DistBackendError.

A remote exception whose class can be rebuilt arrives as that class; its `__cause__` is the RemoteError.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed import QueueEmptyError as TorchQueueEmptyError

__all__ = [
    "AnswerFailedError",
    "AutogradError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeviceMapError",
    "GradwireError",
    "GroupAbortedError",
    "LossCause",
    "NotInitializedError",
    "ProcessGroupError",
    "QueueEmptyError",
    "RRefError",
    "RankLostError",
    "RemoteError",
    "RemoteUnpicklableError",
    "RendezvousError",
    "RendezvousNetworkError",
    "RpcCancelledError",
    "RpcError",
    "RpcTimeoutError",
    "SendFailedError",
    "SerializationError",
    "StoreError",
    "StoreNetworkError",
    "StoreTimeoutError",
    "UnknownContextError",
    "UnknownWorkerError",
    "UnsupportedOperationError",
    "WorkerLostError",
    "WorkerNameError",
    "rebuild",
]


class GradwireError(RuntimeError):
    """The root of the tree. Pickles whatever its constructor takes, so that it can cross workers."""

    def __reduce__(self) -> tuple[Callable[..., "GradwireError"], tuple[Any, ...]]:
        return rebuild, (type(self), self.args, self.__dict__)


E = TypeVar("E", bound=BaseException)


def rebuild(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    """An exception with this content, made without its constructor, which may format or demand other arguments."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class StoreError(GradwireError, DistStoreError):
    """A store refused an operation, or its server cannot be reached."""


class StoreNetworkError(StoreError, DistNetworkError):
    """The server of a store cannot be reached, or cannot listen where it should."""


class StoreTimeoutError(StoreError):
    """Keys did not appear in time."""

    def __init__(self, missing: Sequence[str], seconds: float, doing: str = "waiting for") -> None:
        shown = ", ".join(repr(key) for key in missing[:8]) + (", …" if len(missing) > 8 else "")
        super().__init__(f"Wait timeout: timed out after {seconds:g} s {doing} {shown}")
        self.missing = list(missing)
        self.seconds = seconds


class QueueEmptyError(StoreError, TorchQueueEmptyError):
    """A queue has nothing to take, and the caller does not want to wait."""


class RendezvousError(GradwireError, DistStoreError):
    """Workers cannot find each other."""


class RendezvousNetworkError(RendezvousError, DistNetworkError):
    """The place where workers meet cannot be reached, or is taken by somebody else."""


class DeviceMapError(RendezvousError, ValueError):
    """A device map names a worker that is not in the group, or devices that are not there."""


class ProcessGroupError(GradwireError, DistBackendError):
    """An operation of a process group failed."""


class UnsupportedOperationError(ProcessGroupError):
    """An engine cannot do this operation, or not on these tensors."""

    def __init__(self, engine: str, operation: str, instead: str) -> None:
        super().__init__(f"engine {engine!r} cannot {operation}: {instead}")
        self.engine = engine
        self.operation = operation


class CollectiveTimeoutError(ProcessGroupError):
    """The other ranks did not take part in an operation in time. The group can be used no more."""

    def __init__(self, operation: str, seconds: float, waiting_for: str = "the other ranks") -> None:
        super().__init__(
            f"{operation} timed out after {seconds:g} s, waiting for {waiting_for} (the timeout of the call, "
            "or else of the group)"
        )
        self.operation = operation
        self.seconds = seconds


class CollectiveMismatchError(ProcessGroupError):
    """Ranks called different operations, or with tensors that do not fit together.

    Here as in RankLostError, ranks are those of the default group.
    """

    def __init__(self, ranks: Sequence[int], text: str) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class RankLostError(ProcessGroupError):
    """A rank died, or left, while others waited for it. The group can be used no more."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason} (Connection closed by peer)")
        self.rank = rank
        self.reason = reason


class GroupAbortedError(ProcessGroupError):
    """This rank aborted the group or shut it down."""


class RpcError(GradwireError):
    """The root of what gradwire.rpc, rref, autograd and optim raise."""


class NotInitializedError(RpcError):
    """A call before init_rpc or after shutdown."""


class WorkerNameError(RpcError, ValueError):
    """No worker can be called so."""

    def __init__(self, name: object, rule: str) -> None:
        super().__init__(f"{rule}, but the name is {name!r}")
        self.name = name


class UnknownWorkerError(RpcError):
    """No worker of the group has this name or id."""

    def __init__(self, name: object, known: Sequence[str]) -> None:
        shown = ", ".join(known[:16]) + (", …" if len(known) > 16 else "")
        super().__init__(f"could not find destination {name!r}: the workers of this group are {shown}")
        self.name = name


class RpcTimeoutError(RpcError):
    """A worker did not answer in time. Whether it ran the call is not known."""

    def __init__(self, worker: str, seconds: float, doing: str = "a call to worker") -> None:
        super().__init__(f"RPC ran for more than its timeout of {seconds:g} s: {doing} {worker!r}")
        self.worker = worker
        self.seconds = seconds


class RpcCancelledError(RpcError):
    """The caller cancelled the call. It has not been run, unless it had begun to."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"a call to worker {worker!r} was cancelled by its caller")
        self.worker = worker


class SendFailedError(RpcError):
    """A message could not be sent, and its receiver knows nothing of it. Sending it again may succeed."""

    def __init__(self, worker: str, reason: str, doing: str = "a message to worker") -> None:
        super().__init__(f"{doing} {worker!r} could not be sent: {reason}")
        self.worker = worker
        self.reason = reason


class AnswerFailedError(RpcError):
    """A worker has run a call, but could not send the answer. Calling again runs it again."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} has run the call, but could not send the answer: {reason}")
        self.worker = worker
        self.reason = reason


class LossCause(Enum):
    """Why a worker is lost."""

    SHUTDOWN = auto()
    """It called `shutdown`."""
    EXCEPTION = auto()
    """An uncaught exception ended its program."""
    EXIT = auto()
    """Its program ended without `shutdown`."""
    DISCONNECTED = auto()
    """Its connection ended without a goodbye, or broke: it was killed, for example, or cut off."""
    REFUSED = auto()
    """It is there, but refused the connection."""
    UNREACHABLE = auto()
    """It accepts no connection, and there was none before: it may have ended in any way."""


class WorkerLostError(RpcError):
    """A worker died, left the group, or cannot be reached."""

    def __init__(self, worker: str, reason: str, cause: LossCause = LossCause.DISCONNECTED) -> None:
        super().__init__(f"worker {worker!r} is lost: {reason}")
        self.worker = worker
        self.reason = reason
        self.cause = cause


class SerializationError(RpcError):
    """An object cannot travel."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} cannot be sent: {problem}")
        self.path = path


class RemoteError(RpcError):
    """A function raised on another worker; the cause of the rebuilt exception, or the error itself."""

    def __init__(self, worker: str, text: str, remote_traceback: str) -> None:
        super().__init__(f"on worker {worker!r}: {text}\n\n{remote_traceback.rstrip()}")
        self.worker = worker
        self.text = text
        self.remote_traceback = remote_traceback


class RemoteUnpicklableError(RemoteError):
    """A function raised on another worker, and its exception could not be rebuilt here."""


class RRefError(RpcError):
    """A reference used where, or after, it cannot be."""


class AutogradError(RpcError):
    """A backward pass that cannot run."""


class UnknownContextError(AutogradError):
    """No autograd context has this id on this worker."""

    def __init__(self, context_id: int, worker: str) -> None:
        super().__init__(
            f"Could not find autograd context with id: {context_id} on worker {worker!r}: "
            "it was never opened here, or its `with context()` block has ended"
        )
        self.context_id = context_id
