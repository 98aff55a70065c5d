"""The extensions of one agent: calls their hooks, and collects their handlers of message types."""

import concurrent.futures
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, final

from ...proto.v1 import agent_pb2
from ..contracts.extension import Extension
from ..contracts.messages import Handler, Incoming, MessageType, Outgoing
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..wire.pickling import Packer

__all__ = ["Extensions"]

E = TypeVar("E")

log = logging.getLogger(__name__)


@final
class Extensions:
    """Calls the hooks of an agent's extensions, in the order in which they were added.

    The hooks are described in contracts/extension.py.
    """

    def __init__(self, packer: Packer) -> None:
        """Args: packer: pickles messages; the extensions register reference types and reducers with it."""
        self.handlers: dict[MessageType.ValueType, Handler] = {}
        """The handlers of all extensions, by message type."""
        self._packer = packer
        self._extensions: Sequence[Extension] = ()

    def add(self, extension: Extension) -> None:
        """Adds an extension: its handlers, and its hooks on messages that carry users' values."""
        self.handlers.update(extension.handlers())
        if extension.reference_type is not None:
            self._packer.register_reference_type(extension.reference_type)
        self._packer.register_reducers(extension.reducers())
        self._packer.detach_parameters_if(extension.detaches_parameters)
        self._extensions = (*self._extensions, extension)

    def get(self, kind: type[E]) -> E:
        """Returns the extension of this class. Raises StopIteration if there is none."""
        return next(extension for extension in self._extensions if isinstance(extension, kind))

    # Sending.

    def on_send(self, message: Outgoing) -> None:
        """Calls `on_send` of the extensions, which add their headers to a message that is about to be sent.

        Raises:
            Exception: what the hook of an extension raised, after `on_send_aborted` of this extension and of those
                before it.
        """
        called: list[Extension] = []
        try:
            for extension in self._extensions:
                called.append(extension)
                extension.on_send(message)
        except BaseException:
            for extension in called:
                extension.on_send_aborted(message)
            raise

    def on_send_aborted(self, message: Outgoing) -> None:
        """Calls `on_send_aborted` of the extensions, which undo `on_send`: the message was not sent."""
        for extension in self._extensions:
            extension.on_send_aborted(message)

    def on_complete(self, identifier: int) -> None:
        """Tells the extensions that a request of this worker, given by its id, has an answer or has failed."""
        for extension in self._extensions:
            extension.on_complete(identifier)

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:
        """Returns the exception to raise in the caller.

        Args:
            error: the exception that the request was answered with.
            worker: the worker that answered.
        """
        for extension in self._extensions:
            error = extension.map_error(error, worker)
        return error

    # Receiving.

    def on_receive(self, message: Incoming) -> None:
        """Calls `on_receive` of the extensions, which read the headers of a message before it is unpickled."""
        for extension in self._extensions:
            extension.on_receive(message)

    def on_decode_error(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Calls `on_decode_error` of the extensions for a message that will not be decoded; logs what they raise.

        Args:
            source: the sender.
            envelope: the message's, with the headers.
            error: why: decoding failed, or the caller cancelled the request.
        """
        for extension in self._extensions:
            try:
                extension.on_decode_error(Incoming(source, envelope, b"", []), error)
            except Exception:
                log.exception("the headers of a message from worker %s cannot be processed", source.name)

    def waits_before_run(self, message: Incoming) -> "Iterator[concurrent.futures.Future[None]]":
        """Yields the futures to wait for before the handler of a request runs."""
        for extension in self._extensions:
            if (ready := extension.wait_before_run(message)) is not None:
                yield ready

    @contextlib.contextmanager
    def scope(self, message: Incoming) -> Iterator[None]:
        """Context manager for running a request's handler; in the extensions' scopes if it gets users' values."""
        with contextlib.ExitStack() as stack:
            if self.handlers[message.envelope.type].user_values:
                for extension in self._extensions:
                    stack.enter_context(extension.scope(message))
            yield

    # Lifecycle.

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Tells the extensions that a worker is lost, and how it ended."""
        for extension in self._extensions:
            extension.on_worker_lost(worker, end)

    def live_objects(self) -> Mapping[str, int]:
        """Returns the extensions' counts of live objects, by name, for the agent's debug info."""
        return {name: count for extension in self._extensions for name, count in extension.live_objects().items()}

    def close(self) -> None:
        """Closes the extensions. Called when the agent has shut down."""
        for extension in self._extensions:
            extension.close()
