"""The owner's side of requests for values: creating them, and sending copies."""

import concurrent.futures
from functools import partial
from typing import Any, final

from ..errors import RemoteError, RRefError
from ..proto.v1 import agent_pb2
from ..rpc.calls.handler import log_failure, run_function
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Confirmation, Deferred, Incoming, LaterAnswer
from ..rpc.profiling.extension import run_profiled
from ..rpc.wire.failures import with_traceback_as_text
from .ids import GlobalId
from .owner_table import AwaitedValue, OwnedValue, OwnerTable

__all__ = ["ValueServer"]

MAX_WAITING_BYTES = 4096
"""Bytes of the arguments of a creation whose answer may wait: until then, they are in flight."""


@final
class ValueServer:
    """Serves the values of one owner to other workers."""

    def __init__(self, agent: RpcAgent, table: OwnerTable) -> None:
        self._agent = agent
        self._table = table

    def awaited_by(self, envelope: agent_pb2.Envelope) -> list[AwaitedValue]:
        """Returns what a request waits for: see `Extension.wait_before_run`.

        That is each value which it needs and which is not there. Of a reference that it passes on, only the
        creating message is: functions may take references to values that come later, or never.
        """
        awaited = []
        for needed in envelope.needed_values:
            identifier = GlobalId((needed.worker_id, needed.number))
            if not self._table.is_there(identifier):
                awaited += self._awaited_value(identifier, is_needed=True)
        me = self._agent.info.wire_id
        for each in envelope.references:
            if each.owner == me:
                awaited += self._awaited_value(GlobalId((each.worker_id, each.number)), is_needed=False)
        return awaited

    def _awaited_value(self, identifier: GlobalId, *, is_needed: bool) -> list[AwaitedValue]:
        """Returns what waits for a value, if that is to come. If there is no such value, the request finds out."""
        try:
            awaited = AwaitedValue(self._table.get(identifier), is_needed)
        except RRefError:
            return []
        return [] if awaited.is_over else [awaited]

    def begin_creation(self, message: Incoming) -> OwnedValue:
        """Returns the entry of the value that an arriving RREF_CREATE message is to make, which must be new."""
        created, source = message.envelope.created, message.source.wire_id
        identifier, fork = GlobalId((created.worker_id, created.number)), GlobalId((source, created.fork))
        if identifier.worker != source or created.owner != self._agent.info.wire_id:
            raise ValueError(f"malformed creation: {identifier} with fork {fork}, sent by worker {source}")
        if source != self._agent.info.wire_id:
            return self._table.begin_creation(identifier, fork, source)
        entry = self._table.get(identifier)
        self._table.mark_created(entry)
        return entry

    def serve_creation(self, message: Incoming, entry: OwnedValue) -> LaterAnswer | None:
        """Runs a call and keeps its result. Answers when the call has ended, successfully or not."""
        try:
            function, args, kwargs = message.value
            result = run_profiled(message, run_function, function, args, kwargs)
        except Exception as error:
            log_failure(message, error)
            message.failure = error
            self.fail(entry, error)
            return None
        except BaseException as error:  # such as SystemExit: it ended the call, not this worker
            log_failure(message, error)
            message.failure = error
            entry.fail(RemoteError(self._agent.info.name, f"{type(error).__name__}: {error}", ""))
            return None
        if not isinstance(result, Deferred):
            # With a profile, the answer has its events.
            can_wait = message.envelope.answer_can_wait and not message.envelope.HasField("profile")
            if can_wait and message.nbytes <= MAX_WAITING_BYTES:
                # The answer first: see `_confirm_creation`.
                return Confirmation(partial(entry.resolve, result))
            entry.resolve(result)
            return None
        has_ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        def settle(done: "concurrent.futures.Future[Any]") -> None:
            if isinstance(error := done.exception(), Exception):
                message.failure = error
                self.fail(entry, error)
            else:
                entry.resolve(done.result())
            has_ended.set_result(None)

        result.future.add_done_callback(settle)
        return Deferred(has_ended)

    def serve_fetch(self, message: Incoming) -> Any:
        """Answers with the value, for which the request has waited: the handler of RREF_FETCH."""
        if len(message.envelope.needed_values) != 1:
            raise ValueError("malformed message: it does not name one value")
        needed = message.envelope.needed_values[0]
        entry = self._table.get(GlobalId((needed.worker_id, needed.number)))
        outcome = entry.outcome
        if outcome is None or outcome[1] is None:
            return entry.value()
        return Deferred(entry.future)  # which is done; a raise would add a frame to an error that is kept

    def fail(self, entry: OwnedValue, error: Exception) -> None:
        """Fails an entry with an error of this worker, whose traceback goes with it as text."""
        entry.fail(with_traceback_as_text(error, self._agent.info.name))
