"""The MPI world of this process: MPI_COMM_WORLD, of which all MPI groups are parts.

MPI can be initialised once in the life of a process. Started by mpiexec, the processes are in its world. Otherwise
the ranks of the first group that uses MPI form a world, with MPICH, through the group's store; later groups can be
made of any of its processes. It lasts until the interpreter ends.

If a process of the world dies, MPI can be used no more by the others.
"""

import ctypes
import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, Self, final

from ....errors import ProcessGroupError
from ...host_identity import Host, hosts_of, listen
from ...stores.prefix import PrefixStore
from ..base import Setup
from .pmi import PmiServer, leave
from .progress import MpiProgressThread

__all__ = ["MpiWorld", "load_mpi", "under_mpiexec"]

LEAVE_SECONDS = 10.0
"""How long a process that ends waits for the others, to finalize MPI together."""

LAUNCHERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""What mpiexec puts into the environment of the processes that it starts."""

LAUNCHED = "launched"


def load_mpi() -> Any:
    """mpi4py.MPI, with MPI not initialised unless it was already."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library
        raise ProcessGroupError(
            f"the MPI engine needs mpi4py and an MPI library: pip install 'gradwire[mpi]' ({error})"
        ) from error
    return MPI


@final
class MpiWorld:
    """MPI as this process has initialised it. There is one; `join` gives it."""

    _current: ClassVar["MpiWorld | None"] = None
    _guard: ClassVar = threading.Lock()

    def __init__(self, mpi: Any, name: str, address: str = "", pmi_id: int = 0) -> None:
        self.mpi = mpi
        self.name = name
        self.comm = mpi.COMM_WORLD
        self.progress = MpiProgressThread()
        self.broken: Exception | None = None
        """Why MPI can be used no more."""
        self._address = address
        self._pmi_id = pmi_id
        self._server: PmiServer | None = None
        for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):  # mpi4py reports its own errors on the latter
            comm.Set_errhandler(mpi.ERRORS_RETURN)
        Finalize(None, self._end, exitpriority=50)  # not atexit, which children of multiprocessing do not run

    @classmethod
    def join(cls, setup: Setup) -> tuple[Self, list[int]]:
        """The world, and the rank in it of each rank of a group whose ranks call this together.

        Raises:
            ProcessGroupError: they have no world in common, and can form none.
        """
        with cls._guard:
            mpi = load_mpi()
            if mpi.Is_finalized():
                raise ProcessGroupError("MPI has been finalized in this process, and cannot be initialised again")
            world = cls._current
            if world is None and (under_mpiexec() or mpi.Is_initialized()):
                world = cls._current = cls._of_launcher(mpi)
            mine = ["", -1] if world is None else [world.name, world.comm.rank]
            store = PrefixStore("mpi", setup.store)
            all_ranks = _exchange(store, "world", setup, json.dumps(mine))
            ranks = [json.loads(each) for each in all_ranks]
            names = {name for name, _ in ranks}
            if names == {""}:
                world = cls._current = cls._form(mpi, store, setup)
                return world, list(range(setup.size))
            if len(names) > 1 or len({rank for _, rank in ranks}) < setup.size:
                raise ProcessGroupError(
                    "these ranks are not in one MPI world: a process can be in one only, which is formed by the "
                    "first group that uses MPI. Make that the group of all of them (init_process_group), or start "
                    f"them with one mpiexec. World and rank of each: {ranks}"
                )
            assert world is not None
            if world.broken is not None:
                raise ProcessGroupError(
                    f"MPI can be used no more, since a process of its world is gone: {world.broken}. Start again, "
                    "or use another engine"
                )
            return world, [rank for _, rank in ranks]

    @classmethod
    def launched(cls) -> Self:
        """The world of the processes that mpiexec has started.

        Raises:
            ProcessGroupError: this process was not started by it, or MPI has ended.
        """
        with cls._guard:
            mpi = load_mpi()
            if mpi.Is_finalized() or not under_mpiexec():
                raise ProcessGroupError("this process is not in a world of mpiexec, or has left it")
            if cls._current is None:
                cls._current = cls._of_launcher(mpi)
            return cls._current

    @classmethod
    def _of_launcher(cls, mpi: Any) -> Self:
        if not mpi.Is_initialized():
            _initialise(mpi)
        elif mpi.COMM_WORLD.size == 1 and not under_mpiexec():
            raise ProcessGroupError(
                "MPI has been initialised by other code in this process, without mpiexec, so its world is this "
                "process alone: import mpi4py.MPI after the first group is made, or set mpi4py.rc.initialize = "
                "False before it is imported"
            )
        return cls(mpi, LAUNCHED)

    @classmethod
    def _form(cls, mpi: Any, store: PrefixStore, setup: Setup) -> Self:
        """Initialises MPI in all ranks of a group."""
        vendor = mpi.get_vendor()[0]
        if vendor != "MPICH":
            raise ProcessGroupError(
                f"{vendor} forms a world only under its launcher: start the processes with mpiexec, or install "
                "the mpich wheel, with which none is needed"
            )
        server = None
        hosts = hosts_of(store, setup.rank, setup.size, setup.timeout)
        if setup.rank == 0:
            listening, host = listen(hosts, store)
            server = PmiServer(listening, _nodes(hosts))
            address = f"{host}:{listening.getsockname()[1]}"
            store.set("pmi", json.dumps([server.name, address, server.ids]))
        store.wait(["pmi"], timedelta(seconds=setup.timeout))
        name, address, ids = json.loads(store.get("pmi"))
        mine = {
            "PMI_PORT": address,
            "PMI_ID": str(ids[setup.rank]),
            "PMI_RANK": str(setup.rank),
            "PMI_SIZE": str(setup.size),
        }
        os.environ.update(mine)
        try:
            _initialise(mpi)
        finally:  # it must not reach processes that this one starts
            for variable in mine:
                del os.environ[variable]
        world = cls(mpi, name, address, ids[setup.rank])
        world._server = server
        world.comm.Barrier()
        _unlink_shared_memory()
        return world

    def _end(self) -> None:
        """Finalizes MPI when all processes do, at the end of the interpreter; not at all if some never will."""
        self.progress.close()
        if self.broken is not None or self.progress.abandoned or self.mpi.Is_finalized():
            return
        if self._address and not leave(self._address, self._pmi_id, LEAVE_SECONDS):
            return
        _library(self.mpi).MPI_Finalize()
        if self._server is not None:
            self._server.end(LEAVE_SECONDS)


def _nodes(hosts: Sequence[Host]) -> list[int]:
    """The number of each rank's node, within which MPI uses shared memory."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(host.memory, len(numbers)) for host in hosts]


def _initialise(mpi: Any) -> None:
    """MPI_Init_thread, without the interpreter's lock: mpi4py holds it, and the PMI server is a thread."""
    wanted, provided = int(mpi.THREAD_MULTIPLE), ctypes.c_int(-1)
    failed = _library(mpi).MPI_Init_thread(None, None, ctypes.c_int(wanted), ctypes.byref(provided))
    if failed or provided.value < wanted:
        raise ProcessGroupError(
            f"MPI could not be initialised for several threads (error {failed}, level {provided.value}): the "
            "library must have MPI_THREAD_MULTIPLE"
        )


def _unlink_shared_memory() -> None:
    """Takes the name from the memory that MPICH shares: it goes with the last process, however that ends."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/mpich_"):
            Path(path).unlink(missing_ok=True)


def _library(mpi: Any) -> ctypes.CDLL:
    """The MPI library that mpi4py uses."""
    return ctypes.CDLL(mpi.__file__)


def under_mpiexec() -> bool:
    """Was this process started by mpiexec?"""
    return any(variable in os.environ for variable in LAUNCHERS)


def _exchange(store: PrefixStore, key: str, setup: Setup, mine: str) -> list[str]:
    """What each rank gave."""
    store.set(f"{key}/{setup.rank}", mine)
    keys = [f"{key}/{rank}" for rank in range(setup.size)]
    store.wait(keys, timedelta(seconds=setup.timeout))
    return [store.get(each).decode() for each in keys]
