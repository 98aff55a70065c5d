"""A worker's part of a distributed autograd context.

A context is everything that belongs to one forward pass and its backward passes: the messages between workers, and
the gradients. The worker that opens it gives it its id; every worker that a message of the context reaches keeps a
part of its own, until the one that opened the context ends it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, final

import torch

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from .backward_pass import Passes
from .gradient_sender import PassId, TensorGradients
from .gradients import GradSwapLock, LeafGradients
from .graph import NOTHING, Closure, Graph, RecvRpc, SendId, SendRpc, apply_with_grad, follower_of, small_closure

__all__ = [
    "Context",
    "Exchanged",
    "NewSend",
    "creator_of",
    "inside",
]

Exchanged = tuple[dict[int, int], list[SendId], list[int]]
"""What one worker has exchanged with others in a context: the receivers of the messages that it has sent, by
message id; the messages that have arrived there; and the ids of the workers that it has sent any messages."""


_current: "ContextVar[Context | None]" = ContextVar("gradwire.autograd.context", default=None)
"""That of a thread, or of an asyncio task. Callbacks and tasks that are made inside take it along. If it has ended
when they run, their calls belong to no context."""


def creator_of(identifier: int) -> int:
    """Returns the id of the worker that has created the context with this id."""
    return identifier >> 48


@final
class inside:  # noqa: N801 - a context manager, used like a function
    """Context manager that makes a context the current one of this thread, or of this asyncio task."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._before: Context | None = None

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)


NewSend = tuple[int, Closure | None]
"""The number of a message in its sender's part of the context, and its closure, None if that is too large for a
header."""


@final
class Context:
    """This worker's part of one context. Safe to use from any thread."""

    current: "Callable[[], Context | None]" = staticmethod(_current.get)
    """Returns the context that the calls of this thread, or of this asyncio task, belong to."""

    set_current: "Callable[[Context | None], object]" = staticmethod(_current.set)
    """Sets the context that the calls of this thread, or of this asyncio task, belong to."""

    def __init__(
        self, agent: RpcAgent, identifier: int, creator: int, dummy: torch.Tensor, swap_lock: GradSwapLock
    ) -> None:
        """Makes a part without messages. All parts of a worker share the dummy and the lock."""
        self.agent = agent
        self.id = identifier
        self.creator = creator
        self.since = time.time()
        """When this worker has got its part, in seconds since 1970."""
        self.senders: set[int] = set()
        """The ids of the workers from which messages of the context have come."""
        self.dummy = dummy
        """A scalar leaf on the CPU, to which all `RecvRpc` nodes lead."""
        self.gradients = LeafGradients(swap_lock)
        """The gradients of leaves of this worker."""
        self.passes = Passes(agent, identifier, self._clear)
        """The backward passes on this worker."""
        self.running_pass = self.passes.running
        """Returns the backward pass that runs on this worker. Raises AutogradError if none does."""
        self._lock = threading.Lock()
        self._is_released = False
        self._reached: set[int] = set()
        self.message_count = 0
        """How many messages got a gate so far; their ids are the numbers below."""
        self._gates: dict[int, torch.Tensor] = {}
        """By message id."""
        self._destinations: dict[int, int] = {}
        """The receiver of each message with a gate."""
        self._receives: dict[tuple[int, int], Any] = {}
        """The node of each received message, by sender and message id."""
        self._closures: dict[Any, Closure | None] = {}
        """The closures of the nodes that sends lead to, see `small_closure`."""

    # Messages.

    def reach(self, worker: int) -> bool:
        """Notes that a message of the context is about to be sent to a worker; False if the context has ended."""
        with self._lock:
            if not self._is_released and worker != self.agent.info.wire_id:
                self._reached.add(worker)
            return not self._is_released

    def add_send(self, tensors: list[torch.Tensor], destination: int) -> NewSend | None:
        """Makes the gate of a message for its tensors that require grad.

        Returns the contents of the header; None if the context has ended.
        """
        closure: Closure | None = NOTHING
        followers = []  # kept for `SendRpc`
        for tensor in tensors:
            if tensor.grad_fn is None:
                followers.append(follower_of(tensor))
        if self._receives:
            closure = small_closure(tensors, self._closures)
        with self._lock:
            if self._is_released:
                return None
            if destination != self.agent.info.wire_id:
                self._reached.add(destination)
            message_id = self.message_count
            self.message_count += 1
            self._gates[message_id] = apply_with_grad(SendRpc, self, message_id, *tensors)
            self._destinations[message_id] = destination
            return message_id, closure

    def drop_send(self, message_id: int) -> None:
        """Drops the gate of a message that could not be sent."""
        with self._lock:
            gate = self._gates.pop(message_id, None)
            self._destinations.pop(message_id, None)
        del gate  # without the lock: the end of a graph may run code of the program

    def add_receive(
        self, sender: int, message_id: int, closure: Closure, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of a received message, as part of this worker's graph."""
        received: tuple[torch.Tensor, ...] = apply_with_grad(
            RecvRpc, self.dummy, self, sender, message_id, closure, tensors
        )
        with self._lock:
            if not self._is_released:
                self._receives[sender, message_id] = received[0].grad_fn
        return received

    def exchanged(self) -> Exchanged:
        """Returns all messages with gates, and all that have arrived."""
        with self._lock:
            sends = {number: self._destinations[number] for number in self._gates}
            return sends, list(self._receives), list(self._reached)

    @property
    def send_nodes(self) -> dict[tuple[int, int], Any]:
        """The `SendRpc` node of each message that this worker sent, by receiver and message id."""
        with self._lock:
            return {(self._destinations[number], number): gate.grad_fn for number, gate in self._gates.items()}

    @property
    def receive_nodes(self) -> dict[tuple[int, int], Any]:
        """The `RecvRpc` node of each message that this worker received, by sender and message id."""
        with self._lock:
            return dict(self._receives)

    # Backward.

    def find_send(self, message_id: int) -> tuple[torch.Tensor, int]:
        """Returns the gate of a message, and the id of its receiver. Raises AutogradError if there is none."""
        try:
            return self._gates[message_id], self._destinations[message_id]
        except KeyError:
            raise AutogradError(
                f"worker {self.agent.info.name!r} sent no message {message_id} in context {self.id}"
            ) from None

    def set_gradients(self, sender: int, pass_id: PassId, message_id: int, gradients: TensorGradients) -> None:
        """Passes the gradients of a message to its gate. Raises AutogradError unless they are of its receiver."""
        if self._destinations.get(message_id) != sender:
            self.check_receiver(sender, message_id)
        self.passes.set_gradients(pass_id, message_id, gradients)

    def check_receiver(self, worker: int, message_id: int) -> None:
        """Raises AutogradError unless this worker has sent that message to the other one."""
        if self._destinations.get(message_id) != worker:
            raise AutogradError(f"worker {worker} has not received message {message_id} of context {self.id}")

    def closure_of_sends(self, message_ids: Sequence[int]) -> Closure:
        """Returns all sends that get a gradient if these sends of this worker do."""
        return Graph([self.find_send(message_id)[0].grad_fn for message_id in message_ids]).closure()

    def close(self) -> set[int]:
        """Ends the context here: aborts the running pass, then releases the graph.

        The graph refers to the context through C++, where Python's garbage collector does not look, so it would
        never be freed otherwise. Returns the ids of the workers that it has reached from here.
        """
        with self._lock:
            self._is_released = True
        self.passes.close()
        return self._reached

    def _clear(self) -> None:
        """Releases the graph and the gradients. Runs once the context has ended and no pass uses them."""
        with self._lock:
            self._gates.clear()
            self._destinations.clear()
            self._receives.clear()
            self._closures.clear()
            self.gradients.clear()
