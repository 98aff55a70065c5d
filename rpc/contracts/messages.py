"""What an agent carries, and how other packages take part in it.

The agent itself knows requests and answers. What they mean is registered: a *handler* per message type, and
*extensions* (`gradwire.rref`, `gradwire.autograd`) with hooks on every message that carries users' values.
"""

import concurrent.futures
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...proto.v1 import agent_pb2
from ...proto.v1.agent_pb2 import MessageType
from .devices import DeviceMap
from .worker import WorkerInfo

if TYPE_CHECKING:
    from .agent import RpcAgent

__all__ = [
    "Buffer",
    "Deferred",
    "Extension",
    "Handler",
    "Incoming",
    "MessageType",
    "Outgoing",
    "extension_factories",
    "register_extension",
]


Buffer = bytes | memoryview
"""Bytes of a message's body or of a tensor."""


@dataclass(slots=True)
class Incoming:
    """A message that has arrived."""

    source: WorkerInfo
    envelope: agent_pb2.Envelope
    body: Buffer
    tensors: list[torch.Tensor]
    """Its tensors; a hook may put others in their place."""
    nbytes: int = 0
    """Bytes of the body and the tensors, as the sender's `post` counts them."""
    references: list[Any] = field(default_factory=list)
    """What the references in the pickle become; a hook fills it."""
    value: Any = None
    """The unpickled body."""
    error: BaseException | None = None
    """What unpickling or handling it raised."""
    state: dict[type, Any] = field(default_factory=dict)
    """What an extension remembers about it, under the extension's class."""


@dataclass(slots=True)
class Outgoing:
    """A message that is about to leave."""

    destination: WorkerInfo
    envelope: agent_pb2.Envelope
    tensors: list[torch.Tensor]
    references: list[Any]
    reply_to: Incoming | None
    """The request that this message answers."""
    device_map: DeviceMap = field(default_factory=dict)
    """Which of this worker's devices become which of the other's."""
    leaves: AbstractSet[int] = frozenset()
    """The tensors, by index, that arrive as leaves: Parameters of modules."""


@dataclass(slots=True, frozen=True)
class Deferred:
    """A handler's answer that is not there yet. No thread waits for it."""

    future: "concurrent.futures.Future[Any]"


@dataclass(slots=True, frozen=True)
class Handler:
    """What a message type does.

    run: gets the message, and returns the answer: a value, or a Deferred.
    user_values: its messages and answers carry users' values, so the extensions' hooks run on them; shutdown
        waits for such messages.
    cancellable: its callers may give such a request up, and nobody else relies on its outcome.
    """

    run: Callable[[Incoming], Any]
    user_values: bool = False
    cancellable: bool = False


class Extension(ABC):  # noqa: B024 - every hook has a sensible default
    """A package that takes part in the messages of one agent. Made once per agent, when its group is known."""

    reference_type: type | None = None
    """Instances of this class travel as references."""

    def __init__(self, agent: "RpcAgent") -> None:
        self.agent = agent

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """The message types it handles."""
        return {}

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """How instances of exactly these classes are pickled into messages, by class; as in `copyreg`."""
        return {}

    def detaches_parameters(self, value: object) -> bool:  # noqa: ARG002
        """Returns whether a value's bare Parameters arrive as leaves; those of modules do anyway."""
        return False

    def on_send(self, message: Outgoing) -> None:
        """A message leaves: add headers. Raising keeps it from being sent."""

    def on_send_aborted(self, message: Outgoing) -> None:
        """A message that went through `on_send` was not sent. Its tensors and references may be let go already."""

    def on_receive(self, message: Incoming) -> None:
        """A message has arrived and is not unpickled yet: read headers, replace tensors, fill references."""

    def wait_before_run(self, message: Incoming) -> "concurrent.futures.Future[None] | None":  # noqa: ARG002
        """A request has arrived: what must be done before its handler runs, if anything."""
        return None

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:  # noqa: ARG002
        """A request to a worker has been answered with an error: what its caller gets."""
        return error

    def on_complete(self, identifier: int) -> None:
        """A request of this worker is over, with an answer or an error; next its future is done."""

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """A message has arrived whose payloads were refused or are malformed: its headers are all there is."""

    def scope(self, message: Incoming) -> AbstractContextManager[None]:  # noqa: ARG002
        """What surrounds the run of a request's handler."""
        return nullcontext()

    def on_worker_lost(self, worker: WorkerInfo) -> None:
        """A worker is gone for good. Must not wait for other workers."""

    def live_objects(self) -> Mapping[str, int]:
        """Counts for the agent's debug info."""
        return {}

    def close(self) -> None:
        """The agent has shut down."""


_factories: list[Callable[["RpcAgent"], Extension]] = []


def register_extension(factory: Callable[["RpcAgent"], Extension]) -> None:
    """Has every agent that starts from now on make an extension."""
    _factories.append(factory)


def extension_factories() -> Iterable[Callable[["RpcAgent"], Extension]]:
    """The registered factories, in the order of registration."""
    return tuple(_factories)
