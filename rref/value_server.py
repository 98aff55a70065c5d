"""The owner's side of requests for values: creating them, and sending copies."""

import concurrent.futures
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from ..errors import RemoteError, RRefError
from ..rpc.call_handler import logged, run_function
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Deferred, Incoming
from ..rpc.profiling.extension import run_profiled
from ..rpc.wire.failures import with_traceback_as_text
from .ids import GlobalId
from .owner_table import OwnedValue, OwnerTable

__all__ = ["ValueServer"]

log = logging.getLogger(__name__)


@final
class ValueServer:
    """Serves the values of one owner to other workers."""

    def __init__(self, agent: RpcAgent, table: OwnerTable) -> None:
        self._agent = agent
        self._table = table

    def entry(self, identifier: GlobalId) -> OwnedValue:
        """Returns the entry that a message from another worker names. Raises RRefError as `OwnerTable.get`."""
        entry = self._table.get(identifier)
        self.ask_creator(entry)
        return entry

    def ask_creator(self, entry: OwnedValue) -> None:
        """Asks the creator of an awaited value whether its creating message is still to arrive.

        If it is not, the entry fails. The question also makes this worker notice the loss of the creator.
        """
        if entry.is_created or entry.id.worker == self._agent.info.id:
            return
        creator, identifier = self._agent.worker(entry.id.worker), entry.id

        def answered(error: Exception | None) -> None:
            # Mostly the creating message has arrived meanwhile, and the value has been deleted since.
            if isinstance(error, RRefError) and self._table.fail_awaited(identifier, error):
                log.warning("a message names a value that will not be created: %s", error)

        self._agent.control.send(creator, "rref.await", tuple(identifier), answered, expected=(RRefError,))

    def begin_creation(self, message: Incoming) -> OwnedValue:
        """Returns the entry of the value that an arriving RREF_CREATE message is to make."""
        created = message.envelope.created
        identifier, fork = GlobalId.from_proto(created.reference), GlobalId.from_proto(created.fork)
        if message.source == self._agent.info:
            entry = self._table.get(identifier)
        else:
            entry = self._table.add_fork(identifier, fork, message.source.id)
        self._table.mark_created(entry)
        return entry

    @contextmanager
    def creation_scope(self, message: Incoming, entry: OwnedValue) -> Iterator[None]:
        """Context manager around the handler of RREF_CREATE: fails the entry if the call cannot be unpickled."""
        try:
            yield
        finally:
            if isinstance(message.error, Exception):
                self._fail(entry, message.error)

    def serve_creation(self, message: Incoming, entry: OwnedValue) -> Deferred | None:
        """Runs a call and keeps its result. Answers when the call has ended, successfully or not."""
        try:
            with logged(message):
                result = run_profiled(message, run_function, *message.value)
        except Exception as error:
            self._fail(entry, error)
            return None
        except BaseException as error:  # such as SystemExit: it ended the call, not this worker
            entry.fail(RemoteError(self._agent.info.name, f"{type(error).__name__}: {error}", ""))
            return None
        if not isinstance(result, Deferred):
            entry.resolve(result)
            return None
        has_ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        def settle(done: "concurrent.futures.Future[Any]") -> None:
            if isinstance(error := done.exception(), Exception):
                self._fail(entry, error)
            else:
                entry.resolve(done.result())
            has_ended.set_result(None)

        result.future.add_done_callback(settle)
        return Deferred(has_ended)

    def serve_fetch(self, message: Incoming) -> Deferred:
        """Answers with the value, once it is there: the handler of RREF_FETCH."""
        return Deferred(self.entry(GlobalId(*message.value)).future)

    def _fail(self, entry: OwnedValue, error: Exception) -> None:
        entry.fail(with_traceback_as_text(error, self._agent.info.name))
