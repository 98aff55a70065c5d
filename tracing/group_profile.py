"""The part of a worker in a profile of all workers: it records while another one, or it itself, asks for that."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

from ..errors import RpcError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.contracts.worker_end import WorkerEnd
from .recorder import SETTINGS, Recorder
from .recording import encode

__all__ = ["GroupProfile"]


@final
class GroupProfile(Extension):
    """Records the calls of one agent, and what torch does in its process. Its hooks are off at other times."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self.is_on = False
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._asked_by: WorkerInfo | None = None
        """Who has asked for the recording: the only one that may end it."""

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of requests to begin and end a recording, and of the question for the time."""
        return {
            MessageType.PROFILE_START: Handler(self._start, description="the beginning of a profile on worker"),
            MessageType.PROFILE_CLOCK: Handler(
                lambda _: time.time_ns(), description="the question for the time of worker"
            ),
            MessageType.PROFILE_STOP: Handler(self._stop, description="the end of a profile on worker"),
        }

    def on_request(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Records the beginning of a call."""
        if (recorder := self._recorder) is not None:
            recorder.begin_call(identifier, worker, request)

    def on_complete(self, identifier: int) -> None:
        """Records the end of a call."""
        if (recorder := self._recorder) is not None:
            recorder.end_call(identifier)

    def observe(self, handler: Handler) -> Handler:
        """Returns a handler that records when it runs."""
        return replace(handler, run=partial(self._run, handler.run)) if handler.user_values else handler

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Ends a recording for which a lost worker has asked."""
        if worker == self._asked_by:
            self.agent.submit(self._drop)

    def close(self) -> None:
        """Ends the recording."""
        self._drop()

    def _run(self, run: Callable[[Incoming], Any], message: Incoming) -> Any:
        recorder = self._recorder
        if recorder is None or not message.envelope.id:
            return run(message)
        return recorder.run(run, message)

    def _start(self, message: Incoming) -> None:
        wanted = json.loads(message.value) if isinstance(message.value, str) else None
        if not isinstance(wanted, list) or not set(wanted) <= set(SETTINGS):
            raise ValueError("malformed message: it is no beginning of a profile")
        with self._lock:
            if self._asked_by is not None:
                raise RpcError(
                    f"worker {self.agent.info.name!r} is being profiled already, by {self._asked_by.name!r}: "
                    "one gradwire.profile of a worker can be open at a time"
                )
            self._recorder = Recorder(self.agent.info.name, dict.fromkeys(wanted, True))
            self._asked_by = message.source
            self.turn(on=True)
        if self.agent.end_of(message.source.wire_id) is not None:  # lost before the request has run
            self._drop()

    def _stop(self, message: Incoming) -> bytes:
        with self._lock:
            recorder = self._take() if self._asked_by == message.source else None
        if recorder is None:
            raise RpcError(f"worker {self.agent.info.name!r} is not being profiled by {message.source.name!r}")
        return encode(recorder.stop())

    def _drop(self) -> None:
        with self._lock:
            recorder = self._take()
        if recorder is not None:
            recorder.cancel()

    def _take(self) -> Recorder | None:
        """Turns the hooks off, and returns what records."""
        recorder, self._recorder, self._asked_by = self._recorder, None, None
        self.turn(on=False)
        return recorder
