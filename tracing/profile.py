"""`gradwire.profile`: one Chrome trace of all workers."""

import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from ..errors import RpcError
from ..net.peer_text import printable
from ..rpc.contracts.agent import Destination, RpcAgent, current_agent
from ..rpc.contracts.messages import MessageType, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future
from .chrome_trace import Clock, ClockReading, WorkerTrace, merge, read_clock
from .group_profile import END_PROFILE
from .recording import MAX_BYTES, MIN_BYTES, MOST_BYTES, SETTINGS, ProfileRequest, decode

__all__ = ["Profile", "profile"]

log = logging.getLogger("gradwire.tracing")


@final
@dataclass(slots=True)
class Profile:
    """What `gradwire.profile` has found; complete when it has ended.

    path: the file with the trace.
    clock_errors: by the name of a worker, the seconds by which its times may be wrong beside those of this worker:
        half of the round trip of the fastest exchange.
    missing: by the name of a worker, why the trace has nothing of it.
    left_out: by the name of a worker, how many of its last events are left out, if any: see `max_bytes`.
    """

    path: Path
    clock_errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)


@contextmanager
def profile(
    path: str | os.PathLike[str],
    workers: Iterable[Destination] | None = None,
    *,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    max_bytes: int = MAX_BYTES,
    timeout: float = 60.0,
) -> Iterator[Profile]:
    """Context manager that writes one Chrome trace of all workers: what torch.profiler records, and their calls.

    The times of all workers are those of the clock of this one. The file is for https://ui.perfetto.dev or
    chrome://tracing.

    Args:
        path: of the file, which is written at the end, also if the block raises.
        workers: those to profile, each by its name, id or WorkerInfo; by default all of the group.
        record_shapes: see torch.profiler.profile.
        profile_memory: see torch.profiler.profile.
        with_stack: see torch.profiler.profile.
        max_bytes: bytes of JSON that a worker sends, at most. Beyond them, its last events are left out, which the
            trace says at that time, and `Profile.left_out`.
        timeout: seconds that a worker may take to begin, and to answer with what it has recorded.

    Raises:
        RpcError: a worker cannot begin: it is lost, or is being profiled already. Workers that fail later are left
            out, with a warning: see `Profile.missing`.
        NotInitializedError, UnknownWorkerError: nothing was begun.
        FileNotFoundError: the folder of the file does not exist.
        ValueError: `max_bytes` is too small, or too large.
    """
    found = Profile(Path(path))
    if not found.path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(found.path)!r} does not exist: make it first")
    if not isinstance(max_bytes, int) or not MIN_BYTES <= max_bytes <= MOST_BYTES:
        raise ValueError(f"max_bytes is {max_bytes!r}: give {MIN_BYTES} at least, and {MOST_BYTES} at most")
    wanted = [record_shapes, profile_memory, with_stack]
    settings = tuple(name for name, is_on in zip(SETTINGS, wanted, strict=True) if is_on)
    agent = current_agent()
    chosen = agent.workers() if workers is None else [agent.worker(each) for each in workers]
    present = [each for each in chosen if workers is not None or agent.end_of(each.wire_id) is None]
    request = ProfileRequest(profile=secrets.token_hex(8), settings=settings, max_bytes=max_bytes)
    session = _Session(agent, dict.fromkeys(present), request, timeout)
    try:
        session.start()
        try:
            yield found
        finally:
            if not agent.is_inherited:  # else this is a forked child, which the parent knows nothing of
                session.stop(found)
    finally:  # also after Ctrl-C in one of the steps above
        session.abandon()


@final
class _Session:
    """One profile of some workers."""

    def __init__(
        self, agent: RpcAgent, workers: Iterable[WorkerInfo], request: ProfileRequest, timeout: float
    ) -> None:
        self._agent = agent
        self._workers = list(workers)
        self._request = request
        self._timeout = timeout
        self._recording: dict[WorkerInfo, None] = {}
        """The workers that may record: those asked to begin, until they have answered that they have ended."""
        self._first: dict[WorkerInfo, ClockReading] = {}

    def start(self) -> None:
        """Has all workers begin. If one cannot, ends it on the others, and raises what that one has answered."""
        for worker in self._workers:
            self._first[worker] = self._read_clock(worker)
        answers = {}
        for worker in self._workers:
            self._recording[worker] = None
            answers[worker] = self._ask(worker, MessageType.PROFILE_START, self._request.encode())
        started: list[WorkerInfo] = []
        failure: Exception | None = None
        for worker, answer in answers.items():
            try:
                answer.wait()
                started.append(worker)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            for worker, answer in self._ask_to_stop(started).items():
                with suppress(Exception):  # of a worker that has failed since
                    answer.wait()
                    del self._recording[worker]
            raise failure

    def stop(self, found: Profile) -> None:
        """Ends the profile on all workers, and writes what they have recorded."""
        last: dict[WorkerInfo, ClockReading] = {}
        for worker in self._workers:
            try:
                last[worker] = self._read_clock(worker)
            except Exception as error:
                found.missing[worker.name] = printable(error, 500)
        traces = []
        for worker, answer in self._ask_to_stop(self._workers).items():
            try:
                answered = answer.wait()
                del self._recording[worker]
                recording = decode(answered, self._request.max_bytes)
            except Exception as error:
                found.missing[worker.name] = printable(error, 500)
                continue
            if worker in last:
                clock = Clock(self._first[worker], last[worker])
                found.clock_errors[worker.name] = clock.error_ns / 1e9
                if recording.left_out:
                    found.left_out[worker.name] = recording.left_out
                traces.append(WorkerTrace(worker.name, worker.wire_id, recording, clock))
        for name, reason in found.missing.items():
            log.warning("the profile %s has nothing of worker %s: %s", found.path, name, reason)
        for name, count in found.left_out.items():
            log.warning("the profile %s lacks the last %d events of worker %s: max_bytes", found.path, count, name)
        text = json.dumps(merge(traces), allow_nan=False)
        found.path.write_text(text)

    def abandon(self) -> None:
        """Has the workers that may still record end that. Waits for none of them.

        A worker that has not begun, as its thread is busy, will not begin.
        """
        for worker in self._recording:
            self._agent.control.send(worker, END_PROFILE, self._request.profile)
        self._recording = {}

    def _read_clock(self, worker: WorkerInfo) -> ClockReading:
        """Reads the clock of a worker. Raises RpcError if it answers with no time."""
        request = Request(MessageType.PROFILE_CLOCK, None, timeout=self._timeout)

        def ask() -> int:
            time = self._agent.request(worker, request).wait()
            if type(time) is not int or not 0 <= time < 1 << 63:
                raise RpcError(f"worker {worker.name!r} answers with no time")
            return time

        return read_clock(ask)

    def _ask_to_stop(self, workers: Iterable[WorkerInfo]) -> "Mapping[WorkerInfo, Future[object]]":
        return {each: self._ask(each, MessageType.PROFILE_STOP, self._request.profile) for each in workers}

    def _ask(self, worker: WorkerInfo, kind: MessageType.ValueType, value: str) -> "Future[object]":
        return self._agent.request(worker, Request(kind, value, timeout=self._timeout))
