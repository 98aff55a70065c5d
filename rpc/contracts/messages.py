"""Messages between agents, their handlers, and checks of what users give to the functions that send requests."""

import concurrent.futures
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, final

import torch

from ...proto.v1 import agent_pb2
from ...proto.v1.agent_pb2 import MessageType
from .devices import NO_DEVICES, DeviceMap
from .worker import WorkerInfo

__all__ = [
    "CALL",
    "CALL_PARTS",
    "CANCEL",
    "CONTROL",
    "ERROR",
    "RESULT",
    "RREF_CREATE",
    "RREF_FETCH",
    "UNSET_RPC_TIMEOUT",
    "Buffer",
    "Confirmation",
    "Deferred",
    "Handler",
    "Incoming",
    "MessageType",
    "Outgoing",
    "Request",
    "UnwantedMessageError",
    "check_call",
    "check_received",
    "check_timeout",
]


CALL: MessageType.ValueType = MessageType.CALL
CANCEL: MessageType.ValueType = MessageType.CANCEL
CONTROL: MessageType.ValueType = MessageType.CONTROL
ERROR: MessageType.ValueType = MessageType.ERROR
RESULT: MessageType.ValueType = MessageType.RESULT
RREF_CREATE: MessageType.ValueType = MessageType.RREF_CREATE
RREF_FETCH: MessageType.ValueType = MessageType.RREF_FETCH
"""The types of the hot path: a name of the module is found faster than one of the protobuf enum."""

Buffer = bytes | memoryview
"""Bytes of a message's body or of a tensor."""

UNSET_RPC_TIMEOUT = -1.0
"""The timeout argument that means "the timeout of the options"."""

CALL_PARTS = ("the function", "args", "kwargs")
"""Names of the parts of a call, for a SerializationError."""


class UnwantedMessageError(Exception):
    """Raised by the `check` of a handler: nothing waits for the message, which is dropped and not unpickled."""


@dataclass(slots=True)
class Request:
    """A request of this worker, as it goes down from the caller to the network.

    kind: a message type that the receiver has a handler for.
    value: the body, anything that pickles.
    timeout: seconds until the request fails with RpcTimeoutError; 0 for none, None for the agent's `rpc_timeout`.
    label: the value's name in a SerializationError; for a tuple, the name of each of its items.
    header: fills in headers of the envelope.
    keep: an object that is kept alive until the request is answered, even after its timeout, or never can be.
    idempotent: whether it may run more than once: then it is sent again if the connection fails.
    """

    kind: MessageType.ValueType
    value: object
    timeout: float | None = None
    label: str | Sequence[str] = "the value"
    header: Callable[[agent_pb2.Envelope], None] | None = None
    keep: object = None
    idempotent: bool = False


@dataclass(slots=True)
class Incoming:
    """A message that has arrived."""

    source: WorkerInfo
    envelope: agent_pb2.Envelope
    body: Buffer
    tensors: list[torch.Tensor]
    """The message's tensors; a hook may replace them."""
    nbytes: int = 0
    """Bytes of the body and the tensors, as the sender's `post` counts them."""
    references: list[Any] = field(default_factory=list)
    """What the references in the pickle become; a hook fills it."""
    value: Any = None
    """The unpickled body."""
    failure: BaseException | None = None
    """What the function that a request names has raised, if the handler does not raise it."""
    state: dict[type, Any] = field(default_factory=dict)
    """What an extension keeps about this message, under the extension's class."""
    has_begun: bool = False
    """Whether its handler has begun to run."""
    on_ran: Callable[[], None] | None = None
    """Called when its handler has run or raised, before the answer is sent."""


@dataclass(slots=True)
class Outgoing:
    """A message that is about to be sent."""

    destination: WorkerInfo
    envelope: agent_pb2.Envelope
    body: bytes = b""
    tensors: list[torch.Tensor] = field(default_factory=list)
    references: list[Any] = field(default_factory=list)
    leaves: AbstractSet[int] = frozenset()
    """Indices of the tensors that arrive as leaves of the autograd graph: Parameters of modules."""
    reply_to: Incoming | None = None
    """The request that this message answers, or belongs to."""
    user_values: bool = False
    """Whether the message carries users' values, so that the hooks of the extensions run on it."""
    device_map: DeviceMap = field(default_factory=lambda: NO_DEVICES)
    """From devices of this worker to devices of the receiver."""
    # Set when it is sent.
    payloads: Sequence[agent_pb2.Payload] = ()
    """The payloads that are not in the envelope."""
    nbytes: int = 0
    """Bytes of the body and the tensors."""

    def beginning(self) -> bytes:
        """Returns the first bytes of the envelope of a request: no other envelope begins with them."""
        return agent_pb2.Envelope(id=self.envelope.id, type=self.envelope.type).SerializeToString()


@final
@dataclass(slots=True, frozen=True)
class Deferred:
    """The answer of a handler that is not known yet. No thread waits for the future.

    on_aborted: called on any thread if nobody waits for the answer any more: the caller has cancelled the request,
        or is lost. Must not block.
    """

    future: "concurrent.futures.Future[Any]"
    on_aborted: Callable[[], None] = lambda: None


@final
@dataclass(slots=True, frozen=True)
class Confirmation:
    """The answer None, as a control message, to a request whose envelope says that it can wait.

    then: called when it waits. If the control thread is woken afterwards, it sends it.
    """

    then: Callable[[], None] = lambda: None


@dataclass(slots=True, frozen=True)
class Handler:
    """What a message type means.

    run: processes a message and returns its answer, a value, a Deferred or a Confirmation.
    user_values: whether its messages and answers carry users' values; then the hooks of the extensions run on
        them, and shutdown waits for them.
    cancellable: whether callers may cancel such a request before it has begun to run.
    operation: the function that users call to send such a request; for `repr` and log lines.
    description: what such a request is, in words that go on with the name of a worker; for errors.
    is_quick: whether answers to such requests are plain, and completing one runs code of gradwire only, unless the
        user has added callbacks. Then the thread that reads an answer does it.
    check: called before a message is unpickled: looks at its headers, and raises if the sender may not send such
        a message, or UnwantedMessageError.
    on_error: called when a message could not be unpickled, or `run` has raised, and the error has been answered;
        and before that, when an extension refuses the message.
    """

    run: Callable[[Incoming], Any]
    user_values: bool = False
    cancellable: bool = False
    operation: str = "request"
    description: str = "a request to worker"
    is_quick: bool = False
    check: Callable[[Incoming], None] | None = None
    on_error: Callable[[Incoming, Exception], None] | None = None


def check_timeout(timeout: float) -> float | None:
    """Returns a call's timeout in seconds as the agent takes it; None for that of the options.

    Raises ValueError if the timeout is negative, infinite or not a number.
    """
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: give seconds, 0 for none, or leave it out")
    return float(timeout)


def check_call(
    function: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the function, the positional arguments as a tuple and the named arguments as a dict.

    Raises TypeError if the function is not callable, args is no sequence, or kwargs has keys that are not strings.
    """
    if not callable(function):
        raise TypeError(f"func is {function!r}, which cannot be called")
    is_tuple = type(args) is tuple or args is None  # mostly; to ask for a Sequence takes longer than the rest
    if not is_tuple and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
        raise TypeError(f"args is {args!r}: give a tuple, (x,) for one argument")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise TypeError(f"kwargs is {kwargs!r}: give a dictionary of names")
    return function, tuple(args or ()), dict(kwargs or {})


def check_received(args: object) -> None:
    """Raises TypeError if positional arguments of another worker are neither a tuple nor a list.

    Other sequences have 2**60 items in a few bytes.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is a {type(args).__name__}: give a tuple")
