"""The extensions of one agent, and the handlers of its message types."""

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
    """Calls the hooks of an agent's extensions, in the order of `add`."""

    def __init__(self, packer: Packer) -> None:
        """Args: packer: pickles messages; learns the reference types and reducers of the extensions."""
        self.handlers: dict[MessageType.ValueType, Handler] = {}
        """By message type."""
        self._packer = packer
        self._all: Sequence[Extension] = ()

    def add(self, extension: Extension) -> None:
        """Adds an extension, which takes part in users' messages from now on."""
        self.handlers.update(extension.handlers())
        if extension.reference_type is not None:
            self._packer.register_reference_type(extension.reference_type)
        self._packer.register_reducers(extension.reducers())
        self._packer.detach_parameters_if(extension.detaches_parameters)
        self._all = (*self._all, extension)

    def get(self, kind: type[E]) -> E:
        """Returns the extension of this class."""
        return next(extension for extension in self._all if isinstance(extension, kind))

    # Sending.

    def on_send(self, message: Outgoing) -> None:
        """Has the extensions add their headers. If one raises, those before it undo theirs, and so does it."""
        called: list[Extension] = []
        try:
            for extension in self._all:
                called.append(extension)
                extension.on_send(message)
        except BaseException:
            for extension in called:
                extension.on_send_aborted(message)
            raise

    def on_send_aborted(self, message: Outgoing) -> None:
        """Has the extensions undo `on_send`."""
        for extension in self._all:
            extension.on_send_aborted(message)

    def on_complete(self, identifier: int) -> None:
        """Tells the extensions that a request of this worker has an answer or has failed."""
        for extension in self._all:
            extension.on_complete(identifier)

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:
        """Returns the exception that a caller gets for the one that a worker has answered with."""
        for extension in self._all:
            error = extension.map_error(error, worker)
        return error

    # Receiving.

    def on_receive(self, message: Incoming) -> None:
        """Has the extensions read the headers of a message, before it is unpickled."""
        for extension in self._all:
            extension.on_receive(message)

    def on_decode_error(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Tells the extensions of a message of which only the headers can be read."""
        for extension in self._all:
            try:
                extension.on_decode_error(Incoming(source, envelope, b"", []), error)
            except Exception:
                log.exception("the headers of a message from worker %s cannot be processed", source.name)

    def waits_before_run(self, message: Incoming) -> "Iterator[concurrent.futures.Future[None]]":
        """Yields the futures that the handler of a request has to wait for."""
        for extension in self._all:
            if (ready := extension.wait_before_run(message)) is not None:
                yield ready

    @contextlib.contextmanager
    def scope(self, message: Incoming) -> Iterator[None]:
        """Context manager for the handling of a request: enters the scopes of the extensions."""
        with contextlib.ExitStack() as stack:
            if self.handlers[message.envelope.type].user_values:
                for extension in self._all:
                    stack.enter_context(extension.scope(message))
            yield

    # The agent's life.

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Tells the extensions that a worker is lost."""
        for extension in self._all:
            extension.on_worker_lost(worker, end)

    def live_objects(self) -> Mapping[str, int]:
        """Returns the extensions' counts for the debug info."""
        return {name: count for extension in self._all for name, count in extension.live_objects().items()}

    def close(self) -> None:
        """Closes the extensions: the agent has shut down."""
        for extension in self._all:
            extension.close()
