"""Cliques: the ranks of one communicator that are GPUs of this process, and how a clique comes about.

NCCL joins the ranks of a communicator in a call that waits for all of them, for ever, and cannot be told to stop.
So the ranks meet in the store first, where a rank that does not come is noticed in time and named, and so are two
ranks on one GPU, which NCCL does not bear.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, final

from ....errors import CollectiveTimeoutError, ProcessGroupError
from ...torch_types import TorchStore
from .dtypes import Ability
from .library import Library, translated
from .plans import PlanMember
from .streams import Gpus

__all__ = ["CommunicatorSetup", "LocalCommunicators"]

PAUSE: Final = threading.Event()
"""Never set: waited for between two looks into the store."""


@final
class LocalCommunicators:
    """The members of one communicator in this process, each on its GPU. They work in step."""

    def __init__(self, members: Sequence[PlanMember]) -> None:
        self.members: Final = members
        self._ending = threading.Lock()
        self._over = False

    def check(self) -> None:
        """Raises what NCCL met with since, behind everybody's back."""
        with self._ending:
            for member in self.members if not self._over else ():
                member.communicator.check_async_error()

    def abort(self) -> None:
        """Ends what is under way."""
        for member in self._at_the_end():
            member.communicator.abort()

    def destroy(self) -> None:
        """Gives back the communicators. Nothing is under way."""
        for member in self._at_the_end():
            member.communicator.destroy()

    def _at_the_end(self) -> Sequence[PlanMember]:
        """The members, once; nobody uses them from here on."""
        with self._ending:
            members = () if self._over else self.members
            self._over = True
            return members


@final
class CommunicatorSetup:
    """How the processes of a group come together in communicators.

    Args:
        library: NCCL.
        gpus: the GPUs of this process.
        store: of the group's engine.
        check: raises what the engine has failed with, if it has; a method, whose object is not kept alive.
    """

    def __init__(self, library: Library, gpus: Gpus, store: TorchStore, check: Callable[[], None]) -> None:
        self._library = library
        self._gpus = gpus
        self._store = store
        self._find_check = weakref.WeakMethod(check)

    def join(
        self, name: str, processes: Sequence[int], here: int, gpus: Sequence[int], seconds: float
    ) -> LocalCommunicators:
        """Makes a communicator of some GPUs of these processes, as many of each; all must call it alike.

        Args:
            name: the same on all of them, and never used twice.
            processes: their ranks in the group, in the order of the communicator's ranks.
            here: which of them this one is, as an index.
            gpus: which of this process's.
            seconds: how long the others may take to come.

        Raises:
            CollectiveTimeoutError: a process has not come.
            ProcessGroupError: two ranks use one GPU, or not all as many; or NCCL failed.
        """
        unique_id = self._meet(name, processes, here, [self._gpus.identity(gpu) for gpu in gpus], seconds)
        count, size = len(gpus), len(processes) * len(gpus)
        members = []
        try:
            version = self._library.get_version()
            with ExitStack() as group:
                if count > 1:
                    self._library.groupStart()
                    group.callback(self._library.groupEnd)
                for i, gpu in enumerate(gpus):
                    stream = self._gpus.new_stream(gpu)
                    with self._gpus.on(stream):
                        communicator = self._library.NcclCommunicator(size, unique_id, here * count + i)
                    members.append(
                        PlanMember(
                            rank=here * count + i,
                            size=size,
                            gpu=gpu,
                            device=self._gpus.device(gpu),
                            communicator=communicator,
                            stream=stream,
                            ability=Ability(version, self._gpus.capability(gpu)),
                        )
                    )
        except Exception as error:
            raise translated(f"making a communicator of {size} GPUs", error) from error
        return LocalCommunicators(members)

    def _meet(
        self, name: str, processes: Sequence[int], here: int, identities: list[str], seconds: float
    ) -> tuple[int, ...]:
        """All say in the store which GPUs they bring; the first makes the id from that, or says what is wrong."""
        deadline = time.monotonic() + seconds
        self._store.set(f"{name}/{here}", json.dumps(identities))
        if here == 0:
            came = {}
            for index, process in enumerate(processes):
                if not self._wait(f"{name}/{index}", deadline):
                    break
                came[process] = json.loads(self._store.get(f"{name}/{index}"))
            else:
                wrong = _wrong(came)
                unique_id = None if wrong else self._library.get_unique_id()
                self._store.set(f"{name}/id", json.dumps({"wrong": wrong, "id": unique_id}))
        if not self._wait(f"{name}/id", deadline):
            missing = [p for i, p in enumerate(processes) if not self._store.check([f"{name}/{i}"])]
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "rank 0"
            raise CollectiveTimeoutError("making an NCCL communicator", seconds, who)
        answer = json.loads(self._store.get(f"{name}/id"))
        if answer["wrong"]:
            raise ProcessGroupError(answer["wrong"])
        return tuple(answer["id"])

    def _wait(self, key: str, deadline: float) -> bool:
        """Is it there in time? The store is asked again and again: one that waits may let nobody else in."""
        pause = 0.001
        while not self._store.check([key]):
            check = self._find_check()
            if check is not None:
                check()
            if time.monotonic() > deadline:
                return False
            PAUSE.wait(pause)
            pause = min(2 * pause, 0.05)
        return True


def _wrong(came: dict[int, list[str]]) -> str | None:
    """What NCCL would not bear, or hang on."""
    counts = {process: len(identities) for process, identities in came.items()}
    if len(set(counts.values())) > 1:
        return f"every rank must give as many tensors, one for each of its GPUs, but they give {counts}"
    users: dict[str, int] = {}
    for process, identities in came.items():
        for identity in identities:
            if identity in users:
                return (
                    f"ranks {users[identity]} and {process} both use GPU {identity}: give each its own with "
                    "torch.cuda.set_device(local_rank), or with tensors on cuda:<local rank>"
                )
            users[identity] = process
    return None
