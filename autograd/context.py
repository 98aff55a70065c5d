"""A worker's part of a distributed autograd context.

A context is everything that belongs to one forward pass and its backward passes: what was sent to whom, and
the gradients. The worker that opens it names it; every worker that a message of it reaches keeps a part of
its own, until the one that opened it closes it.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from ..errors import AutogradError, RpcTimeoutError, UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType
from ..rpc.execution.kept_errors import copy_error
from .closure import LARGEST, NOTHING, Closure, closure_above, small_closure, start_node
from .compression import Gradients, compress
from .functions import receive, send
from .gradients import GradSwapLock, LeafGradients
from .partial import PartialGradients

__all__ = ["Context", "GradientFuture", "PassId", "current_context", "inside", "set_current_context"]

PassId = tuple[int, int]
"""A backward pass: the worker that runs it, and that worker's count."""

_current = threading.local()


def current_context() -> "Context | None":
    """The context that this thread's calls belong to."""
    return getattr(_current, "context", None)


def set_current_context(context: "Context | None") -> None:
    """Sets it."""
    _current.context = context


@contextmanager
def inside(context: "Context") -> Iterator[None]:
    """What this thread calls belongs to a context."""
    before = current_context()
    set_current_context(context)
    try:
        yield
    finally:
        set_current_context(before)


class GradientFuture:
    """Where a gate waits for the gradients of its message."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Gradients | Exception] = queue.SimpleQueue()
        self.filled = False
        """Have the gradients come?"""

    def put(self, outcome: Gradients | Exception) -> None:
        self.filled = self.filled or not isinstance(outcome, Exception)
        self._queue.put(outcome)

    def wait(self, seconds: float | None) -> Gradients:
        """Raises queue.Empty after so many seconds."""
        outcome = self._queue.get(timeout=seconds)
        if isinstance(outcome, Exception):
            raise copy_error(outcome)  # several gates may raise it
        return outcome


@final
class Context:
    """This worker's part of one context. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent, identifier: int, loans: GradSwapLock) -> None:
        """Args: its agent; its id; whose `.grad` is lent out, on the whole worker."""
        self.agent = agent
        self.id = identifier
        self.creator = identifier >> 48
        self._lock = threading.Lock()
        self._released = False
        self._reached: set[int] = set()
        self._dummy = torch.zeros((), requires_grad=True)
        self._gates: dict[int, torch.Tensor] = {}
        self._destinations: dict[int, int] = {}
        """Of each message with a gate, the worker that will send its gradients."""
        self._message_count = 0
        self._receives: dict[tuple[int, int], Any] = {}
        """Of each message that came with tensors to differentiate, its node, by sender and number."""
        self._closures: dict[Any, Closure | None] = {}
        """Those of the nodes above sends, see `small_closure`."""
        self.gradients = LeafGradients(loans)
        """What passes have found for leaves of this worker."""
        self._slots: dict[tuple[PassId, int], GradientFuture] = {}
        self._aborted: dict[PassId, Exception] = {}
        self._running: PassId | None = None
        self._awaited: Sequence[int] = ()
        """The messages whose gates take part in the running pass."""
        self._timeout = 0.0
        self._deadline = 0.0
        """Of the running pass, if it has a timeout."""
        self._partial: PartialGradients | None = None

    # Forward.

    def reach(self, worker: int) -> bool:
        """A message of the context is about to leave for a worker; False if the context has ended."""
        with self._lock:
            if not self._released and worker != self.agent.info.id:
                self._reached.add(worker)
            return not self._released

    def add_send(self, tensors: list[torch.Tensor], destination: int) -> tuple[int, Closure | None] | None:
        """Puts a gate over tensors that are about to leave for a worker.

        Returns:
            The message's id and its closure, or None for a large one; None at all if the context has ended.
        """
        closure: Closure | None = NOTHING
        if self._receives:
            closure = small_closure([start_node(tensor) for tensor in tensors], self._closures, LARGEST)
        with self._lock:
            if self._released:
                return None
            message_id = self._message_count
            self._message_count += 1
            self._gates[message_id] = send(self, message_id, tensors)
            self._destinations[message_id] = destination
            return message_id, closure

    def drop_send(self, message_id: int) -> None:
        """The message could not be sent."""
        self._gates.pop(message_id, None)

    def add_receive(
        self, sender: int, message_id: int, closure: Closure, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of a message that arrived, as part of this worker's graph."""
        received = receive(self._dummy, self, sender, message_id, closure, tensors)
        with self._lock:
            if not self._released:
                self._receives[sender, message_id] = received[0].grad_fn
        return received

    def closure(self, tensors: Sequence[torch.Tensor]) -> Closure:
        """All sends that get a gradient if these tensors do."""
        if not self._receives:
            return NOTHING
        return closure_above(start_node(tensor) for tensor in tensors)

    def closure_of_sends(self, message_ids: Sequence[int]) -> Closure:
        """All sends that get a gradient if these of this worker do."""
        return closure_above(self.gate(message_id).grad_fn for message_id in message_ids)

    def sends(self) -> tuple[list[int], list[int]]:
        """All messages with gates, and the workers that messages went to from here."""
        with self._lock:
            return list(self._gates), list(self._reached)

    @property
    def reached(self) -> set[int]:
        """The other workers that messages of the context have gone to from here."""
        with self._lock:
            return set(self._reached)

    @property
    def send_nodes(self) -> dict[tuple[int, int], Any]:
        """The node over each message that left from here, by receiver and number."""
        with self._lock:
            return {(self._destinations[number], number): gate.grad_fn for number, gate in self._gates.items()}

    @property
    def receive_nodes(self) -> dict[tuple[int, int], Any]:
        """The node under each message that arrived here, by sender and number."""
        with self._lock:
            return dict(self._receives)

    # Backward.

    @property
    def dummy(self) -> torch.Tensor:
        """The leaf under everything received."""
        return self._dummy

    @property
    def is_running(self) -> bool:
        """Does a backward pass run here?"""
        return self._running is not None

    @property
    def message_count(self) -> int:
        """How many messages have left so far; their gates have the ids below."""
        return self._message_count

    def gate(self, message_id: int) -> torch.Tensor:
        """The gate of a message. Raises AutogradError if there is none."""
        try:
            return self._gates[message_id]
        except KeyError:
            raise AutogradError(
                f"worker {self.agent.info.name!r} sent no message {message_id} in context {self.id}"
            ) from None

    def begin_pass(
        self,
        identifier: PassId,
        message_ids: Sequence[int],
        timeout: float,
        partial: PartialGradients | None = None,
    ) -> None:
        """Makes a pass the running one, in which the gates of these messages take part.

        Args:
            identifier: the pass.
            message_ids: the messages.
            timeout: seconds from now for which gates wait, 0 for ever.
            partial: holds the gradients of received messages, where they come in parts.

        Raises:
            AutogradError: another pass is running, this one was aborted before it came, or the context has
                ended.
            WorkerLostError: who runs the pass, or is to send gradients, is lost.
        """
        with self._lock:
            if self._released:
                raise UnknownContextError(self.id, self.agent.info.name)
            if self._running is not None:
                raise AutogradError(
                    f"two backward passes of context {self.id} meet on worker {self.agent.info.name!r}: "
                    "run them one after the other, or in contexts of their own"
                )
            if identifier in self._aborted:
                raise copy_error(self._aborted[identifier])
            self._running, self._awaited = identifier, message_ids
            self._timeout, self._deadline = timeout, time.monotonic() + timeout
            self._partial = partial
            for worker in self._needed():
                if (end := self.agent.end_of(worker)) is not None:
                    self._running = None
                    raise end.as_error(self.agent.worker(worker).name)

    def end_pass(self, identifier: PassId) -> None:
        """The running pass is over."""
        with self._lock:
            self._running = self._partial = None
            self._forget_slots(identifier)
            if self._released:
                self._clear()

    def abort_pass(self, identifier: PassId, error: Exception) -> None:
        """Fails everything that waits, or will wait, for gradients of a pass."""
        with self._lock:
            self._abort(identifier, error)

    def on_worker_lost(self, worker: int, error: Exception) -> None:
        """Ends the running pass if it cannot go on without a worker."""
        with self._lock:
            if self._running is not None and worker in self._needed():
                self._abort(self._running, error)

    def close(self) -> set[int]:
        """The context has ended: lets go of the graph.

        Python's garbage collector does not see through the graph, which leads back here, so this is the only
        way to free it.

        Returns:
            The workers that messages of the context went to from here.
        """
        with self._lock:
            self._released = True
            if self._running is not None:
                self._abort(self._running, UnknownContextError(self.id, self.agent.info.name))
            else:
                self._clear()
            return self._reached

    def gradients_arrived(self, identifier: PassId, message_id: int, gradients: Gradients) -> None:
        """A peer has posted the gradients of a message."""
        slot = self._slot(identifier, message_id)
        with self._lock:
            slot.put(gradients)
            if identifier in self._aborted and identifier != self._running:
                self._forget_slots(identifier)

    def wait_for_gradients(self, message_id: int) -> Gradients:
        """Called by the gate of a message in the running pass.

        Raises:
            RpcTimeoutError: they do not come within the pass's timeout.
            Exception: the pass has failed.
        """
        slot = self._slot(self._running_pass(), message_id)
        left = max(0.0, self._deadline - time.monotonic()) if self._timeout else None
        try:
            with self.agent.blocking():
                return slot.wait(left)
        except queue.Empty:
            peer = self.agent.worker(self._destinations[message_id]).name
            raise RpcTimeoutError(
                peer,
                self._timeout,
                f"a backward pass of autograd context {self.id}, in which worker {self.agent.info.name!r} waits "
                f"for the gradients of its message {message_id} to worker",
            ) from None

    def post_gradients(self, sender: int, message_id: int, gradients: Gradients) -> None:
        """Called by the receiving node of a message in the running pass."""
        running = self._running_pass()
        if self._partial is not None:
            complete = self._partial.add((sender, message_id), gradients)
            if complete is None:
                return
            gradients = complete
        value = (self.id, running, message_id, compress(gradients))
        self.agent.post(self.agent.worker(sender), MessageType.GRADIENTS, value)

    def _needed(self) -> set[int]:
        """The workers without which the running pass cannot go on. Called with the lock."""
        running = self._running
        if running is None:
            return set()
        awaited = {
            self._destinations[message_id]
            for message_id in self._awaited
            if message_id in self._destinations and not self._filled(running, message_id)
        }
        return awaited | {running[0]}

    def _filled(self, identifier: PassId, message_id: int) -> bool:
        slot = self._slots.get((identifier, message_id))
        return slot is not None and slot.filled

    def _abort(self, identifier: PassId, error: Exception) -> None:
        self._aborted.setdefault(identifier, error)
        for (of, _), slot in self._slots.items():
            if of == identifier:
                slot.put(error)
        if identifier != self._running:  # it has ended here, or never begins
            self._forget_slots(identifier)

    def _forget_slots(self, identifier: PassId) -> None:
        for key in [key for key in self._slots if key[0] == identifier]:
            del self._slots[key]

    def _clear(self) -> None:
        self._gates.clear()
        self._destinations.clear()
        self._receives.clear()
        self._closures.clear()
        self._slots.clear()
        self.gradients.clear()

    def _running_pass(self) -> PassId:
        running = self._running
        if running is None:
            raise AutogradError(
                f"a tensor of autograd context {self.id} was differentiated outside of its backward pass: "
                "use gradwire.autograd.backward(context_id, [loss])"
            )
        return running

    def _slot(self, identifier: PassId, message_id: int) -> GradientFuture:
        with self._lock:
            slot = self._slots.get((identifier, message_id))
            if slot is None:
                slot = self._slots[identifier, message_id] = GradientFuture()
                if identifier in self._aborted:
                    slot.put(self._aborted[identifier])
            return slot
