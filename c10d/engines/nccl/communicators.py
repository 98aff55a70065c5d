"""Creates communicators, of which one process holds one or more ranks, each with a GPU of its own.

NCCL creates a communicator by a call that blocks until all its ranks have called it, without a timeout. So the
processes rendezvous in the store first: there, ranks that do not take part in time are named by an error, and so
are two ranks on one GPU, with which NCCL would hang or fail.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, final

from ....errors import CollectiveTimeoutError, ProcessGroupError
from ....net.host_identity import HostIdentity
from ....net.security import printable
from ...rendezvous.hosts import insecure_problem
from ..base import Setup
from .library import Gpus, Library, translate_error
from .plans import GpuRank, NcclCapability

__all__ = ["CommunicatorFactory", "LocalCommunicators"]

MAX_PROBLEM: Final = 2000
"""Characters that are shown of why rank 0 does not create a communicator."""


@final
class LocalCommunicators:
    """The ranks of one communicator that this process holds, each with its GPU, in their order."""

    def __init__(self, ranks: Sequence[GpuRank]) -> None:
        self.ranks: Final = ranks
        self._lock = threading.Lock()
        self._is_released = False

    def check(self) -> None:
        """Raises the asynchronous error of a communicator, if there was one."""
        with self._lock:
            for rank in self.ranks if not self._is_released else ():
                rank.communicator.check_async_error()

    def abort(self) -> None:
        """Ends operations in flight and releases the communicators."""
        for rank in self._take_ranks():
            rank.communicator.abort()

    def destroy(self) -> None:
        """Releases the communicators, unless they were aborted. No operation may be in flight."""
        for rank in self._take_ranks():
            rank.communicator.destroy()

    def _take_ranks(self) -> Sequence[GpuRank]:
        """Returns the ranks the first time, and none afterwards."""
        with self._lock:
            ranks = () if self._is_released else self.ranks
            self._is_released = True
            return ranks


@final
class CommunicatorFactory:
    """Creates communicators of a group's processes.

    Args:
        library: NCCL.
        gpus: of this process.
        setup: of the engine.
        check: a method that raises the error that the engine has failed with, if any; its object is not kept
            alive.
    """

    def __init__(self, library: Library, gpus: Gpus, setup: Setup, check: Callable[[], None]) -> None:
        self._library = library
        self._gpus = gpus
        self._store = setup.store
        self._insecure = setup.insecure
        self._check_method = weakref.WeakMethod(check)

    def create(
        self, name: str, processes: Sequence[int], index: int, gpus: Sequence[int], timeout: float
    ) -> LocalCommunicators:
        """Creates a communicator. All its processes call this together.

        Args:
            name: key of the rendezvous, the same in all processes and used once.
            processes: their ranks in the group; communicator ranks are in this order.
            index: of this process in `processes`.
            gpus: of this process that take part; every process gives the same number.
            timeout: seconds that the other processes may take.

        Raises:
            CollectiveTimeoutError: a process did not take part in time.
            ProcessGroupError: two ranks use one GPU, processes give different numbers of GPUs or are on several
                hosts, which not all of them allow, or NCCL failed.
        """
        unique_id = self._rendezvous(name, processes, index, [self._gpus.uuid(gpu) for gpu in gpus], timeout)
        count, size = len(gpus), len(processes) * len(gpus)
        ranks = []
        try:
            version = self._library.get_version()
            with ExitStack() as group:
                if count > 1:
                    self._library.groupStart()
                    group.callback(self._library.groupEnd)
                for i, gpu in enumerate(gpus):
                    stream = self._gpus.new_stream(gpu)
                    with self._gpus.use(stream):
                        communicator = self._library.NcclCommunicator(size, unique_id, index * count + i)
                    ranks.append(
                        GpuRank(
                            rank=index * count + i,
                            size=size,
                            gpu=gpu,
                            device=self._gpus.device(gpu),
                            communicator=communicator,
                            stream=stream,
                            capability=NcclCapability(version, self._gpus.compute_capability(gpu)),
                        )
                    )
        except Exception as error:
            raise translate_error(f"creating a communicator of {size} GPUs", error) from error
        return LocalCommunicators(ranks)

    def _rendezvous(
        self, name: str, processes: Sequence[int], index: int, uuids: list[str], timeout: float
    ) -> bytes:
        """Returns NCCL's id for a communicator, after all processes have put their hosts and GPUs in the store.

        The first process checks these, and puts into the store the id or what is wrong.
        """
        deadline = time.monotonic() + timeout
        here = HostIdentity.here(insecure=self._insecure).to_json()
        self._store.set(f"{name}/{index}", json.dumps([here, uuids]))
        if index == 0:
            self._publish_id(name, processes, deadline)
        if not self._wait_for_key(f"{name}/id", deadline):
            missing = [p for i, p in enumerate(processes) if not self._store.check([f"{name}/{i}"])]
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "rank 0"
            raise CollectiveTimeoutError("creating an NCCL communicator", timeout, ranks)
        result = json.loads(self._store.get(f"{name}/id"))
        if result["problem"]:
            raise ProcessGroupError(printable(result["problem"], MAX_PROBLEM))
        return bytes.fromhex(result["id"])

    def _publish_id(self, name: str, processes: Sequence[int], deadline: float) -> None:
        """Puts NCCL's id for a communicator into the store, once all processes have given theirs in time."""
        hosts: list[HostIdentity] = []
        uuids: dict[int, list[str]] = {}
        for index, process in enumerate(processes):
            if not self._wait_for_key(f"{name}/{index}", deadline):
                return
            host, uuids[process] = json.loads(self._store.get(f"{name}/{index}"))
            hosts.append(HostIdentity.from_json(host))
        problem = _find_problem(uuids) or insecure_problem(hosts, "NCCL", processes)
        unique_id = None if problem else self._library.get_unique_id().hex()
        self._store.set(f"{name}/id", json.dumps({"problem": problem, "id": unique_id}))

    def _wait_for_key(self, key: str, deadline: float) -> bool:
        """Returns whether the store has a key in time. Polls, as a store may serve one thread at a time."""
        pause = 0.001
        while not self._store.check([key]):
            check = self._check_method()
            if check is not None:
                check()
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True


def _find_problem(uuids: dict[int, list[str]]) -> str | None:
    """Returns why NCCL would fail or hang with these GPUs of each process; None if it would not."""
    counts = {process: len(own) for process, own in uuids.items()}
    if len(set(counts.values())) > 1:
        return f"every rank must give as many tensors, one for each of its GPUs, but they give {counts}"
    users: dict[str, int] = {}
    for process, own in uuids.items():
        for uuid in own:
            if uuid in users:
                return (
                    f"ranks {users[uuid]} and {process} both use GPU {uuid}: give each its own with "
                    "torch.cuda.set_device(local_rank), or with tensors on cuda:<local rank>"
                )
            users[uuid] = process
    return None
