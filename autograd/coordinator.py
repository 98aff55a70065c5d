"""A backward pass as seen by the worker whose program called `backward`."""

import threading
from dataclasses import dataclass
from typing import Any, final

import torch

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType, Request
from ..rpc.execution.futures import error_of
from .anomaly import AnomalyMode
from .backward_pass import PassId
from .context import Context

__all__ = ["PassCoordinator", "PassRequest"]

EXTRA_TIMEOUT_S = 10.0
"""How much longer than the timeout of a pass its coordinator waits for a worker, so that the worker's own
error, which says what it waited for, arrives first."""


@dataclass(frozen=True, slots=True)
class PassRequest:
    """Asks a worker to run its part of a pass: the body of a BACKWARD message.

    message_ids: the sends of the worker that take part.
    timeout: seconds for which gates wait, 0 for no timeout.
    anomaly: the anomaly mode of the worker that called `backward`.
    """

    context_id: int
    pass_id: PassId
    message_ids: list[int]
    retain_graph: bool
    timeout: float
    anomaly: AnomalyMode


@final
class PassCoordinator:
    """Has other workers run their parts of a pass, waits for them, and ends the pass everywhere when one fails."""

    def __init__(self, agent: RpcAgent, context: Context, identifier: PassId, workers: list[int]) -> None:
        """Makes a coordinator.

        Args:
            agent: this worker's.
            context: the context of the pass.
            identifier: the pass.
            workers: the ids of the other workers that take part.
        """
        self._agent = agent
        self._context = context
        self._id = identifier
        self._workers = workers
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._parts: list[torch.futures.Future[Any]] = []

    def start(self, worker: int, request: PassRequest) -> None:
        """Has a worker run its part."""
        timeout = request.timeout and request.timeout + EXTRA_TIMEOUT_S
        done = self._agent.request(
            self._agent.worker(worker), Request(MessageType.BACKWARD, request, timeout=timeout)
        )
        self._parts.append(done)
        done.add_done_callback(self._part_done)

    def fail(self, error: Exception) -> None:
        """Ends the pass on all workers. Only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        aborted = AutogradError(f"the backward pass was ended by an error elsewhere: {error}")
        self._context.passes.abort(self._id, aborted)
        for worker in self._workers:
            self._agent.control.send(
                self._agent.worker(worker), "autograd.abort", (self._context.id, self._id, aborted)
            )

    def wait(self) -> None:
        """Waits until all workers are done; raises the first error."""
        with self._agent.blocking():
            for part in self._parts:
                try:
                    part.wait()
                except Exception as error:
                    self.fail(error)
        if self._error is not None:
            raise self._error

    def _part_done(self, part: torch.futures.Future[Any]) -> None:
        if (error := error_of(part)) is not None:
            self.fail(error)
