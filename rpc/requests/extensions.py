"""The extensions of one agent: calls their hooks, and collects their handlers of message types."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from ...errors import Outcome
from ...proto.v1 import agent_pb2
from ..contracts.extension import Awaited, Extension
from ..contracts.messages import Handler, Incoming, MessageType, Outgoing, Request
from ..contracts.worker import WorkerInfo
from ..wire.pickling import Packer

__all__ = ["Extensions"]

log = logging.getLogger(__name__)


class _Handlers(dict[MessageType.ValueType, Handler]):
    def __missing__(self, kind: MessageType.ValueType) -> Handler:
        name = MessageType.Name(kind) if kind in MessageType.values() else str(kind)
        raise ValueError(f"message type {name} has no handler here: list its extension in gradwire.extensions")


@final
class Extensions:
    """Calls the hooks of an agent's extensions, in the order in which they were added.

    The hooks are described in contracts/extension.py.
    """

    def __init__(self, packer: Packer) -> None:
        """Args: packer: pickles messages; the extensions register reference types and reducers with it."""
        self.handlers: dict[MessageType.ValueType, Handler] = _Handlers()
        """The handlers of all extensions, by message type."""
        self._packer = packer
        self._collecting = threading.Lock()
        """Held while the hooks are collected: of two threads, the later one must see what both have changed."""
        self._extensions: Sequence[Extension] = ()
        self._added: list[tuple[Extension, Mapping[MessageType.ValueType, Handler]]] = []
        """The extensions with their handlers, as no other one observes them."""
        self._basic: dict[MessageType.ValueType, Handler] = {}
        """The handlers of messages that need no extension."""
        self.by_class: dict[type, Any] = {}
        """The extensions by their classes, and the bases of these."""
        # The hooks that some extension overrides. Those of requests are called from where there is no message yet.
        self.on_request: Sequence[Callable[[int, WorkerInfo, Request], None]] = ()
        self.encode_request: Sequence[Callable[[MessageType.ValueType, object], object]] = ()
        self.on_arrival: Sequence[Callable[[WorkerInfo, agent_pb2.Envelope], None]] = ()
        self.wait_before_run: Sequence[Callable[[agent_pb2.Envelope], Sequence[Awaited]]] = ()
        self._on_send: Sequence[tuple[Extension, Callable[[Outgoing], None]]] = ()
        self._on_receive: Sequence[tuple[Extension, Callable[[Incoming], None]]] = ()
        self._scope: Sequence[Callable[[Incoming], AbstractContextManager[None] | None]] = ()
        self._on_complete: Sequence[Callable[[int], None]] = ()
        self.has_on_complete = False
        """Whether some extension is told of the ends of calls."""
        self.observes = False
        """Whether some extension looks at messages without headers."""

    def add_handlers(self, of_collectives: Mapping[MessageType.ValueType, Handler]) -> None:
        """Adds the handlers of messages that need no extension: greetings, and those of collectives."""
        greeting = Handler(lambda _message: None, description="the announcement of a new worker to worker")
        self._basic = {MessageType.GREETING: greeting, **of_collectives}
        self.handlers.update(self._basic)

    def add(self, extension: Extension) -> None:
        """Adds an extension: its handlers, and its hooks on messages that carry users' values."""
        self._added.append((extension, extension.handlers()))
        if extension.reference_type is not None:
            self._packer.register_reference_type(extension.reference_type)
        self._packer.register_reducers(extension.reducers())
        if type(extension).find_reducer is not Extension.find_reducer:
            self._packer.find_reducers_by(extension.find_reducer)
        self._packer.detach_parameters_if(extension.detaches_parameters)
        self._extensions = (*self._extensions, extension)
        for kind in type(extension).__mro__:
            self.by_class.setdefault(kind, extension)
        extension.on_enabled = self._collect
        self._collect()

    def _collect(self) -> None:
        """Collects the handlers and the hooks of the extensions that are on."""
        with self._collecting:
            handlers = dict(self._basic)
            for extension, own in self._added:
                handlers.update(own)
                if extension.is_on:
                    handlers = {kind: extension.observe(each) for kind, each in handlers.items()}
            self.handlers.update(handlers)
            self.on_request = self._overridden("on_request")
            self.encode_request = self._overridden("encode_request")
            self.on_arrival = self._overridden("on_arrival")
            self.wait_before_run = self._overridden("wait_before_run")
            self._on_send = [(each.__self__, each) for each in self._overridden("on_send")]
            self._on_receive = [(each.__self__, each) for each in self._overridden("on_receive")]
            self._scope = self._overridden("scope")
            self._on_complete = [each for each in self._overridden("on_complete") if each.__self__.watches_ends]
            self.has_on_complete = bool(self._on_complete)
            self.observes = any(each.is_on and each.observes_requests for each in self._extensions)

    def _overridden(self, hook: str) -> Sequence[Any]:
        """Returns this method of each extension that overrides it."""
        default = getattr(Extension, hook)
        return [
            getattr(each, hook)
            for each in self._extensions
            if each.is_on and getattr(type(each), hook) is not default
        ]

    # Sending.

    def on_send(self, message: Outgoing) -> None:
        """Calls `on_send` of the extensions, which add their headers to a message that is about to be sent.

        If one raises, so does this, after `on_send_aborted` of this extension and of those before it.
        """
        envelope, references, request = message.envelope, message.references, message.reply_to
        try:
            for extension, on_send in self._on_send:
                if references and extension.adds_to_references:
                    pass
                elif not message.user_values:
                    continue
                elif request is not None:
                    if type(extension) not in request.state:
                        continue
                elif extension.adds_if is not None and not extension.adds_if():
                    continue
                on_send(message)
                envelope.has_headers = True
        except BaseException:
            self._abort_send(message, on_send)
            raise

    def _abort_send(self, message: Outgoing, failed: Callable[[Outgoing], None]) -> None:
        """Has the extensions up to the one whose hook failed undo what they have done."""
        for extension in self._extensions:
            extension.on_send_aborted(message)
            if extension.on_send == failed:
                return

    def on_send_aborted(self, message: Outgoing) -> None:
        """Calls `on_send_aborted` of the extensions, which undo `on_send`: the message was not sent."""
        for extension in self._extensions:
            extension.on_send_aborted(message)

    def on_send_postponed(self, message: Outgoing) -> None:
        """Tells the extensions that a message is not sent before its receiver is back."""
        for extension in self._extensions:
            extension.on_send_postponed(message)

    def on_postponed_sent(self, message: Outgoing) -> None:
        """Tells the extensions that a message which was postponed is sent."""
        for extension in self._extensions:
            extension.on_postponed_sent(message)

    def on_complete(self, identifier: int) -> None:
        """Tells the extensions that a request of this worker, given by its id, has an answer or has failed.

        What one of them raises is logged: the request ends all the same.
        """
        for on_complete in self._on_complete:
            try:
                on_complete(identifier)
            except Exception:
                log.exception("the end of a call cannot be noted")

    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        """Tells the extensions why a request of this worker has failed; see `on_complete`."""
        for extension in self._extensions:
            try:
                extension.on_failure(identifier, error, outcome)
            except Exception:
                log.exception("the failure of a call cannot be noted")

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:
        """Returns the exception to raise in the caller for the one that a worker has answered with."""
        for extension in self._extensions:
            error = extension.map_error(error, worker)
        return error

    # Receiving.

    def on_receive(self, message: Incoming) -> None:
        """Calls `on_receive` of the extensions, which read the headers of a message before it is unpickled.

        Called if there are headers, or some extension `observes`. If one of them raises, the handler of the
        message is told first: what waits for the message must end.
        """
        has_header, references = message.envelope.HasField, message.envelope.references
        try:
            for extension, on_receive in self._on_receive:
                if (
                    extension.header is None
                    or extension.observes_requests
                    or (references and extension.adds_to_references)
                    or has_header(extension.header)
                ):
                    on_receive(message)
        except Exception as error:
            handler = self.handlers.get(message.envelope.type)  # an answer has none
            if handler is not None and handler.on_error is not None:
                handler.on_error(message, error)
            raise

    def may_repeat(self) -> bool:
        """Returns whether a request that this thread sends may be sent again by another one."""
        return all(extension.may_repeat() for extension in self._extensions)

    def on_decode_error(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Tells the extensions of a message that will not be decoded, and why; logs what they raise."""
        for extension in self._extensions:
            try:
                extension.on_decode_error(Incoming(source, envelope, b"", []), error)
            except Exception:
                log.exception("the headers of a message from worker %s cannot be processed", source.name)

    def scope(self, message: Incoming) -> AbstractContextManager[object] | None:
        """Returns the context for running a request's handler, if the extensions have one."""
        if not message.state or not self.handlers[message.envelope.type].user_values:
            return None
        scopes = []
        for scope in self._scope:
            if (entered := scope(message)) is not None:
                scopes.append(entered)
        if not scopes:
            return None
        return scopes[0] if len(scopes) == 1 else _nested(scopes)

    # Lifecycle.

    def live_objects(self) -> Mapping[str, int]:
        """Returns the extensions' counts of live objects, by name, for the agent's debug info."""
        return {name: count for extension in self._extensions for name, count in extension.live_objects().items()}

    def close(self) -> None:
        """Closes the extensions. Called when the agent has shut down."""
        for extension in self._extensions:
            extension.close()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """Tells the extensions that this process is a forked child."""
        self._collecting = threading.Lock()  # which another thread of the parent may have held
        for extension in self._extensions:
            extension.leave_to_parent(why_useless)


@contextlib.contextmanager
def _nested(scopes: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager that enters several, and leaves them in the opposite order."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield
