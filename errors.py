"""The errors that gradwire raises, all RuntimeErrors, so that code written for torch keeps catching them.

GradwireError
├── CredentialsError              a token, certificate or key is missing or not valid (also a ValueError)
├── StoreError                    a store rejected an operation
│   ├── StoreNetworkError         a store's server cannot be reached, or cannot listen on its address
│   ├── StoreTimeoutError         .missing, .seconds: keys were not set within the timeout
│   └── QueueEmptyError           a non-blocking pop from an empty queue
├── RendezvousError               workers cannot form a group: bad URL, missing variable, conflicting ranks
│   ├── DeviceMapError            a device map names an unknown worker or device (also a ValueError)
│   └── RendezvousNetworkError    the rendezvous address cannot be reached, or is in use
├── ProcessGroupError             an operation of a process group failed
│   ├── UnsupportedOperationError .engine, .operation: the engine does not support the operation
│   ├── CollectiveTimeoutError    .operation, .seconds: the other ranks did not join within the timeout
│   ├── CollectiveMismatchError   .ranks: these ranks called a different operation than the others
│   ├── RankLostError             .rank, .reason: a rank died or left while others waited for it
│   └── GroupAbortedError         this rank aborted the group or shut it down
└── RpcError                      the root of what rpc, rref, autograd and optim raise
    ├── NotInitializedError       a call before init_rpc or after shutdown
    ├── WorkerNameError           .name: the name is not valid for a worker (also a ValueError)
    ├── UnknownWorkerError        .name: no worker of the group has this name or id
    ├── RpcTimeoutError           .worker, .seconds: a call did not finish within its timeout
    ├── RpcCancelledError         .worker: the caller cancelled the call
    ├── WorkerSuspectError        .worker, .reason: the peer does not answer at present, and may come back
    ├── EvictedError              .worker, .reason: this worker was evicted from its group
    ├── SendFailedError           .worker, .reason: a message was not sent; sending it again is safe
    ├── SendQueueFullError        .worker, .option, .limit: a call was not sent, as too much is in flight
    ├── AnswerFailedError         .worker, .reason: a call has run, but its answer could not be sent
    ├── WorkerLostError           .worker, .reason, .cause: the peer died, left, or cannot be reached
    ├── LimitReachedError         .limit: a worker has as much on another as it may have (also a ValueError)
    ├── PolicyError               .worker, .caller, .name: a worker refuses a message of another, or its answer
    ├── SerializationError        .path: the part of the arguments or of the result that cannot be sent
    ├── RemoteError               .worker, .text, .remote_traceback: a function raised on another worker
    │   └── RemoteUnpicklableError  the remote exception could not be rebuilt; its text is kept
    ├── RRefError                 a reference is used where it is not valid, or after its release
    └── AutogradError             a backward pass cannot run
        └── UnknownContextError   .context_id: this worker has no such autograd context

An RpcError that is the failure of a call has an `.outcome`: not sent, unknown, or it has run. See Outcome.

Errors of stores, rendezvous and process groups also inherit from the class that torch.distributed raises in the
same place: DistStoreError, DistNetworkError, QueueEmptyError or DistBackendError.

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
    "CredentialsError",
    "DeviceMapError",
    "EvictedError",
    "GradwireError",
    "GroupAbortedError",
    "LimitReachedError",
    "LossCause",
    "NotInitializedError",
    "Outcome",
    "PolicyError",
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
    "SendQueueFullError",
    "SerializationError",
    "StoreError",
    "StoreNetworkError",
    "StoreTimeoutError",
    "UnknownContextError",
    "UnknownWorkerError",
    "UnsupportedOperationError",
    "WorkerLostError",
    "WorkerNameError",
    "WorkerSuspectError",
    "rebuild_exception",
    "set_outcome",
]

E = TypeVar("E", bound=BaseException)


class GradwireError(RuntimeError):
    """The root of the tree.

    Pickling keeps `args` and the attributes and bypasses the constructor, so that every error can be sent to other
    workers whatever its constructor takes.
    """

    def __reduce__(self) -> tuple[Callable[..., "GradwireError"], tuple[Any, ...]]:
        return rebuild_exception, (type(self), self.args, self.__dict__)


def rebuild_exception(cls: type[E], args: tuple[Any, ...], attributes: dict[str, Any]) -> E:
    """Returns an exception with these `args` and attributes, without calling its `__init__`.

    An `__init__` may take other arguments than those it leaves in `args`, such as the parts of a message.
    """
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


# Of credentials, stores, rendezvous and process groups.


class CredentialsError(GradwireError, ValueError):
    """A token, a certificate or a private key is missing or not valid. The text contains no secrets."""


class StoreError(GradwireError, DistStoreError):
    """A store rejected an operation."""


class StoreNetworkError(StoreError, DistNetworkError):
    """A store's server cannot be reached, or cannot listen on its address."""


class StoreTimeoutError(StoreError):
    """Keys were not set within the timeout.

    Attributes:
        missing: the keys.
        seconds: the timeout.
    """

    def __init__(self, missing: Sequence[str], seconds: float, activity: str = "waiting for") -> None:
        shown = ", ".join(repr(key) for key in missing[:8]) + (", …" if len(missing) > 8 else "")
        super().__init__(f"Wait timeout: timed out after {seconds:g} s {activity} {shown}")
        self.missing = list(missing)
        self.seconds = seconds


class QueueEmptyError(StoreError, TorchQueueEmptyError):
    """A non-blocking pop from a queue of a store found it empty."""


class RendezvousError(GradwireError, DistStoreError):
    """Workers cannot form a group: bad URL, missing variable, conflicting ranks."""


class RendezvousNetworkError(RendezvousError, DistNetworkError):
    """The rendezvous address cannot be reached, or another program listens on it."""


class DeviceMapError(RendezvousError, ValueError):
    """A device map names a worker that is not in the group, or a device that does not exist."""


class ProcessGroupError(GradwireError, DistBackendError):
    """An operation of a process group failed."""


class UnsupportedOperationError(ProcessGroupError):
    """An engine does not support an operation, or not on these tensors.

    Attributes:
        engine: its name.
        operation: what was asked of it, with the tensors' dtype or layout where these are the reason.
    """

    def __init__(self, engine: str, operation: str, instead: str) -> None:
        super().__init__(f"engine {engine!r} cannot {operation}: {instead}")
        self.engine = engine
        self.operation = operation


class CollectiveTimeoutError(ProcessGroupError):
    """The other ranks did not join an operation within its timeout. The group cannot be used afterwards."""

    def __init__(self, operation: str, seconds: float, waiting_for: str = "the other ranks") -> None:
        super().__init__(
            f"{operation} timed out after {seconds:g} s, waiting for {waiting_for} (the timeout of the call, "
            "or else of the group)"
        )
        self.operation = operation
        self.seconds = seconds


class CollectiveMismatchError(ProcessGroupError):
    """Ranks called different operations, or passed tensors that do not match.

    Attributes:
        ranks: the ranks, in the default group, whose call differs from the others'.
    """

    def __init__(self, ranks: Sequence[int], text: str) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class RankLostError(ProcessGroupError):
    """A rank died or left while others waited for it. The group cannot be used afterwards.

    Attributes:
        rank: its rank in the default group.
        reason: how the loss was noticed.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason} (Connection closed by peer)")
        self.rank = rank
        self.reason = reason


class GroupAbortedError(ProcessGroupError):
    """This rank aborted the group or shut it down."""


# Of calls.


class Outcome(Enum):
    """What became of a call that has failed: whether its function has run."""

    NOT_SENT = auto()
    """It has not run and will not: nothing of it has left this process, or the other worker says that it never
    began. Calling again is safe."""
    UNKNOWN = auto()
    """It may have run, may be running, or may still run."""
    RAN = auto()
    """It has begun to run. What it did before the failure is done."""

    @property
    def text(self) -> str:
        """The same in words, for the texts of errors."""
        return _TEXTS[self]


_TEXTS = {
    Outcome.NOT_SENT: "not sent: it has not run",
    Outcome.UNKNOWN: "outcome unknown: it may have run",
    Outcome.RAN: "it has run",
}


class RpcError(GradwireError):
    """The root of the errors of gradwire.rpc, rref, autograd and optim.

    Attributes:
        outcome: what became of the call that has failed with this error; None if it is no failure of a call.
    """

    outcome: Outcome | None = None

    def __str__(self) -> str:
        text = super().__str__()
        outcome = self.__dict__.get("outcome")  # not that of the class, whose text says it
        return text if outcome in (None, Outcome.RAN) else f"{text} ({outcome.text})"


def set_outcome(error: BaseException, outcome: Outcome) -> None:
    """Notes in the error of a call, and in the RemoteError that is its cause, what became of the call."""
    cause = error.__cause__
    if isinstance(error, RpcError) and error.outcome is not outcome:
        error.outcome = outcome
    if isinstance(cause, RemoteError) and cause.outcome is not outcome:
        cause.outcome = outcome


class NotInitializedError(RpcError):
    """A call before init_rpc or after shutdown."""

    outcome = Outcome.NOT_SENT


class WorkerNameError(RpcError, ValueError):
    """A name is not valid for a worker."""

    def __init__(self, name: object, rule: str) -> None:
        super().__init__(f"{rule}, but the name is {name!r}")
        self.name = name


class UnknownWorkerError(RpcError):
    """No worker of the group has this name or id."""

    outcome = Outcome.NOT_SENT

    def __init__(self, name: object, known: Sequence[str], *, dynamic: bool = False) -> None:
        shown = ", ".join(known[:16]) + (", …" if len(known) > 16 else "")
        advice = "; if it has yet to join, wait for it with rpc.on_worker_joined" if dynamic else ""
        super().__init__(f"could not find destination {name!r}: the workers of this group are {shown}{advice}")
        self.name = name


class RpcTimeoutError(RpcError):
    """A call did not finish within its timeout. The remote function may have run, unless `outcome` denies it."""

    def __init__(self, worker: str, seconds: float, activity: str = "a call to worker") -> None:
        super().__init__(f"RPC ran for more than its timeout of {seconds:g} s: {activity} {worker!r}")
        self.worker = worker
        self.seconds = seconds


class RpcCancelledError(RpcError):
    """The caller cancelled the call. The remote function runs only if it had started before."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"a call to worker {worker!r} was cancelled by its caller")
        self.worker = worker


class SendFailedError(RpcError):
    """A message was not sent. Its receiver has not seen any of it, so sending it again is safe."""

    outcome = Outcome.NOT_SENT

    def __init__(self, worker: str, reason: str, activity: str = "a message to worker") -> None:
        super().__init__(f"{activity} {worker!r} could not be sent: {reason}")
        self.worker = worker
        self.reason = reason


class SendQueueFullError(RpcError):
    """A call was not sent, because too much is in flight. Calling again is safe.

    Attributes:
        worker: the name of the worker called.
        option: the option of FlowControlOptions that is the bound.
        limit: its value.
    """

    outcome = Outcome.NOT_SENT

    def __init__(self, worker: str, option: str, limit: int, advice: str) -> None:
        super().__init__(
            f"a call to worker {worker!r} was not sent: as much is in flight as {option}={limit} of "
            f"rpc.FlowControlOptions allows; {advice}"
        )
        self.worker = worker
        self.option = option
        self.limit = limit


class AnswerFailedError(RpcError):
    """A worker has run a call, but could not send the answer. Calling again runs the function again."""

    outcome = Outcome.RAN

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} has run the call, but could not send the answer: {reason}")
        self.worker = worker
        self.reason = reason


class LossCause(Enum):
    """Why a worker is lost."""

    SHUTDOWN = auto()
    """The worker called `shutdown`."""
    EXCEPTION = auto()
    """An uncaught exception ended its program."""
    EXIT = auto()
    """Its program ended without `shutdown`."""
    DISCONNECTED = auto()
    """Its connection closed without a goodbye: it was killed, or the network failed."""
    REFUSED = auto()
    """The worker runs, but refused the connection."""
    UNREACHABLE = auto()
    """The worker accepts no connection, and there was none before, so nothing is known about its end."""


class WorkerLostError(RpcError):
    """A worker died, left the group, or cannot be reached.

    Attributes:
        worker: its name.
        reason: how the loss was noticed, in words.
        cause: the same as a LossCause.
    """

    def __init__(self, worker: str, reason: str, cause: LossCause = LossCause.DISCONNECTED) -> None:
        super().__init__(f"worker {worker!r} is lost: {reason}")
        self.worker = worker
        self.reason = reason
        self.cause = cause


class WorkerSuspectError(RpcError):
    """A worker does not answer at present: its connection broke, or it is silent. It may come back.

    Attributes:
        worker: its name.
        reason: how that was noticed, in words.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} does not answer, and may come back: {reason}")
        self.worker = worker
        self.reason = reason


class EvictedError(RpcError):
    """This worker was evicted from its group: the others go on without it, and it cannot call them any more.

    Attributes:
        worker: its name.
        reason: why it was evicted, in words.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"this worker, {worker!r}, was evicted from its group: {reason}")
        self.worker = worker
        self.reason = reason


class LimitReachedError(RpcError, ValueError):
    """A worker asks another one for more than it may have there. `limit` is the limit's name and value."""

    def __init__(self, problem: str, limit: str) -> None:
        super().__init__(problem)
        self.limit = limit


class PolicyError(RpcError):
    """A worker refuses a message, because its policy does not accept what the message has.

    Nothing of the message has run. If it is the answer to a call, that call has.

    Attributes:
        worker: the worker that refuses the message.
        caller: the worker that sent the message: the caller, or the one that answers.
        name: the function, class or method that is refused; empty if it is something else.
    """

    def __init__(self, worker: str, caller: str, name: str, problem: str) -> None:
        super().__init__(f"worker {worker!r} refuses a message of worker {caller!r}: {problem}")
        self.worker = worker
        self.caller = caller
        self.name = name


class SerializationError(RpcError):
    """A value cannot be sent. `path` is the part of the arguments or of the result to blame, such as `args[0]`."""

    outcome = Outcome.NOT_SENT

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} cannot be sent: {problem}")
        self.path = path


class RemoteError(RpcError):
    """A function raised on another worker: the `__cause__` of the rebuilt exception.

    Attributes:
        worker: the worker's name.
        text: class and message of the remote exception.
        remote_traceback: its formatted traceback.
    """

    outcome = Outcome.RAN

    def __init__(self, worker: str, text: str, remote_traceback: str) -> None:
        super().__init__(f"on worker {worker!r}: {text}\n\n{remote_traceback.rstrip()}")
        self.worker = worker
        self.text = text
        self.remote_traceback = remote_traceback


class RemoteUnpicklableError(RemoteError):
    """A function raised on another worker, and its exception could not be rebuilt; raised in its place."""


class RRefError(RpcError):
    """A reference is used where it is not valid, or after its release."""


class AutogradError(RpcError):
    """A backward pass cannot run."""


class UnknownContextError(AutogradError):
    """This worker has no autograd context with this id."""

    def __init__(self, context_id: int, worker: str) -> None:
        super().__init__(
            f"Could not find autograd context with id: {context_id} on worker {worker!r}: "
            "it was never opened here, or its `with context()` block has ended"
        )
        self.context_id = context_id
