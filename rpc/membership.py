"""How the workers of a static group find each other, through a store."""

import contextlib
import json
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..c10d.stores.foreign import wait
from ..c10d.torch_types import TorchStore
from ..errors import RendezvousError
from .worker import WorkerInfo

__all__ = ["Member", "join", "name_group"]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group, the address, host:port, at which its agent listens, and its CUDA devices."""

    info: WorkerInfo
    address: str
    device_count: int = field(default_factory=torch.cuda.device_count)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Member":
        """From what `dataclasses.asdict` made of one."""
        return cls(WorkerInfo(**record["info"]), record["address"], record["device_count"])


def name_group(store: TorchStore, rank: int) -> str:
    """The prefix in the store, and the name, of the group that this worker is about to join.

    A store may serve several groups one after the other (init_rpc, shutdown, init_rpc): the n-th time that a
    rank joins, it joins the n-th group.
    """
    generation = store.add(f"rpc/joined/{rank}", 1)
    name = store.compare_set(f"rpc/{generation}/group", "", uuid.uuid4().hex)
    return f"{generation}/{name.decode()}"


def join(store: TorchStore, group: str, me: Member, world_size: int, timeout: float) -> list[Member]:
    """Makes this worker known and waits for all others.

    Returns:
        The members, by id.

    Raises:
        RendezvousError: two workers have one name, the world sizes differ, or somebody did not come within
            `timeout` seconds. Every worker of the group learns of the first two.
    """
    prefix = f"rpc/{group.partition('/')[0]}"
    rank = me.info.id
    holder = int(store.compare_set(f"{prefix}/name/{me.info.name}", "", str(rank)))
    record: dict[str, Any] = {"member": asdict(me), "world_size": world_size}
    if holder != rank:
        record = {"error": f"worker name {me.info.name!r} is not unique: ranks {holder} and {rank} have it"}
    store.set(f"{prefix}/member/{rank}", json.dumps(record))
    if "error" in record:
        store.set(f"{prefix}/settled", "")
        raise RendezvousError(f"{record['error']}; give each worker a name of its own")
    try:
        return _wait_for_all(store, prefix, me.info, world_size, timeout)
    except BaseException:
        _withdraw(store, prefix, me.info)
        raise


def _withdraw(store: TorchStore, prefix: str, me: WorkerInfo) -> None:
    """So that a second try through the same store does not find the first one's worker."""
    with contextlib.suppress(RuntimeError):  # the store may be what has failed
        for key in (f"{prefix}/member/{me.id}", f"{prefix}/name/{me.name}"):
            store.delete_key(key)
        store.add(f"{prefix}/arrived", -1)
        store.add(f"rpc/joined/{me.id}", -1)


def _wait_for_all(store: TorchStore, prefix: str, me: WorkerInfo, world_size: int, timeout: float) -> list[Member]:
    """Waits for the one key that says that everybody is there, or that the group cannot form."""
    arrived = store.add(f"{prefix}/arrived", 1)
    try:
        found = _look(store, prefix, me, world_size)
        if arrived < world_size:
            wait(store, [f"{prefix}/settled"], timeout)
            found = _look(store, prefix, me, world_size)
    except RendezvousError:
        store.set(f"{prefix}/settled", "")  # the others are to find out as well
        raise
    except RuntimeError as error:
        if not _is_timeout(error):
            raise
        found = _look(store, prefix, me, world_size)
    missing = [str(rank) for rank in range(world_size) if rank not in found]
    if missing:
        raise RendezvousError(
            f"of {world_size} workers, those with ranks {', '.join(missing)} did not join within {timeout:g} s"
        )
    store.set(f"{prefix}/settled", "")
    return [found[rank] for rank in range(world_size)]


def _look(store: TorchStore, prefix: str, me: WorkerInfo, world_size: int) -> dict[int, Member]:
    """Those who have come so far, by id; raises if one says that the group cannot form."""
    keys = {rank: f"{prefix}/member/{rank}" for rank in range(world_size)}
    return {
        rank: _read(json.loads(store.get(key)), me, world_size) for rank, key in keys.items() if store.check([key])
    }


def _is_timeout(error: RuntimeError) -> bool:
    """Stores of torch raise the same class for a timeout and for a lost server; they differ in the text."""
    text = str(error).lower()
    return "timeout" in text or "timed out" in text


def _read(record: dict[str, Any], me: WorkerInfo, world_size: int) -> Member:
    if "error" in record:
        raise RendezvousError(f"the group cannot form: {record['error']}")
    member = Member.from_record(record["member"])
    if record["world_size"] != world_size:
        raise RendezvousError(
            f"worker {member.info.name!r} was started with world_size {record['world_size']}, "
            f"{me.name!r} with {world_size}; start all workers with the same"
        )
    return member
