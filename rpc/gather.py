"""Values of several workers, brought together at one of them and handed back to all.

The living member with the lowest id leads: the others send it their value in a request that it answers when
it has everybody's. A member that dies drops out of the gathering; when the leader dies the next one leads. A
leader may die when it has told its result to some only. Those are a round ahead then, so to a later leader they
bring along the result of the round before, and they answer for it when they are asked.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, final

import torch

from ..errors import RpcError, RpcTimeoutError, SerializationError, WorkerLostError
from .messages import Deferred, Handler, Incoming, MessageType
from .worker import WorkerInfo

if TYPE_CHECKING:
    from .agent import RpcAgent

__all__ = ["PATIENCE", "Gatherings"]

Key = tuple[str, int, tuple[int, ...]]

PATIENCE = 10.0
"""How long a worker waits before it says for whom, and again after as long."""

STATUS_SECONDS = 2.0
"""How long the leader may take to tell who is missing."""


class _Gathering:
    """One gathering, at its leader."""

    def __init__(self, members: Sequence[int]) -> None:
        self.expected = set(members)
        self.values: dict[int, Any] = {}
        self.answers: list[Future[dict[int, Any]]] = []


@final
class Gatherings:
    """The gatherings that one agent takes part in."""

    def __init__(self, agent: "RpcAgent") -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._rounds: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        self._open: dict[Key, _Gathering] = {}
        self._finished: dict[tuple[str, tuple[int, ...]], tuple[int, dict[int, Any]]] = {}
        """The last round of each gathering whose result is known here."""

    def all_gather(
        self,
        topic: str,
        value: object,
        members: Sequence[WorkerInfo],
        timeout: float,
        still_waiting: Callable[[Sequence[str]], None] = lambda _names: None,
    ) -> dict[int, Any]:
        """The values of all living members, by worker id: see `RpcAgent.all_gather`.

        `still_waiting` is called every now and then with the names of those that are missing.
        """
        ids = tuple(sorted(worker.id for worker in members))
        by_id = {worker.id: worker for worker in members}
        with self._lock:
            number = self._rounds[topic, ids]
            self._rounds[topic, ids] += 1
        while True:
            leader = next(i for i in ids if i == self._agent.info.id or self._agent.why_lost(i) is None)
            if leader == self._agent.info.id:
                for worker in members:
                    if worker.id != leader:
                        self._agent.connect(worker)
            before = self._result_of(topic, ids, number - 1) if leader != ids[0] else None
            try:
                future = self._agent.request(
                    by_id[leader], MessageType.GATHER, (topic, number, ids, value, before), timeout=timeout
                )
            except SerializationError:
                with self._lock:
                    self._rounds[topic, ids] -= 1  # nobody has heard of it, so the others are still in this round
                raise
            key = (topic, number, ids)
            try:
                while not self._wait(future):
                    still_waiting(self._ask_who_is_missing(by_id, leader, key))
                gathered: dict[int, Any] = future.wait()
            except WorkerLostError:
                continue
            except RpcTimeoutError:
                missing = self._ask_who_is_missing(by_id, leader, key)
                raise RpcTimeoutError(", ".join(missing), timeout, f"{topic!r}, which awaits") from None
            self._finish(key, gathered)
            return gathered

    def _wait(self, future: torch.futures.Future[Any]) -> bool:
        """Waits for a future, but not for longer than patience lasts; is it done?"""
        done = threading.Event()
        future.add_done_callback(lambda _future: done.set())
        with self._agent.blocking():
            return done.wait(PATIENCE)

    def _ask_who_is_missing(self, members: Mapping[int, WorkerInfo], leader: int, key: Key) -> list[str]:
        """The names of those that have not come, as far as the leader tells."""
        try:
            asked = self._agent.request(members[leader], MessageType.GATHER_STATUS, key, timeout=STATUS_SECONDS)
            missing: Sequence[int] = asked.wait()
        except RpcError:
            missing = [leader]
        return [members[identifier].name for identifier in missing]

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Gathering, and asking how far it is."""
        return {
            MessageType.GATHER: Handler(self._handle),
            MessageType.GATHER_STATUS: Handler(self._tell_who_is_missing),
        }

    def _tell_who_is_missing(self, message: Incoming) -> list[int]:
        topic, number, ids = message.value
        with self._lock:
            gathering = self._open.get((topic, number, tuple(ids)))
            return [] if gathering is None else sorted(gathering.expected - gathering.values.keys())

    def worker_lost(self, worker: WorkerInfo) -> None:
        """Nobody waits for a dead member."""
        with self._lock:
            for gathering in self._open.values():
                gathering.expected.discard(worker.id)
        self._complete()

    def _handle(self, message: Incoming) -> Deferred:
        topic, number, ids, value, before = message.value
        if before is not None:
            self._finish((topic, number - 1, ids), before)
        answer: Future[dict[int, Any]] = Future()
        key = (topic, number, ids)
        with self._lock:
            if (known := self._result_of(topic, ids, number)) is not None:
                answer.set_result(known)
                return Deferred(answer)
            gathering = self._open.get(key)
            if gathering is None:
                gathering = self._open[key] = _Gathering(ids)
            gathering.values[message.source.id] = value
            gathering.answers.append(answer)
            gathering.expected -= {i for i in ids if self._agent.why_lost(i) is not None}
        self._complete()
        return Deferred(answer)

    def _result_of(self, topic: str, ids: tuple[int, ...], number: int) -> dict[int, Any] | None:
        finished, values = self._finished.get((topic, ids), (-1, None))
        return values if finished == number else None

    def _finish(self, key: Key, values: dict[int, Any]) -> None:
        topic, number, ids = key
        with self._lock:
            if self._finished.get((topic, ids), (-1, None))[0] < number:
                self._finished[topic, ids] = (number, values)
                self._drop_former(topic, ids)
            late = self._open.pop(key, None)
        for answer in late.answers if late is not None else ():
            answer.set_result(values)

    def _drop_former(self, topic: str, ids: tuple[int, ...]) -> None:
        """Drops the results of gatherings that have lost members, and whose others have all come to this one."""
        for former in [key for key in self._finished if key[0] == topic and key[1] != ids]:
            living = {i for i in former[1] if self._agent.why_lost(i) is None}
            if len(living) < len(former[1]) and living <= set(ids):
                del self._finished[former]

    def _complete(self) -> None:
        with self._lock:
            complete = [key for key, g in self._open.items() if g.expected <= g.values.keys()]
            gatherings = [self._open.pop(key) for key in complete]
        for gathering in gatherings:
            for answer in gathering.answers:
                answer.set_result(gathering.values)
