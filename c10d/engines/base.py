"""Defines the contract of an engine, which carries out a process group's operations on one type of device.

All ranks of a group create their engine together, and one group uses it. The group checks and normalizes the
arguments first. Tensors have any dtype of torch, are dense, contiguous, on the engine's device and not tracked by
autograd; their dtypes and sizes match on this rank. Only the number of elements of a tensor matters, not its
shape. The tensors of an operation share no memory, except that an output may be what this rank gives itself: its
own part of a list of inputs or of the whole input, or the input that is its own part of the outputs. Roots and
peers are ranks of this group. Pairs of dtype and reduction that no engine supports are refused before they get
here; c10d/engines/reductions.py has the functions `prepare`, `combine` and `finish` to compute all others.

There are four kinds of engine, told apart by class variables:

- A blocking engine (the default) returns from an operation when it is done. Its collectives are called one after
  another, in the order in which this rank issued them; so are its sends to each peer, and its receives from each
  peer. These sequences run concurrently, on the caller's threads or on threads of the group. An operation that
  needs none of these threads any more may return a PendingOperation before it is done; the next is then called.
- A blocking engine with `posts_receives` returns a PendingOperation from `recv`, so that receives with different
  tags may complete in any order.
- With `blocking = False` every operation starts on the caller's thread and returns a PendingOperation. Several
  that the program issues as one go through `start`, which may combine them.
- With `uses_streams` as well, operations run on GPU streams: `PendingOperation.wait` makes the current streams
  wait rather than the caller, and callbacks run as soon as `wait` would not block the caller.
"""

import itertools
import threading
import time
from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias, final

from torch import Tensor

from ...errors import CollectiveTimeoutError, ProcessGroupError, StoreError, UnsupportedOperationError
from ..stores.views import wait_for_keys
from ..torch_types import TorchStore
from .reductions import Reduction

__all__ = [
    "DIED",
    "CombinedOperation",
    "CompletedOperation",
    "Engine",
    "EngineFactory",
    "OperationWithFinalStep",
    "Pending",
    "PendingOperation",
    "Setup",
    "Tensors",
    "chunks",
    "peek",
]

LOOK_S = 1.0
"""Seconds after which a rank that waits for others looks whether one of them has died or left."""

DIED = "its process died or ended without leaving the group, or its host cannot be reached"
"""The reason of a RankLostError if the group knows that the rank has not just left."""


class PendingOperation(Protocol):
    """An operation that an engine has started.

    All methods may be called from any thread, at the same time, and any number of times.
    """

    def wait(self, timeout: float | None) -> None:
        """Blocks until the operation is done.

        Args:
            timeout: seconds to wait at most; the operation stays in flight afterwards. None waits until the
                operation is done or its own timeout has expired.

        Raises:
            TimeoutError: the operation is still in flight after `timeout` seconds.
            Exception: the error that the operation failed with, on every call.
        """

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not.

        Does not block, not even on a lock: it may run in a signal handler of a thread that holds the lock.
        """

    def source(self) -> int:
        """Returns the rank that sent the message. Defined for receives that are done."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already.

        The callback may run on any thread, must not raise, and must not wait for other operations.
        """


Pending: TypeAlias = PendingOperation | None
"""What an operation of an engine returns: None if it is done."""

Tensors: TypeAlias = Sequence[Tensor]


def peek(pending: PendingOperation) -> bool:
    """Returns whether an operation is known to have finished, for tools that must not affect it.

    Operations whose `done` starts a thread or handles an error have a method `peek` for this, and so have
    operations made of others. Those without it are asked by `done`.
    """
    ask: Callable[[], bool] = getattr(pending, "peek", pending.done)
    return ask()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments that an engine is created from.

    store: key-value store shared by all ranks of the group. Nothing else writes to it, so keys need no prefix.
    rank: rank of this process in the group, from 0 to `size - 1`.
    size: number of ranks in the group.
    timeout: seconds that connecting to the other ranks may take.
    device_type: type of the device that all tensors are on, such as `"cpu"` or `"cuda"`.
    global_ranks: for each rank of the group, its rank in the default group; error messages name this one.
    group_name: name of the group.
    on_failure: reports an error after which the group cannot continue. An engine calls it, from any thread, for
        errors that no blocking operation raises. The group then calls `Engine.fail`, possibly with a more precise
        error.
    wait_for_cause: for an engine whose connection to another rank has broken: waits until the group has learnt
        why, at most so many seconds, and returns that error; None if it has not learnt it.
    insecure: whether this rank allows connections to other hosts that are neither encrypted nor authenticated. An
        engine that makes such connections gives it to `gather_consenting_hosts`.
    """

    store: TorchStore
    rank: int
    size: int
    timeout: float
    device_type: str
    global_ranks: tuple[int, ...]
    group_name: str
    on_failure: Callable[[Exception], None] = field(default=lambda _: None)
    wait_for_cause: Callable[[float], Exception | None] = field(default=lambda _: None)
    insecure: bool = False

    def exchange(self, key: str, text: str) -> list[str]:
        """Gathers a text of each rank through the store, under keys that start with `key`.

        Raises:
            CollectiveTimeoutError: some ranks did not do so within the timeout; it names them.
            RankLostError: a rank has died, or could not create its engine.
        """
        self.store.set(f"{key}/{self.rank}", text)
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self.wait_for_keys(keys)
        return [self.store.get(each).decode() for each in keys]

    def wait_for_keys(self, keys: Sequence[str]) -> None:
        """Waits until the store has all keys, of which rank i sets the i-th; see `exchange` for the errors."""
        deadline = time.monotonic() + self.timeout
        while not self._has_keys(keys, min(left := max(deadline - time.monotonic(), 0.0), LOOK_S)):
            if left <= LOOK_S and (missing := [i for i, key in enumerate(keys) if not self.store.check([key])]):
                ranks = ", ".join(str(self.global_ranks[rank]) for rank in missing)
                raise CollectiveTimeoutError("creating the group", self.timeout, f"rank {ranks}")

    def _has_keys(self, keys: Sequence[str], seconds: float) -> bool:
        """Waits for so long; raises why the group has failed meanwhile, unless all keys are there."""
        try:
            if wait_for_keys(self.store, keys, seconds):
                return True
            if (cause := self.wait_for_cause(0.0)) is None:
                return False
            if self.store.check(list(keys)):
                return True
        except StoreError:  # it may be gone with the rank that serves it
            if (cause := self.wait_for_cause(LOOK_S)) is None:
                raise
        raise cause.with_traceback(None)


class Engine(ABC):
    """Carries out the operations of a process group; operations that a subclass lacks raise an error.

    Outputs are written in place. An engine returns None (from `recv`, the source rank) once the tensors have their
    values, or a PendingOperation.

    All operations take a `timeout` in seconds, and raise, at once or from `PendingOperation.wait`:

    - CollectiveTimeoutError if other ranks did not take part within `timeout`; it should name those ranks.
    - RankLostError if a rank that the operation needs has died or left the group.
    - CollectiveMismatchError if the engine notices that ranks called different operations.
    - UnsupportedOperationError, ValueError or TypeError if nothing has been sent yet. These leave the group
      usable; after any other error the group has failed.

    Nobody else reads outputs or writes to any tensor of an operation until it is done.
    """

    name: ClassVar[str]
    """Name of the engine in backends and error messages, such as `"gloo"`."""

    blocking: ClassVar[bool] = True
    """Whether operations return when they are done, rather than a PendingOperation."""

    posts_receives: ClassVar[bool] = False
    """Whether `recv` of a blocking engine returns a PendingOperation."""

    uses_streams: ClassVar[bool] = False
    """Whether operations run on streams of a GPU, and `PendingOperation.wait` makes the current streams wait."""

    detects_departures: ClassVar[bool] = False
    """Whether the engine itself raises RankLostError where a rank that left the group is needed, and only there.

    For other engines the group fails what is still in flight with that rank a second after it left.
    """

    def __init__(self, setup: Setup) -> None:
        """Connects to the other ranks, which do the same at the same time. Subclasses call this method first.

        Raises:
            ProcessGroupError: the ranks cannot be connected.
            CollectiveTimeoutError: some ranks did not take part within the timeout of the setup.
        """
        self.rank = setup.rank
        self.size = setup.size
        self.failure: Exception | None = None
        """What `fail` was called with first."""
        self._setup = setup

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> Pending:
        """Copies `tensor` of rank `root` to all ranks' `tensor`, which have its size and dtype."""
        raise self.unsupported("broadcast")

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> Pending:
        """Reduces all ranks' `tensor` element by element; every rank's `tensor` gets the same bits."""
        raise self.unsupported("all_reduce")

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> Pending:
        """Reduces all ranks' `tensor` into that of rank `root`; on other ranks it is undefined afterwards."""
        raise self.unsupported("reduce")

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> Pending:
        """Copies rank i's `tensor` to `outputs[i]` on every rank.

        Sizes may differ between ranks; `outputs[i]` then has the size of rank i's tensor.
        """
        raise self.unsupported("all_gather")

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> Pending:
        """Concatenates all ranks' `tensor`, of n elements each, into `output`, of `size * n` elements.

        `tensor` may be this rank's chunk of `output`, as in FSDP.
        """
        return self.all_gather(chunks(output, self.size), tensor, timeout)

    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> Pending:
        """Copies rank i's `tensor` to `outputs[i]` on rank `root`; `outputs` is empty on other ranks.

        All tensors have one size.
        """
        raise self.unsupported("gather")

    def scatter(self, tensor: Tensor, inputs: Tensors, root: int, timeout: float) -> Pending:
        """Copies `inputs[i]` of rank `root` to rank i's `tensor`; `inputs` is empty on other ranks.

        All tensors have one size.
        """
        raise self.unsupported("scatter")

    def reduce_scatter(self, tensor: Tensor, inputs: Tensors, reduction: Reduction, timeout: float) -> Pending:
        """Reduces all ranks' `inputs[i]` into rank i's `tensor`.

        `inputs` are not changed. `inputs[i]` have one size on all ranks, which may differ for different i.
        """
        raise self.unsupported("reduce_scatter")

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> Pending:
        """Reduces the i-th of `size` equal chunks of all ranks' `whole` into rank i's `tensor`.

        `tensor` may be this rank's chunk of `whole`, which is not changed otherwise.
        """
        return self.reduce_scatter(tensor, chunks(whole, self.size), reduction, timeout)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> Pending:
        """Copies rank j's `inputs[i]` to rank i's `outputs[j]`.

        These two have one size; other pairs may have another.
        """
        raise self.unsupported("all_to_all")

    def all_to_all_single(self, output: Tensor, whole: Tensor, timeout: float) -> Pending:
        """Copies the i-th of `size` equal chunks of rank j's `whole` to the j-th chunk of rank i's `output`."""
        return self.all_to_all(chunks(output, self.size), chunks(whole, self.size), timeout)

    def barrier(self, timeout: float) -> Pending:
        """Returns, or is done, once all ranks have called it."""
        raise self.unsupported("barrier")

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> Pending:
        """Sends `tensor` to the `recv` of rank `peer` with this tag.

        Messages to one peer with one tag arrive in the order in which they were sent. The operation may be done
        before the peer has received the message; `tensor` can then be reused.
        """
        raise self.unsupported("send")

    def can_send(self, tensor: Tensor, peer: int) -> bool:
        """Returns whether `send` would return without waiting.

        The group then calls `send` of a blocking engine on the caller's thread rather than on another one.
        """
        return False

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingOperation | int:
        """Receives into `tensor` a message of its size and with this tag, from rank `peer`, or any rank if None.

        Returns:
            The rank that sent the message, or the operation.
        """
        raise self.unsupported("recv")

    def start(
        self, steps: Sequence[Callable[[], PendingOperation | int | None]], finish: Callable[[], None] | None
    ) -> Pending:
        """Starts several operations of a non-blocking engine as one. Runs on the caller's thread.

        An engine may override this to coalesce the operations into one message or one launch.

        Args:
            steps: each calls one operation of this engine.
            finish: runs once all operations have succeeded, before the combined operation is done.

        Returns:
            The combined operation; None if it is done.
        """
        started = [step() for step in steps]
        in_flight = [pending for pending in started if pending is not None and not isinstance(pending, int)]
        if not in_flight:
            if finish is not None:
                finish()
            return None
        pending = in_flight[0] if len(in_flight) == 1 else CombinedOperation(in_flight)
        return pending if finish is None else OperationWithFinalStep(pending, finish)

    def drain(self) -> None:
        """Blocks until operations in flight that nobody waits for are done. Called before an orderly shutdown."""

    def fail(self, error: Exception) -> None:
        """Makes all operations in flight, and all later ones, raise `error`.

        Called from any thread, also while operations run, and possibly more than once: the first error counts.
        Must not block on other ranks.
        """
        self.failure = self.failure or error

    def fail_group(self, error: Exception) -> Exception:
        """Fails the group and this engine for an error that the engine has found; returns the error to raise."""
        self._setup.on_failure(error)
        self.fail(error)  # has no effect if the group has called it, possibly with another error
        return self.failure or error

    def raise_if_failed(self) -> None:
        """Raises the error that the engine has failed with, if it has failed."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Releases threads, connections and memory. Called once, after `fail`, with no operation in flight."""

    def unsupported(self, operation: str) -> UnsupportedOperationError:
        """Returns the error to raise for an operation that this engine does not have."""
        return UnsupportedOperationError(self.name, operation, "it has no such operation; use another engine")


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    """Splits a contiguous tensor, whose number of elements `count` divides, into flat views of equal size."""
    return list(tensor.view(count, -1).unbind()) if tensor.numel() else [tensor.view(-1)] * count


EngineFactory = Callable[[Setup], Engine]
"""Creates an engine, as an Engine class does."""


@final
class CombinedOperation:
    """Several operations as one, which is done when all of them are."""

    def __init__(self, parts: Sequence[PendingOperation]) -> None:
        self._parts = parts

    def wait(self, timeout: float | None) -> None:
        """Waits for each part in turn, at most `timeout` seconds in all. Raises the first error."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            part.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def done(self) -> bool:
        """Returns whether all parts have finished, successfully or not."""
        return all(part.done() for part in self._parts)

    def peek(self) -> bool:
        """Returns whether all parts are known to have finished; see `peek`."""
        return all(peek(part) for part in self._parts)

    def source(self) -> int:
        """Returns the rank that sent the message of the last part, a receive."""
        return self._parts[-1].source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the last part has finished."""
        finished = itertools.count(1)  # no two threads get the same number

        def on_part_done() -> None:
            if next(finished) == len(self._parts):
                callback()

        for part in self._parts:
            part.on_done(on_part_done)


@final
class CompletedOperation:
    """An operation that has succeeded already; a receive has a source, the rank that sent."""

    def __init__(self, source: int | None) -> None:
        self._source = source

    def wait(self, timeout: float | None) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """Returns True."""
        return True

    def source(self) -> int:
        """Returns the rank that sent the received message."""
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at once."""
        callback()


@final
class OperationWithFinalStep:
    """An operation with a final step on the host, which runs before anybody sees the operation as done.

    The first thread that learns of the completion by `wait` or `done` runs `finish`, once. If that raises an
    error, the operation has failed with it.
    """

    def __init__(self, pending: PendingOperation, finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> None:
        """Waits for the operation at most `timeout` seconds, then runs the final step if nobody has."""
        self._pending.wait(timeout)
        with self._lock:
            self._finish_once()

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not, after running the final step.

        Returns False while another call runs the final step.
        """
        if not self._pending.done():
            return False
        with suppress(Exception):  # `wait` raises it to the caller
            self._pending.wait(None)
            if self._finish is not None:
                if not self._lock.acquire(blocking=False):
                    return False
                try:
                    self._finish_once()
                finally:
                    self._lock.release()
        return True

    def peek(self) -> bool:
        """Returns whether the operation is known to have finished, except for its final step; see `peek`."""
        return peek(self._pending)

    def source(self) -> int:
        """Returns the rank that sent the message of a completed receive."""
        return self._pending.source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the operation has finished; the final step may still have to run."""
        self._pending.on_done(callback)

    def _finish_once(self) -> None:
        """Runs the final step unless it has run. Needs the lock."""
        if self._finish is not None:
            try:
                self._finish()
            except BaseException as error:
                # A KeyboardInterrupt is raised once, but the outputs stay incomplete.
                interrupted = ProcessGroupError("the operation was interrupted before it had written its outputs")
                self._error = error if isinstance(error, Exception) else interrupted
                raise
            finally:
                self._finish = None  # it refers to the tensors
        if self._error is not None:
            raise self._error.with_traceback(None)  # each raise adds to the traceback, whose frames keep tensors
