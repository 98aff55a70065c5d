"""The state of backward passes on one worker.

A pass over several workers is one `BackwardPass` on each of them. It exists from the first message about the pass:
gradients, or the news that it has failed elsewhere, may arrive before the request to run this worker's part. The
nodes of the graph find the running pass through their context.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from ..errors import (
    AutogradError,
    LimitReachedError,
    RpcTimeoutError,
    UnknownContextError,
    WorkerLostError,
    WorkerSuspectError,
)
from ..rpc.contracts.agent import RpcAgent
from ..rpc.execution.ctrl_c import wait_interruptibly
from ..rpc.execution.futures import copy_error
from .gradient_sender import GradientSender, PassId, TensorGradients, compress
from .gradients import total
from .graph import SendId

__all__ = ["BackwardPass", "PartialGradients", "PassPart", "Passes"]

NOT_RUNNING = "a node of the graph runs although the pass does not"

MAX_PASSES = 1024
"""Passes of one context and worker that another worker knows: those that have failed, or that have not ended."""


@final
class PartialGradients:
    """Sums up the gradients of received messages until all roots that depend on them have run."""

    def __init__(self, root_counts: Counter[SendId]) -> None:
        """Args: root_counts: the number of roots that depend on each message."""
        self._missing = Counter(root_counts)
        self._sums: dict[SendId, list[torch.Tensor | None]] = {}
        self._lock = threading.Lock()

    def add(self, send: SendId, gradients: TensorGradients) -> TensorGradients | None:
        """Adds the gradients that one root contributes; returns the sum after the last root, else None."""
        with self._lock:
            before = self._sums.get(send, [None] * len(gradients))
            self._sums[send] = [total(*pair) for pair in zip(before, gradients, strict=True)]
            self._missing[send] -= 1
            return None if self._missing[send] else self._sums.pop(send)


@dataclass(slots=True)
class PassPart:
    """What a worker's part of a pass needs while it runs.

    awaited: the messages whose gates take part, and the worker that will send the gradients of each.
    receives: the number of received messages whose gradients the part computes.
    timeout: seconds from now for which gates wait, 0 for no timeout.
    sender: sends gradients to other workers.
    partial: sums up the gradients of received messages, where they arrive in parts.
    """

    awaited: Mapping[int, int]
    receives: int
    timeout: float
    sender: GradientSender
    partial: PartialGradients | None = None


@final
class BackwardPass:
    """This worker's part of one backward pass. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent, context_id: int, identifier: PassId) -> None:
        self.id = identifier
        self._agent = agent
        self._context_id = context_id
        self._lock = threading.Lock()
        self._changed: threading.Condition | None = None
        """Notified when gradients arrive, and when the pass fails; None until something waits."""
        self._gradients: dict[int, TensorGradients] = {}
        """Those that have arrived and that nobody has taken, by message id."""
        self._arrived: set[int] = set()
        """The ids of the messages whose gradients have arrived."""
        self.error: Exception | None = None
        """Why the pass has failed, on whatever worker."""
        self._part: PassPart | None = None
        """Set while the part runs."""
        self._deadline = 0.0
        """In terms of `time.monotonic`."""
        self._gates_left = 0
        """The gates that have not got their gradients."""
        self._receives_left = 0
        """The received messages whose gradients have not been computed."""

    def start(self, part: PassPart) -> None:
        """Prepares the pass for gates that wait. See `Passes.begin`."""
        with self._lock:
            if self.error is not None:
                raise copy_error(self.error)
            self._part = part
            self._deadline = time.monotonic() + part.timeout
            self._gates_left, self._receives_left = len(part.awaited), part.receives

    def finish(self) -> None:
        """Drops all gradients."""
        with self._lock:
            self._gradients.clear()
            self._part = None

    def abort(self, error: Exception) -> None:
        """Fails everything that waits, or will wait, for gradients. The first error counts."""
        with self._lock:
            if self.error is None:
                self.error = error
                if self._changed is not None:
                    self._changed.notify_all()

    def set_gradients(self, message_id: int, gradients: TensorGradients) -> None:
        """Passes the gradients that the receiver of a message has sent to the message's gate."""
        with self._lock:
            if self.error is None:
                self._gradients[message_id] = gradients
                self._arrived.add(message_id)
                if self._changed is not None:
                    self._changed.notify_all()

    def take_complete(self, message_id: int) -> Sequence[torch.Tensor] | None:
        """Returns the gradients of the tensors of a message of this worker, if all have arrived; else None."""
        gradients = self._gradients.get(message_id)
        if gradients is None or self.error is not None:
            return None
        complete: list[torch.Tensor] = []
        for gradient in gradients:
            if gradient is None:
                return None
            complete.append(gradient)
        del self._gradients[message_id]
        self._gates_left -= 1
        return complete

    def wait_for_gradients(self, message_id: int) -> TensorGradients:
        """Returns the gradients of a message of this worker, to its gate. Raises what keeps them from arriving."""
        part = self._part
        assert part is not None, NOT_RUNNING
        gradients = None if self.error is not None else self._gradients.pop(message_id, None)
        if gradients is None:
            part.sender.flush()
            with self._agent.blocking(), self._lock:
                gradients = self._wait(message_id, part)
        self._gates_left -= 1
        return gradients

    def _wait(self, message_id: int, part: PassPart) -> TensorGradients:
        """Waits for the gradients of a message. Called with the lock."""
        if self._changed is None:
            self._changed = threading.Condition(self._lock)
        while self.error is None and message_id not in self._gradients:
            seconds = self._deadline - time.monotonic() if part.timeout else None
            if seconds is not None and seconds <= 0:
                raise RpcTimeoutError(
                    self._agent.incarnation(part.awaited[message_id]).name,
                    part.timeout,
                    f"a backward pass of autograd context {self._context_id}, in which worker "
                    f"{self._agent.info.name!r} waits for the gradients of its message {message_id} to worker",
                )
            wait_interruptibly(self._changed.wait, seconds)
        if self.error is not None:
            raise copy_error(self.error)  # several gates may raise it
        return self._gradients.pop(message_id)

    def send_gradients(self, send: SendId, gradients: TensorGradients) -> None:
        """Sends the gradients of the tensors of a received message to its sender. Called by its `RecvRpc` node."""
        part = self._part
        assert part is not None, NOT_RUNNING
        if part.partial is not None:
            complete = part.partial.add(send, gradients)
            if complete is None:
                return
            part.sender.send(send, compress(complete), is_last=False)
            return
        # Without partial gradients, the graph runs on one thread.
        self._receives_left -= 1
        is_last = not self._receives_left and not self._gates_left
        part.sender.send(send, compress(gradients), is_last=is_last)

    def needed_workers(self) -> set[int]:
        """Returns the ids of the workers without which the pass cannot go on here.

        These are the one that called `backward`, and those that have gradients to send to this one.
        """
        needed = {self.id[0]}
        with self._lock:
            if self._part is not None:
                for number, worker in self._part.awaited.items():
                    if number not in self._arrived:
                        needed.add(worker)
        return needed


@final
class Passes:
    """The backward passes of one context on this worker. At most one of them runs. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent, context_id: int, on_closed: Callable[[], None]) -> None:
        """Args: on_closed: called once `close` has been called and no pass runs."""
        self._agent = agent
        self._context_id = context_id
        self._on_closed: Callable[[], None] | None = on_closed
        self._lock = threading.Lock()
        self._is_closed = False
        self._passes: dict[PassId, BackwardPass] = {}
        """Those that have not ended here, and those that have failed: more messages of them may arrive."""
        self._running: BackwardPass | None = None
        self._receivers: dict[int, tuple[int, set[int]]] = {}
        """By caller, the number of its last pass here, and the workers that were sent gradients of it."""

    @property
    def is_running(self) -> bool:
        """Whether a pass runs on this worker."""
        return self._running is not None

    def running(self) -> BackwardPass:
        """Returns the running pass. Raises AutogradError if there is none."""
        running = self._running
        if running is None:
            raise AutogradError(
                f"a tensor of autograd context {self._context_id} was differentiated outside of its backward "
                "pass: use gradwire.autograd.backward(context_id, [loss])"
            )
        return running

    def begin(self, identifier: PassId, part: PassPart) -> BackwardPass:
        """Makes a pass, with this worker's part, the running one.

        Raises an error if the context has ended, another pass of it is running, this one has failed on another
        worker, or a worker that it needs is lost or suspect.
        """
        with self._lock:
            if self._is_closed:
                raise UnknownContextError(self._context_id, self._agent.info.name)
            if self._running is not None:
                raise AutogradError(
                    f"two backward passes of context {self._context_id} run on worker {self._agent.info.name!r} "
                    "at the same time: run them one after the other, or in contexts of their own"
                )
            if len(self._passes) > 1:
                self._drop_failed(identifier)
            begun = self._passes.get(identifier) or self._get(identifier)
            begun.start(part)
            self._running = begun
        # A worker that is lost or suspect from now on makes `fail_without` abort the pass.
        try:
            self._agent.check_present(begun.needed_workers())
        except (WorkerLostError, WorkerSuspectError):
            self.end(begun)
            raise
        return begun

    def end(self, running: BackwardPass) -> None:
        """Ends the running pass on this worker."""
        with self._lock:
            self._running = None
            running.finish()
            if running.error is None:
                self._passes.pop(running.id, None)
            is_closed = self._is_closed
        if is_closed:
            self._finish_closing()

    def abort(self, identifier: PassId, error: Exception) -> None:
        """Fails everything that waits, or will wait, for gradients of a pass."""
        with self._lock:
            aborted = self._get(identifier)
            aborted.abort(error)
            if aborted is not self._running:  # it has ended here, or never begins
                aborted.finish()

    def set_gradients(self, identifier: PassId, message_id: int, gradients: TensorGradients) -> None:
        """Passes the gradients that the receiver of a message has sent to the message's gate."""
        with self._lock:
            receiving = self._get(identifier)
        receiving.set_gradients(message_id, gradients)

    def fail_without(self, worker: int, error: Exception) -> None:
        """Aborts the running pass if it cannot go on without a worker."""
        with self._lock:
            if self._running is not None and worker in self._running.needed_workers():
                self._running.abort(error)

    def note_receiver(self, identifier: PassId, worker: int) -> None:
        """Notes that gradients of a pass of another worker are about to be sent to a worker."""
        caller, number = identifier
        with self._lock:
            last, receivers = self._receivers.get(caller, (number, set()))
            if last != number:
                receivers = set()
            receivers.add(worker)
            self._receivers[caller] = number, receivers

    def sent_to(self, worker: int) -> list[PassId]:
        """Returns the passes of which gradients were sent to a worker. They may have ended since."""
        with self._lock:
            return [
                (caller, number) for caller, (number, receivers) in self._receivers.items() if worker in receivers
            ]

    def close(self) -> None:
        """Aborts the running pass and refuses others, because the context has ended."""
        with self._lock:
            self._is_closed = True
            running = self._running
            if running is not None:
                running.abort(UnknownContextError(self._context_id, self._agent.info.name))
        if running is None:
            self._finish_closing()

    def _drop_failed(self, following: PassId) -> None:
        """Drops the passes of a caller that have failed, when its next one begins. Called with the lock."""
        caller, number = following
        for identifier, each in list(self._passes.items()):
            if identifier[0] == caller and identifier[1] < number and each.error is not None:
                del self._passes[identifier]

    def _finish_closing(self) -> None:
        self._passes.clear()
        on_closed, self._on_closed = self._on_closed, None  # ends a reference cycle with the context
        if on_closed is not None:
            on_closed()

    def _get(self, identifier: PassId) -> BackwardPass:
        found = self._passes.get(identifier)
        if found is None:
            caller, _ = identifier
            if len(self._passes) >= MAX_PASSES and sum(each == caller for each, _ in self._passes) >= MAX_PASSES:
                raise LimitReachedError(
                    f"worker {caller} has begun more than {MAX_PASSES} passes of context {self._context_id} that "
                    "have not ended",
                    f"MAX_PASSES={MAX_PASSES}",
                )
            found = self._passes[identifier] = BackwardPass(self._agent, self._context_id, identifier)
        return found
