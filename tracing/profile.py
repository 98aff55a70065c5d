"""`gradwire.profile`: one Chrome trace of all workers."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from ..c10d.security.peer_text import printable
from ..errors import RpcError
from ..rpc.contracts.agent import Destination, RpcAgent, current_agent
from ..rpc.contracts.messages import MessageType, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future
from .chrome_trace import WorkerTrace, merge
from .clocks import Clock, ClockReading, read_clock
from .recorder import SETTINGS
from .recording import decode

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
    """

    path: Path
    clock_errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@contextmanager
def profile(
    path: str | os.PathLike[str],
    workers: Iterable[Destination] | None = None,
    *,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
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
        timeout: seconds that a worker may take to begin, and to answer with what it has recorded.

    Raises:
        RpcError: a worker cannot begin: it is lost, or is being profiled already. Workers that fail later are left
            out, with a warning: see `Profile.missing`.
        NotInitializedError, UnknownWorkerError: nothing was begun.
        FileNotFoundError: the folder of the file does not exist.
    """
    found = Profile(Path(path))
    if not found.path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(found.path)!r} does not exist: make it first")
    wanted = [record_shapes, profile_memory, with_stack]
    settings = [name for name, is_on in zip(SETTINGS, wanted, strict=True) if is_on]
    agent = current_agent()
    chosen = agent.workers() if workers is None else [agent.worker(each) for each in workers]
    present = [each for each in chosen if workers is not None or agent.end_of(each.wire_id) is None]
    session = _Session(agent, dict.fromkeys(present), timeout)
    session.start(settings)
    try:
        yield found
    finally:
        session.stop(found)


@final
class _Session:
    """One profile of some workers."""

    def __init__(self, agent: RpcAgent, workers: Iterable[WorkerInfo], timeout: float) -> None:
        self._agent = agent
        self._workers = list(workers)
        self._timeout = timeout
        self._first: dict[WorkerInfo, ClockReading] = {}

    def start(self, settings: list[str]) -> None:
        """Has all workers begin. If one cannot, ends it on the others, and raises what that one has answered."""
        for worker in self._workers:
            self._first[worker] = self._read_clock(worker)
        started: list[WorkerInfo] = []
        failure: Exception | None = None
        for worker, answer in self._ask_all(MessageType.PROFILE_START, json.dumps(settings)).items():
            try:
                answer.wait()
                started.append(worker)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            self._workers = started
            for answer in self._ask_all(MessageType.PROFILE_STOP, None).values():
                with suppress(Exception):  # of a worker that has failed since
                    answer.wait()
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
        for worker, answer in self._ask_all(MessageType.PROFILE_STOP, None).items():
            try:
                recording = decode(answer.wait())
            except Exception as error:
                found.missing[worker.name] = printable(error, 500)
                continue
            if worker in last:
                clock = Clock(self._first[worker], last[worker])
                found.clock_errors[worker.name] = clock.error_ns / 1e9
                traces.append(WorkerTrace(worker.name, worker.wire_id, recording, clock))
        for name, reason in found.missing.items():
            log.warning("the profile %s has nothing of worker %s: %s", found.path, name, reason)
        text = json.dumps(merge(traces), allow_nan=False)
        found.path.write_text(text)

    def _read_clock(self, worker: WorkerInfo) -> ClockReading:
        """Reads the clock of a worker. Raises RpcError if it answers with no time."""
        request = Request(MessageType.PROFILE_CLOCK, None, timeout=self._timeout)

        def ask() -> int:
            time = self._agent.request(worker, request).wait()
            if type(time) is not int or not 0 <= time < 1 << 63:
                raise RpcError(f"worker {worker.name!r} answers with no time")
            return time

        return read_clock(ask)

    def _ask_all(self, kind: MessageType.ValueType, value: str | None) -> "Mapping[WorkerInfo, Future[object]]":
        answers = {}
        for worker in self._workers:
            answers[worker] = self._agent.request(worker, Request(kind, value, timeout=self._timeout))
        return answers
