"""The contract of an extension: a package that takes part in the messages of an agent.

An agent knows requests and answers only. Calls, references, autograd and profiling are extensions: each registers
handlers for its message types, and has hooks on every message that carries users' values.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from .agent import RpcAgent
from .messages import Handler, Incoming, MessageType, Outgoing
from .worker import WorkerInfo
from .worker_end import WorkerEnd

__all__ = ["Extension", "ExtensionFactory"]


class Extension(ABC):  # noqa: B024 - every hook has a sensible default
    """Takes part in the messages of one agent. Made once per agent, when the members of its group are known.

    A hook that a class does not override costs nothing; the others are called for each message of users' values,
    and return at once if they have nothing to do.

    Hooks run in the order in which the agent was given its extensions, on the thread that sends or handles the
    message.
    """

    reference_type: ClassVar[type | None] = None
    """Instances of exactly this class travel as references, counted by the hooks, not as pickles."""

    control_kinds: ClassVar[Sequence[str]] = ()
    """The kinds of control messages that it registers handlers for."""

    def __init__(self, agent: RpcAgent) -> None:
        self.agent = agent

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of its message types."""
        return {}

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """Returns how instances of exactly these classes are pickled into messages, as in `copyreg`."""
        return {}

    def detaches_parameters(self, value: object) -> bool:  # noqa: ARG002
        """Returns whether a value's bare Parameters arrive as leaves; those of modules do anyway."""
        return False

    def on_send(self, message: Outgoing) -> None:
        """Adds headers to a message that is about to be sent. An exception keeps it from being sent."""

    def on_send_aborted(self, message: Outgoing) -> None:
        """Undoes `on_send`: the message was not sent. Its tensors and references may be missing."""

    def may_repeat(self) -> bool:
        """Returns whether a request that this thread sends may be sent again by another one.

        Not if `on_send` adds something of the thread to it.
        """
        return True

    def on_receive(self, message: Incoming) -> None:
        """Reads the headers of a message before it is unpickled; may replace tensors, and fills in references."""

    def scope(self, message: Incoming) -> AbstractContextManager[None] | None:  # noqa: ARG002
        """Returns the context in which the handler of a request runs, if there is one.

        Called only for requests of which some extension keeps something in `message.state`.
        """
        return None

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:  # noqa: ARG002
        """Returns the exception that the caller gets for the one that a worker has answered with."""
        return error

    def on_complete(self, identifier: int) -> None:
        """Is told that a request of this worker has an answer or has failed, right before its future is done."""

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Handles a message that cannot be decoded: only its headers are known."""

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Handles a worker that does not answer, and may come back. Must not wait for other workers.

        What this worker has sent it, and what it has sent, may not have arrived. `on_worker_back` or
        `on_worker_lost` follows, on any thread, when this method has returned. What the worker holds here, and
        what this worker holds there, stays valid until it is lost.
        """

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Handles a suspect worker that answers again. Must not wait for other workers."""

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Handles the loss of a worker, which ended like this. Must not wait for other workers."""

    def live_objects(self) -> Mapping[str, int]:
        """Returns counts for the agent's debug info."""
        return {}

    def close(self) -> None:
        """Releases what it holds: the agent has shut down."""


ExtensionFactory = Callable[[RpcAgent], Extension]
"""Makes an extension for an agent; an Extension's class is one."""
