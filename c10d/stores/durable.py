"""A store that can be started again: its state is in a log, and each operation of a client is done once.

A client that has lost its connection cannot know whether its last operations have been done, and sends them again,
with the numbers that they had. So the outcome of an operation that has changed something is remembered until its
client says that it has it. The log has the operations with their clients and numbers; replaying it gives the state
and the outcomes.

A queue_pop is done when its client has confirmed the item. Until then the item is in the log, though not in the
queue: a store that is started again has it in the queue, for the client that asks again, or for another one.

The log is an OperationLog. A change is appended before it is answered, so it survives the process; with `sync`,
it is on the disk by then, and survives the host too. When the file has grown enough, another one takes its place
that has the present state only.

`serve` runs it in a process of its own, which outlives the workers.
"""

import logging
import os
import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import final

from ...errors import StoreError
from ...net.addresses import format_address, host_for_listening, require_trusted
from ...net.event_loop import acquire_event_loop
from ...net.security import Credentials
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .limits import StoreLimits
from .log import STORE_PROCESS, OperationLog
from .server import StoreServer
from .state import ADDING, KeyValueState, problem_of

__all__ = ["DurableState", "serve"]

MAX_CLIENTS = 1 << 16
"""Clients whose last outcomes are remembered. Beyond it, those of the client are discarded that has been quiet for
longest."""

MAX_OUTCOMES = 1 << 10
"""Outcomes that are remembered of one client: it has as many threads in the store, at most."""

MAX_OUTCOME_BYTES = 256 << 20
"""Bytes of all outcomes that are remembered."""

ID_BYTES = 16

MIN_GROWTH_BYTES = 16 << 20
"""Bytes by which the file grows at least before it is rewritten; else it has to double."""

log = logging.getLogger(__name__)


@final
class DurableState(KeyValueState):
    """A KeyValueState whose changes are in a log, which no other process can use until it is closed."""

    def __init__(self, path: str, limits: StoreLimits, *, sync: bool = False) -> None:
        """Restores the state from the log, which is made if it does not exist.

        Raises StoreError if the file cannot be used, is of another version or kind, or is damaged.
        """
        self._path = os.path.abspath(path)
        self._sync = sync
        self._limits_in_use = limits
        self._popped: defaultdict[str, list[bytes]] = defaultdict(list)
        """By queue, the items whose receipt has not been confirmed."""
        self._pops: dict[tuple[int, int], Operation] = {}
        """By client and number, the last pop that has an item whose receipt has not been confirmed."""
        self._log = _open_log(self._path)
        try:
            self._restore()
        except BaseException:
            self._log.close()
            raise
        self._rewritten_bytes = self._log.size

    def _restore(self) -> None:
        super().__init__()  # without limits: what is in the log has been accepted
        self._answers: OrderedDict[int, dict[int, Outcome]] = OrderedDict()
        """By client and number, the outcomes of operations that have changed something."""
        self._answer_bytes = 0
        self._log.rewind()
        changes = self._log.read()
        first = next(changes, None)
        if first is None:
            first = Operation(kind=store_pb2.IDENTIFY, values=[secrets.token_bytes(ID_BYTES)])
            self._log.append(first)
            self._log.sync()
        if first.kind != store_pb2.IDENTIFY:
            raise StoreError(f"the store's file {self._path!r} does not begin with the identity of a store")
        self._identity = first.values[0]
        """Which store it is: random bytes that the log keeps."""
        for change in changes:
            self._replay(change)
        self.limits = self._limits_in_use
        for name, items in self._popped.items():
            for item in items:
                self.remove(name, item)

    def _replay(self, change: Operation) -> None:
        if change.kind == store_pb2.REMEMBER:
            self._remember(change, Outcome(values=change.values, number=change.amount))
        elif change.kind == store_pb2.QUEUE_REMOVE:
            self.remove(change.keys[0], change.values[0])
            self._remember(change, Outcome(values=change.values))
        elif problem := problem_of(change):
            raise StoreError(
                f"the log has a change that cannot be replayed: {problem}. Start the store with the gradwire that "
                "has written it"
            )
        else:
            self._remember(change, super().apply(change))

    def answer_of(self, operation: Operation) -> Outcome | None:
        """Returns the outcome of an operation that its client sends again; None if it is to be run."""
        if operation.store and operation.store != self._identity:
            return Outcome(error="another store has been started here, without the log of the one that was joined")
        self._discard_acknowledged(operation)
        return self._answers.get(operation.client, {}).get(operation.number) if operation.client else None

    def apply(self, operation: Operation) -> Outcome:
        """Runs one operation, and logs it if it has changed something. If that fails, it has changed nothing."""
        if operation.kind in ADDING or operation.kind == store_pb2.DELETE:
            return self._apply_logged(operation)
        outcome = super().apply(operation)
        if operation.kind == store_pb2.JOIN:
            outcome.store = self._identity
        elif operation.kind == store_pb2.QUEUE_POP and outcome.values:
            self._popped[operation.keys[0]].append(outcome.values[0])
            self._pops[_key_of(operation)] = operation
        return outcome

    def _apply_logged(self, operation: Operation) -> Outcome:
        """Runs an operation that may change something. It is in the log before that, in case there is no room."""
        try:
            self._log.append(operation)
        except StoreError as error:
            return _refusal(error)
        version = self.version
        try:
            outcome = super().apply(operation)
        except BaseException:
            self._log.take_back()
            raise
        if self.version == version:
            self._log.take_back()
            return outcome
        try:
            self._commit()
        except StoreError as error:  # of the disk itself, so seldom that reading the whole log does not matter
            joined = self.joined
            self._restore()
            self.joined = joined
            return _refusal(error)
        self._remember(operation, outcome)
        self._rewrite_if_large()
        return outcome

    def confirm(self, operation: Operation, item: bytes) -> None:
        """Logs that a client has its popped item. Raises StoreError if it cannot or the client has asked again."""
        if self._pops.get(_key_of(operation)) is not operation:
            raise StoreError("the client has sent this operation again")
        name = operation.keys[0]
        change = Operation(
            kind=store_pb2.QUEUE_REMOVE,
            keys=[name],
            values=[item],
            client=operation.client,
            number=operation.number,
        )
        self._log.append(change)
        self._commit()
        self._end_pop(operation, item)
        self._remember(change, Outcome(values=[item]))
        self._rewrite_if_large()

    def put_back(self, operation: Operation, item: bytes) -> None:
        """Puts an item back to the front of the queue from which an operation has popped it."""
        self._end_pop(operation, item)
        super().put_back(operation, item)

    def close(self) -> None:
        """Closes the log."""
        self._log.close()

    def _commit(self) -> None:
        """With `sync`, waits until the last change is on the disk; if that fails, takes it back and raises."""
        if self._sync:
            try:
                self._log.sync()
            except StoreError:
                self._log.take_back()
                raise

    def _end_pop(self, operation: Operation, item: bytes) -> None:
        if self._pops.get(key := _key_of(operation)) is operation:
            del self._pops[key]
        name = operation.keys[0]
        self._popped[name].remove(item)
        if not self._popped[name]:
            del self._popped[name]

    def _rewrite_if_large(self) -> None:
        if self._log.size > self._rewritten_bytes + max(MIN_GROWTH_BYTES, self._rewritten_bytes):
            self._rewrite()

    def _rewrite(self) -> None:
        """Puts a file that has the present state only in the place of the log; keeps the log if that fails."""
        self._rewritten_bytes = self._log.size  # when it has doubled, this is tried again
        path = self._path + ".new"
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # of a process that was killed here
            made = _open_log(path)
            try:
                for change in self._operations():
                    made.append(change)
                made.sync()
                made.replace(self._path)
            except BaseException:
                made.close()
                with suppress(OSError):
                    os.unlink(path)
                raise
        except (StoreError, OSError) as error:
            log.warning("the log of the store cannot be rewritten, so it grows: %s", error)
            return
        self._log.close()
        self._log = made
        self._rewritten_bytes = made.size

    def _operations(self) -> Iterator[Operation]:
        yield Operation(kind=store_pb2.IDENTIFY, values=[self._identity])
        for name, items in self._popped.items():
            for item in items:
                yield Operation(kind=store_pb2.QUEUE_PUSH, keys=[name], values=[item])
        yield from self.operations()
        for client, answers in self._answers.items():
            for number, outcome in answers.items():
                yield Operation(
                    kind=store_pb2.REMEMBER,
                    client=client,
                    number=number,
                    values=outcome.values,
                    amount=outcome.number,
                )

    def _remember(self, operation: Operation, outcome: Outcome) -> None:
        """Remembers an outcome of a client, and forgets others beyond the bounds."""
        if not operation.client:
            return
        self._discard_acknowledged(operation)
        answers = self._answers.setdefault(operation.client, {})
        self._answers.move_to_end(operation.client)
        if operation.number in answers:
            self._drop(answers, operation.number)
        answers[operation.number] = outcome
        self._answer_bytes += outcome.ByteSize()
        while len(answers) > MAX_OUTCOMES:
            self._drop(answers, min(answers))
        while len(self._answers) > 1 and (
            len(self._answers) > MAX_CLIENTS or self._answer_bytes > MAX_OUTCOME_BYTES
        ):
            _, discarded = self._answers.popitem(last=False)
            for number in list(discarded):
                self._drop(discarded, number)
        while self._answer_bytes > MAX_OUTCOME_BYTES and len(answers) > 1:
            self._drop(answers, min(answers))

    def _discard_acknowledged(self, operation: Operation) -> None:
        if answers := self._answers.get(operation.client):
            for number in [number for number in answers if number < operation.acknowledged_below]:
                self._drop(answers, number)

    def _drop(self, answers: dict[int, Outcome], number: int) -> None:
        self._answer_bytes -= answers.pop(number).ByteSize()


def _open_log(path: str) -> OperationLog:
    opened = OperationLog(path, STORE_PROCESS)
    try:
        if not opened.try_lock(exclusive=True):
            raise StoreError(
                f"the store's file {path!r} is used by another process: {opened.describe_lock_holders()}"
            )
    except BaseException:
        opened.close()
        raise
    return opened


def _refusal(error: StoreError) -> Outcome:
    return Outcome(error=f"{error}; nothing has been changed")


def _key_of(pop: Operation) -> tuple[int, int]:
    return (pop.client, pop.number) if pop.client else (0, id(pop))


def serve(
    log: str, host: str, port: int, stopped: threading.Event, *, sync: bool = False, insecure: bool = False
) -> None:
    """Serves a store until an event is set. Prints its address in one line when it listens.

    Args:
        log: the path of its log, from which it goes on if it exists. Its folder must exist.
        host: name or address to listen on.
        port: to listen on; 0 for a free one.
        stopped: ends it.
        sync: whether each change is on the disk before it is answered. Without, changes survive this process, and
            the last ones may be lost when the host fails.
        insecure: allows an address that is not a loopback address, without credentials.

    Raises:
        StoreError: the log cannot be used, or the address needs credentials or `insecure`.
        StoreNetworkError: the port is in use.
        CredentialsError: the credentials in the environment are not valid.
    """
    credentials = Credentials.from_environment()
    identity = credentials.identity() if credentials is not None else None
    is_protected = insecure or identity is not None
    require_trusted(host, insecure=is_protected, action="hosting a store on", how_to_allow="pass --insecure")
    limits = StoreLimits()
    state = DurableState(log, limits, sync=sync)
    try:
        server = StoreServer(limits, state)
        loop = acquire_event_loop()
        try:
            where = host_for_listening(host, insecure=is_protected)
            bound = loop.run(server.start(where, port, identity, insecure=insecure))
            print(f"store on {format_address(host, bound)}, log {log}", flush=True)
            stopped.wait()
            loop.run(server.stop())
        finally:
            loop.release()
    finally:
        state.close()
