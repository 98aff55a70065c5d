"""Which members of collectives have been replaced: killed, and started again under their names and ranks."""

import threading
import time
from collections.abc import Collection, Iterable
from typing import final

from ...errors import NotInitializedError, RpcTimeoutError
from ..contracts.agent import RpcAgent
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly

__all__ = ["Replacements"]


@final
class Replacements:
    """The workers that have been replaced since one agent joined its group. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent) -> None:
        """Args: agent: the agent of this worker."""
        self._agent = agent
        self._changed = threading.Condition()
        self._latest: dict[int, int] = {}
        """The wire id of the latest incarnation of each worker that has been replaced, by worker id."""
        self._is_closed = False

    def record(self, worker: WorkerInfo) -> None:
        """Records a worker that has joined, and that may have replaced another one."""
        if worker.wire_id == worker.id:
            return  # the first incarnation
        with self._changed:
            self._latest[worker.id] = max(worker.wire_id, self._latest.get(worker.id, worker.wire_id))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the waits in `wait_for`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def concern(self, members: Iterable[int]) -> bool:
        """Returns whether one of these incarnations has been replaced. If so, that is true for ever.

        Wire ids that are not known here are taken for members.
        """
        return bool(self._latest) and any(self._is_replaced(each) for each in members)

    def _is_replaced(self, wire_id: int) -> bool:
        # This worker goes on as it is: if it has been replaced, its messages fail with the reason.
        if wire_id == self._agent.info.wire_id or not self._agent.is_member(wire_id):
            return False
        return self._latest.get(self._agent.incarnation(wire_id).id, wire_id) > wire_id

    def latest(self, workers: Collection[WorkerInfo]) -> dict[int, WorkerInfo]:
        """Returns the latest incarnations of workers, this one as it is, by wire id in ascending order."""
        me = self._agent.info
        found = [each if each.wire_id == me.wire_id else self._agent.worker(each) for each in workers]
        return {each.wire_id: each for each in sorted(found, key=lambda worker: worker.wire_id)}

    def wait_for(self, members: Collection[int], deadline: float | None) -> None:
        """Waits until this worker learns that one of these incarnations has been replaced, as others know.

        The deadline is in seconds of `time.monotonic`; None for never. Raises RpcTimeoutError, which names the
        members that are lost, or NotInitializedError when the agent has shut down.
        """
        with self._agent.blocking(), self._changed:
            left = None if deadline is None else deadline - time.monotonic()
            if not wait_interruptibly(
                self._changed.wait_for, lambda: self._is_closed or self.concern(members), left
            ):
                lost = [self._agent.incarnation(each).name for each in members if self._agent.end_of(each)]
                raise RpcTimeoutError(", ".join(lost) or "a worker that was started again", 0.0)
        if self._is_closed:
            raise NotInitializedError(f"worker {self._agent.info.name!r} has shut down its RPC agent")
