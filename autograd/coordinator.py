"""A backward pass as seen by the worker whose program called `backward`: who takes part, and how it goes."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, final

import torch

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType, Request
from ..rpc.execution.futures import Future, without_frames
from .anomaly import AnomalyMode
from .closure import Closure, SendId
from .compression import Compressed, decompress
from .context import Context, Exchanged
from .gradient_sender import MessageGradients, PassId, post_gradients

__all__ = ["PassCoordinator", "PassRequest", "all_sends", "by_worker", "complete_closure"]

BACKWARD = MessageType.BACKWARD

EXTRA_TIMEOUT_S = 10.0
"""How much longer than the timeout of a pass its coordinator waits for a worker, so that the worker's own
error, which says what it waited for, arrives first."""


def complete_closure(agent: RpcAgent, context: Context, closure: Closure) -> Set[SendId]:
    """Returns all sends of a closure (SMART mode). Asks other workers for what was omitted from headers."""
    sends, wanted, asked = set(closure.sends), set(closure.omitted), set[SendId]()
    while wanted:
        asked |= wanted
        wanted_by_worker = by_worker(wanted)
        closures = [context.closure_of_sends(wanted_by_worker.pop(agent.info.wire_id, []))]
        requests = {worker: (context.id, message_ids) for worker, message_ids in wanted_by_worker.items()}
        closures += _ask(agent, MessageType.CLOSURE, requests).values()
        sends.update(*(each.sends for each in closures))
        wanted = set[SendId]().union(*(each.omitted for each in closures)) - asked
    return sends


def all_sends(agent: RpcAgent, context: Context) -> Set[SendId]:
    """Returns all sends of a context (FAST mode). Asks all workers that the context has reached.

    Raises AutogradError if a message has not arrived: its gradients would be waited for in vain.
    """
    me = agent.info.wire_id
    answers: dict[int, Exchanged] = {me: context.exchanged()}
    wanted = set(answers[me][2])
    while wanted := wanted - answers.keys():
        found = _ask(agent, MessageType.SENDS, dict.fromkeys(wanted, context.id))
        answers.update(found)
        wanted = {each for _, _, reached in found.values() for each in reached}
    sends = {(worker, number): to for worker, (sent, _, _) in answers.items() for number, to in sent.items()}
    arrived = {(send, worker) for worker, (_, received, _) in answers.items() for send in received}
    if missing := sends.items() - arrived:
        (worker, number), to = min(missing)
        sender, receiver = agent.incarnation(worker).name, agent.incarnation(to).name
        raise AutogradError(
            f"the backward pass of autograd context {context.id} cannot end in FAST mode: message {number} of "
            f"worker {sender!r} to worker {receiver!r} has not arrived there, because its call failed or is still "
            "waited for"
        )
    return sends.keys()


def by_worker(sends: Iterable[SendId]) -> dict[int, list[int]]:
    """Returns the message ids of sends by sending worker."""
    found: dict[int, list[int]] = defaultdict(list)
    for worker, message_id in sends:
        found[worker].append(message_id)
    return found


def _ask(agent: RpcAgent, kind: MessageType.ValueType, requests: Mapping[int, object]) -> dict[int, Any]:
    """Sends a request to each of several workers at once; returns the answers by worker."""
    futures = {
        worker: agent.request(agent.incarnation(worker), Request(kind, value))
        for worker, value in requests.items()
    }
    with agent.blocking():
        return {worker: future.wait_for_answer() for worker, future in futures.items()}


class PassRequest(NamedTuple):
    """Asks a worker to run its part of a pass: the body of a BACKWARD message, with gradients for it or None.

    message_ids: the sends of the worker that take part.
    timeout: seconds for which gates wait, 0 for no timeout.
    anomaly: the anomaly mode of the worker that called `backward`; None if it is off.

    It is sent as a plain tuple, which unpickles faster.
    """

    context_id: int
    pass_id: PassId
    message_ids: list[int]
    retain_graph: bool
    timeout: float
    anomaly: AnomalyMode | None


@final
class PassCoordinator:
    """Has other workers run their parts of a pass, waits for them, and ends the pass everywhere when one fails.

    It is the GradientSender of the caller's part: the request to a worker travels with the first gradients for it.
    """

    def __init__(
        self,
        agent: RpcAgent,
        context: Context,
        identifier: PassId,
        requests: Mapping[int, PassRequest],
        *,
        one_answer: bool = False,
    ) -> None:
        """Makes the coordinator of a pass, with the parts of the other workers that take part, by their ids.

        `one_answer` is whether there is one other worker, for whose answer the thread that runs the pass waits.
        Then the thread that reads the answer wakes it, and does nothing else.
        """
        self._agent = agent
        self._context = context
        self._id = identifier
        self._workers = list(requests)
        self._not_started = dict(requests)
        self._one_answer = one_answer
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._parts: list[Future[Any]] = []

    def start(self, receives: Sequence[Any]) -> None:
        """Has the workers run their parts, except those to which these `RecvRpc` nodes send gradients soon.

        The request goes with them.
        """
        for worker in self._not_started.keys() - {node.sender for node in receives}:
            self._start(worker, None)

    def send(self, send: SendId, gradients: Compressed, *, is_last: bool) -> None:  # noqa: ARG002
        """Sends the gradients of a message to its sender, with the request if it has not been sent."""
        worker, message_id = send
        if not self._start(worker, (message_id, gradients)):
            post_gradients(self._agent, self._context.id, self._id, send, gradients)

    def flush(self) -> None:
        """Has the workers run their parts that have not been asked yet."""
        for worker in list(self._not_started):
            self._start(worker, None)

    def _start(self, worker: int, gradients: MessageGradients | None) -> bool:
        """Has a worker run its part, unless it has been asked."""
        request = self._not_started.pop(worker, None)
        if request is None:
            return False
        timeout = request.timeout and request.timeout + EXTRA_TIMEOUT_S
        done = self._agent.request(
            self._agent.incarnation(worker),
            Request(BACKWARD, (tuple(request), gradients), timeout=timeout),
        )
        self._parts.append(done)
        if not self._one_answer:
            done.add_done_callback(partial(self._part_done, worker))
        return True

    def fail(self, error: Exception) -> None:
        """Ends the pass on all workers. Only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._not_started.clear()
        aborted = AutogradError(f"the backward pass was ended by an error elsewhere: {error}")
        self._context.passes.abort(self._id, aborted)
        for worker in self._workers:
            self._agent.control.send(
                self._agent.incarnation(worker), "autograd.abort", (self._context.id, self._id, aborted)
            )

    def fail_for(self, worker: int, error: Exception) -> None:
        """Ends the pass as a worker asks for. Raises AutogradError if that takes no part in it."""
        if worker not in self._workers:
            raise AutogradError(f"worker {worker} takes no part in backward pass {self._id}")
        self.fail(error)

    def collect(self) -> None:
        """Waits for the gradients in the answer of the one other worker; others are passed on as they arrive."""
        if self._one_answer:
            if self._not_started:
                self.flush()
            self._take_gradients(self._workers[0], self._parts[0].wait_for_answer())
            self._parts.clear()

    def wait(self) -> None:
        """Waits until all workers are done; raises the first error."""
        if self._not_started:
            self.flush()
        for part in self._parts:
            try:
                if self._one_answer:
                    part.wait_for_answer()
                else:
                    part.wait()
            except Exception as error:
                self.fail(error)
        if self._error is not None:
            raise self._error

    def _part_done(self, worker: int, part: torch.futures.Future[MessageGradients | None]) -> None:
        """Handles the answer of a worker, which may have gradients for this one."""
        try:
            self._take_gradients(worker, part.value())
        except Exception as error:
            self.fail(without_frames(error))

    def _take_gradients(self, worker: int, answer: MessageGradients | None) -> None:
        """Passes the gradients of an answer to their gate."""
        if answer is not None:
            message_id, gradients = answer
            self._context.set_gradients(worker, self._id, message_id, decompress(gradients))
