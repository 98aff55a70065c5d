"""The contract of an extension: a package that takes part in the messages of an agent.

An agent knows requests and answers only. Calls, references, autograd and profiling are extensions: each registers
handlers for its message types, and has hooks on every message that carries users' values.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol

from ...errors import Outcome
from ...proto.v1 import agent_pb2
from .agent import RpcAgent
from .messages import Handler, Incoming, MessageType, Outgoing, Request
from .worker import WorkerInfo, WorkerWatcher

__all__ = ["Awaited", "Extension", "ExtensionFactory"]


class Awaited(Protocol):
    """Something that another worker has promised, and for which a request waits before it begins."""

    @property
    def is_over(self) -> bool:
        """Whether the request need not wait for it any more."""

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Has a function called when `is_over` may have changed. It takes any thread, and does not block."""

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        """Has the function not called any more. Does nothing if there is none."""


class Extension(WorkerWatcher, ABC):  # every hook has a sensible default
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

    adds_to_references: bool = False
    """Whether `on_send` has something to add to each message with references."""

    adds_if: Callable[[], object] | None = None
    """Returns whether `on_send` has something to add to a request that this thread sends. A function in C, which
    is called for each. None: `on_send` always looks itself."""

    header: ClassVar[Literal["autograd", "created", "profile"] | None] = None
    """The field of the envelope without which `on_receive` has nothing to do. None: it looks itself."""

    observes_requests: bool = False
    """Whether `on_receive` looks at messages without any header, too. `set_enabled` makes a change known."""

    watches_ends: bool = True
    """Whether `on_complete` is called. `set_enabled` makes a change known."""

    is_on: bool = True
    """Whether its hooks on messages are called. One that is off costs nothing. `set_enabled` changes it."""

    def __init__(self, agent: RpcAgent) -> None:
        self.agent = agent
        self.on_enabled: Callable[[], None] = lambda: None
        """Called when `is_on` has changed; the agent sets it."""

    def set_enabled(self, is_on: bool) -> None:
        """Has the hooks on messages called from now on, or not any more. Calls in flight may miss some of them."""
        self.is_on = is_on
        self.on_enabled()

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of its message types."""
        return {}

    def observe(self, handler: Handler) -> Handler:
        """Returns what handles messages in place of a handler, for an extension that measures what others run.

        Called with each handler of the extensions that were added before it.
        """
        return handler

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """Returns how instances of exactly these classes are pickled into messages, as in `copyreg`."""
        return {}

    def find_reducer(self, kind: type) -> Callable[[Any], Any] | None:  # noqa: ARG002
        """Returns how to pickle instances of exactly this class, for which there are no `reducers`; else None."""
        return None

    def encode_request(self, kind: MessageType.ValueType, value: object) -> object:  # noqa: ARG002
        """Returns what is pickled in place of the value of a request that is about to be sent."""
        return value

    def detaches_parameters(self, value: object) -> bool:  # noqa: ARG002
        """Returns whether a value's bare Parameters arrive as leaves; those of modules do anyway."""
        return False

    def on_request(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Is told of a request that is about to be sent, with its id. `on_complete` follows. Must not raise."""

    def on_send(self, message: Outgoing) -> None:
        """Adds headers to a message that is about to be sent. An exception keeps it from being sent.

        Called for requests as `adds_if` says, for answers to requests that have something of this class in their
        `state`, and for messages with references as `adds_to_references` says.
        """

    def on_send_aborted(self, message: Outgoing) -> None:
        """Undoes `on_send`: the message was not sent. Its tensors and references may be missing."""

    def on_send_postponed(self, message: Outgoing) -> None:
        """Is told that a message is not sent before its receiver, which does not answer, is back.

        Maybe several times. `on_postponed_sent` or `on_send_aborted` follows.
        """

    def on_postponed_sent(self, message: Outgoing) -> None:
        """Is told that a message that was postponed is sent."""

    def may_repeat(self) -> bool:
        """Returns whether a request that this thread sends may be sent again by another one.

        Not if `on_send` adds something of the thread to it.
        """
        return True

    def wait_before_run(self, envelope: agent_pb2.Envelope) -> Sequence[Awaited]:  # noqa: ARG002
        """Returns what a request that names references or values has to wait for. Must not raise.

        While it waits it is as one that has not been read: it needs no thread, and ends with its timeout. Called
        again when one of these is over.
        """
        return ()

    def on_receive(self, message: Incoming) -> None:
        """Reads the headers of a message before it is unpickled; may replace tensors, and fills in references.

        Called for messages with headers, as `header` and `observes_requests` say.
        """

    def scope(self, message: Incoming) -> AbstractContextManager[None] | None:  # noqa: ARG002
        """Returns the context in which the handler of a request runs, if there is one.

        Called only for requests of which some extension keeps something in `message.state`.
        """
        return None

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:  # noqa: ARG002
        """Returns the exception that the caller gets for the one that a worker has answered with."""
        return error

    def on_arrival(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Is told of a request that has arrived; its payloads may still be on their way. Must not raise.

        Its handler runs, or `on_decode_error` follows, unless the request's payloads or its sender are lost.
        """

    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        """Is told why a request of this worker has failed, right before `on_complete`."""

    def on_complete(self, identifier: int) -> None:
        """Is told that a request of this worker has an answer or has failed, right before its future is done."""

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Handles a message that cannot be decoded: only its headers are known.

        So it does one that is no call, and whose payloads do not come: its sender is lost, or the connection.
        """

    def live_objects(self) -> Mapping[str, int]:
        """Returns counts for the agent's debug info."""
        return {}

    def close(self) -> None:
        """Releases what it holds: the agent has shut down."""

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, has what the program holds of it do nothing, or raise an error: see RpcAgent."""


ExtensionFactory = Callable[[RpcAgent], Extension]
"""Makes an extension for an agent; an Extension's class is one."""
