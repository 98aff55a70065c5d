"""MPI in this process: its world, MPI_COMM_WORLD, which contains all MPI groups, and the operations in flight.

MPI can be initialized once in the life of a process. Processes started by mpiexec are in its world. Otherwise the
ranks of the first group that uses MPI form a world through the group's store, which only MPICH can do; later
groups can consist of any of its processes. The world lasts until the interpreter exits.

If a process of the world dies, the others cannot use MPI any more.

MPI moves data only while it is called. An operation is started without waiting and tested until it is done, so
that it can time out and be failed. MPI cannot cancel it then: the process keeps the memory of its tensors until it
ends, as MPI may still write to it. A thread that waits for an operation tests it repeatedly, at first without a
pause and then with longer and longer ones. A progress thread does this for operations that no thread waits for.
"""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, Final, Self, final

from ....errors import CollectiveTimeoutError, ProcessGroupError
from ....net.exchanged_values import parse_list, unexpected_value
from ....net.host_identity import HostIdentity, can_share_loopback, can_share_memory
from ...rendezvous.hosts import gather_consenting_hosts, listen
from ...stores.views import PrefixStore
from ..base import Engine, Setup
from ..threads import PollingThread
from .pmi import PmiServer, leave

__all__ = ["MpiOperation", "MpiWorld", "load_mpi", "under_mpiexec"]

LEAVE_TIMEOUT_S = 10.0
"""Seconds that an exiting process waits for the others, as all must finalize MPI together."""

LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables that mpiexec sets in the environment of the processes that it starts."""

ONE_HOST = {"UCX_TLS": "self,sm", "FI_TCP_IFACE": "lo"}
"""Has MPICH's network libraries use shared memory only (UCX), or the loopback interface only (libfabric). By
default they listen on all interfaces, even if all ranks are on one host, and let everybody connect."""

MPIEXEC_WORLD = "mpiexec"
"""Name of the world that mpiexec makes; other worlds have random names."""

YIELD_TIME_S = 0.001
"""Seconds for which a thread yields between tests, so that ranks may share a core, before it sleeps."""

DATA_TEST_S, DATA_YIELD_TIME_S = 0.00002, 0.0003
"""A test that takes longer than the first has moved data; the thread does not sleep for the second after it."""

IDLE_TIME_S, RETEST_TIME_S = 0.005, 0.0001
"""After the first without progress, a long test is no sign of data: on a slow machine, every test after a sleep is
long. A second long test, within the second time, is one."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.00005, 0.005

SCAN_INTERVAL_S = 0.01
"""Seconds after which the progress thread looks for operations that no thread waits for."""


def load_mpi() -> Any:
    """Returns mpi4py.MPI, without initializing MPI. Raises ProcessGroupError without it or an MPI library."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library
        raise ProcessGroupError(
            f"the MPI engine needs mpi4py and an MPI library: pip install 'mpi4py>=4' mpich ({error})"
        ) from error
    return MPI


def under_mpiexec() -> bool:
    """Returns whether mpiexec started this process."""
    return any(variable in os.environ for variable in LAUNCHER_VARIABLES)


@final
class MpiWorld:
    """MPI as this process has initialized it. A process has one world at most, which `join` returns.

    name: the same in all processes of the world.
    address: host and port of the PMI server, which knows this process by `pmi_id`; empty with mpiexec.
    """

    _current: ClassVar["MpiWorld | None"] = None
    _lock: ClassVar = threading.Lock()

    def __init__(self, mpi: Any, name: str, address: str = "", pmi_id: int = 0) -> None:
        self.mpi = mpi
        self.name = name
        self.comm = mpi.COMM_WORLD
        self.progress = _MpiProgress(mpi)
        self.failure: Exception | None = None
        """The loss of a process of the world, after which MPI cannot be used any more."""
        self._address = address
        self._pmi_id = pmi_id
        self._process = os.getpid()
        self._server: PmiServer | None = None
        for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):  # mpi4py reports its own errors on the latter
            comm.Set_errhandler(mpi.ERRORS_RETURN)
        Finalize(None, self._finalize, exitpriority=50)  # atexit is not run in children of multiprocessing

    @classmethod
    def join(cls, setup: Setup) -> tuple[Self, list[int]]:
        """Returns the world, and for each rank of a group, which all call this together, its rank in the world.

        Raises ProcessGroupError if the ranks have no world in common and cannot form one, or MPI cannot be used.
        """
        with cls._lock:
            mpi = load_mpi()
            if mpi.Is_finalized():
                raise ProcessGroupError("MPI has been finalized in this process, and cannot be initialized again")
            world = cls._current
            if world is not None and world._process != os.getpid():
                raise ProcessGroupError(
                    f"MPI has been initialized in process {world._process}, and cannot be used in its fork "
                    f"{os.getpid()}: start processes with spawn or forkserver, or use another engine"
                )
            if world is None and (under_mpiexec() or mpi.Is_initialized()):
                world = cls._current = cls._of_mpiexec(mpi)
            own = ["", -1] if world is None else [world.name, world.comm.rank]
            setup = replace(setup, store=PrefixStore("mpi", setup.store))
            hosts = gather_consenting_hosts(
                setup.store, setup.rank, setup.size, setup.wait_for_keys, insecure=setup.insecure, what="MPI"
            )
            ranks = [_parse(each, str, int) for each in setup.exchange("mpi_world", json.dumps(own))]
            names = {name for name, _ in ranks}
            if names == {""}:
                world = cls._current = cls._form(mpi, setup, hosts)
                return world, list(range(setup.size))
            if len(names) > 1 or len({rank for _, rank in ranks}) < setup.size:
                raise ProcessGroupError(
                    "these ranks are not in one MPI world: a process can be in one only, which is formed by the "
                    "first group that uses MPI. Let that be the group of all processes (init_process_group), or "
                    f"start them with one mpiexec. World and rank of each: {ranks}"
                )
            assert world is not None
            if world.failure is not None:
                raise ProcessGroupError(
                    f"MPI cannot be used any more, as a process of its world died: {world.failure}. Start the "
                    "processes again, or use another engine"
                )
            return world, [rank for _, rank in ranks]

    @classmethod
    def from_mpiexec(cls) -> Self:
        """Returns the world of the processes that mpiexec started. Raises ProcessGroupError in other processes."""
        with cls._lock:
            mpi = load_mpi()
            if mpi.Is_finalized() or not under_mpiexec():
                raise ProcessGroupError("mpiexec did not start this process, or MPI has been finalized in it")
            if cls._current is None:
                cls._current = cls._of_mpiexec(mpi)
            return cls._current

    @classmethod
    def _of_mpiexec(cls, mpi: Any) -> Self:
        if not mpi.Is_initialized():
            # How many processes mpiexec has started on this host, and how many in all.
            is_one_host = os.environ.get("MPI_LOCALNRANKS", "-") == os.environ.get("PMI_SIZE")
            with _environment(_for_one_host() if is_one_host else {}):
                _initialize(mpi)
        elif mpi.COMM_WORLD.size == 1 and not under_mpiexec():
            raise ProcessGroupError(
                "MPI has been initialized by other code in this process, without mpiexec, so its world has this "
                "process only: import mpi4py.MPI after the first group is created, or set mpi4py.rc.initialize = "
                "False before it is imported"
            )
        return cls(mpi, MPIEXEC_WORLD)

    @classmethod
    def _form(cls, mpi: Any, setup: Setup, hosts: Sequence[HostIdentity]) -> Self:
        """Forms a world of all ranks of a group: initializes MPICH with a PMI server on rank 0."""
        vendor = mpi.get_vendor()[0]
        if vendor != "MPICH":
            raise ProcessGroupError(
                f"{vendor} forms a world only under its launcher: start the processes with mpiexec, or install "
                "the mpich wheel, which needs none"
            )
        server, store = None, setup.store
        if setup.rank == 0:
            listening, host = listen(hosts, store)
            is_of_user = can_share_loopback(hosts) and len({each.user for each in hosts}) == 1
            nodes = list(dict.fromkeys(each.memory for each in hosts))  # within which MPI uses shared memory
            server = PmiServer(listening, [nodes.index(each.memory) for each in hosts], is_of_user=is_of_user)
            address = f"{host}:{listening.getsockname()[1]}"
            for rank, pmi_id in enumerate(server.ids):
                store.set(f"pmi/{rank}", json.dumps([server.name, address, pmi_id]))
        setup.wait_for_keys([f"pmi/{setup.rank}"])
        name, address, pmi_id = _parse(store.get(f"pmi/{setup.rank}"), str, str, int)
        variables = {
            "PMI_PORT": address,
            "PMI_ID": str(pmi_id),
            "PMI_RANK": str(setup.rank),
            "PMI_SIZE": str(setup.size),
        }
        if can_share_loopback(hosts) and can_share_memory(hosts):  # UCX takes other ranks for those of other hosts
            variables |= _for_one_host()
        with _environment(variables):
            _initialize(mpi)
        world = cls(mpi, name, address, pmi_id)
        world._server = server
        world.comm.Barrier()
        _unlink_shared_memory()
        return world

    def _finalize(self) -> None:
        """Finalizes MPI at interpreter exit, together with all processes of the world; not if some have failed."""
        self.progress.thread.close()
        if self.failure is not None or self.progress.abandoned or self.mpi.Is_finalized():
            return
        if self._address and not leave(self._address, self._pmi_id, LEAVE_TIMEOUT_S):
            return
        _library(self.mpi).MPI_Finalize()
        if self._server is not None:
            self._server.finish(LEAVE_TIMEOUT_S)


def _initialize(mpi: Any) -> None:
    """Calls MPI_Init_thread without the GIL, which the PMI server's thread needs; mpi4py would hold it."""
    wanted, provided = int(mpi.THREAD_MULTIPLE), ctypes.c_int(-1)
    error = _library(mpi).MPI_Init_thread(None, None, ctypes.c_int(wanted), ctypes.byref(provided))
    if error or provided.value < wanted:
        raise ProcessGroupError(
            f"MPI could not be initialized for several threads (error {error}, level {provided.value}): use a "
            "library that has MPI_THREAD_MULTIPLE"
        )


def _for_one_host() -> dict[str, str]:
    return {name: value for name, value in ONE_HOST.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets variables, which processes that this one starts must not inherit."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for variable in variables:
            del os.environ[variable]


def _unlink_shared_memory() -> None:
    """Unlinks MPICH's shared memory, so that the kernel frees it with the last process, however that ends."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/mpich_"):
            Path(path).unlink(missing_ok=True)


def _library(mpi: Any) -> ctypes.CDLL:
    return ctypes.CDLL(mpi.__file__)


def _parse(text: bytes | str, *kinds: type) -> list[Any]:
    """Returns a list that another rank has put into the store; raises ProcessGroupError for anything else."""
    try:
        return parse_list(text, *kinds)
    except ValueError:
        raise ProcessGroupError(unexpected_value(text, "what a rank knows of its MPI world")) from None


@final
class _PollingPause:
    """Pauses between the tests of an operation, for longer the longer nothing has happened."""

    def __init__(self) -> None:
        self._last_progress = time.perf_counter()
        self._yield_until = self._last_progress + YIELD_TIME_S

    def pause(self, test_start: float) -> None:
        now = time.perf_counter()
        if now - test_start > DATA_TEST_S:
            if now < self._yield_until or now - self._last_progress < IDLE_TIME_S:
                self._last_progress = now
                self._yield_until = max(self._yield_until, now + DATA_YIELD_TIME_S)
            else:
                self._yield_until = now + RETEST_TIME_S
        if now < self._yield_until:
            os.sched_yield()
        else:
            time.sleep(min(max((now - self._last_progress) / 10, MIN_PAUSE_S), MAX_PAUSE_S))


@final
class _MpiProgress:
    """The operations of this process that are in flight.

    in_flight: by their id.
    abandoned: requests that failed or timed out in flight, with their buffers: MPI may still write to these.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi: Final = mpi
        self.in_flight: dict[int, MpiOperation] = {}
        self.abandoned: list[Any] = []
        self.thread: Final = PollingThread("gradwire-mpi", self._poll, SCAN_INTERVAL_S)
        self._pause = _PollingPause()

    def _poll(self) -> float | None:
        without_waiter = [each for each in list(self.in_flight.values()) if not each.waiters]
        if not without_waiter:
            return None
        test_start = time.perf_counter()
        if [each for each in without_waiter if each.done()]:
            self._pause = _PollingPause()
        self._pause.pause(test_start)
        return 0.0


@final
class MpiOperation:
    """An MPI request in flight, a PendingOperation.

    Args:
        progress: tests it while no thread waits for it.
        buffers: kept alive as long as MPI may access them.
        finish: runs when the request has succeeded, before the operation is done.
        expected_bytes: size of the message, for receives only.
    """

    def __init__(
        self,
        engine: Engine,
        progress: _MpiProgress,
        request: Any,
        *,
        name: str,
        timeout: float,
        buffers: Any,
        finish: Callable[[], None] | None,
        expected_bytes: int | None,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._request = request
        self._name = name
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._buffers = buffers
        self._finish = finish
        self._expected_bytes = expected_bytes
        self._status = None if expected_bytes is None else progress.mpi.Status()
        self._testing = threading.Lock()
        self._is_done = False
        self._source = -1
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.waiters = 0
        """Threads that wait for the operation, and test it meanwhile."""
        progress.in_flight[id(self)] = self
        progress.thread.start()

    def wait(self, timeout: float | None) -> None:
        """Tests the operation until it is done, see PendingOperation.wait."""
        deadline = None if timeout is None else time.perf_counter() + timeout
        pause = None
        self.waiters += 1
        try:
            while True:
                test_start = time.perf_counter()
                if self.done():
                    break
                if deadline is not None and test_start > deadline:
                    raise TimeoutError
                pause = pause or _PollingPause()
                pause.pause(test_start)
        finally:
            self.waiters -= 1
            if not self._is_done:  # as after a timeout: nobody tests the operation now
                self._progress.thread.start()
        if self._error is not None:
            raise self._error

    def source(self) -> int:
        """Returns the rank that sent the message."""
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already."""
        with self._testing:
            if not self._is_done:
                self._callbacks.append(callback)
                self._progress.thread.wake()
                return
        callback()

    def done(self) -> bool:
        """Tests the operation, unless another thread does so at the moment, and returns whether it is done."""
        if self._is_done or not self._testing.acquire(blocking=False):
            return self._is_done
        try:
            if self._is_done:
                return True
            self._advance()
            if not self._is_done:
                return False
            self._finish = self._buffers = self._request = self._status = None
            callbacks, self._callbacks = self._callbacks, []
        finally:
            self._testing.release()
        self._progress.in_flight.pop(id(self), None)
        for callback in callbacks:
            callback()
        return True

    def _advance(self) -> None:
        """Calls MPI_Test, and finishes the operation if the request is complete, has failed or has timed out."""
        try:
            if self._request.Test(self._status):
                self._complete()
                self._is_done = True
                return
            if self._engine.failure is None and time.monotonic() > self._deadline:
                self._engine.fail_group(CollectiveTimeoutError(self._name, self._timeout))
            self._error = self._engine.failure
        except Exception as error:
            if isinstance(error, self._progress.mpi.Exception):
                error = ProcessGroupError(f"{self._name} failed in MPI: {error}")
            self._error = self._engine.fail_group(error).with_traceback(None)
        if self._error is not None:
            self._is_done = True
            self._progress.abandoned.append((self._request, self._buffers))

    def _complete(self) -> None:
        if self._finish is not None:
            self._finish()
        if self._status is None:
            return
        source = int(self._status.Get_source())
        received = self._status.Get_count(self._progress.mpi.BYTE)
        if received != self._expected_bytes:
            raise ProcessGroupError(
                f"recv expects {self._expected_bytes} bytes, but rank {source} sent {received}: send and "
                "receive tensors of one size and dtype"
            )
        self._source = source
