"""Which devices the tensors of a call come from and go to."""

from collections.abc import Sequence

import torch

from ..errors import RendezvousError
from .membership import Member
from .options import RpcBackendOptions
from .worker import WorkerInfo

__all__ = ["check_device_maps"]


def check_device_maps(me: WorkerInfo, options: RpcBackendOptions, members: Sequence[Member]) -> None:
    """Checks a worker's device maps against its group.

    Raises:
        RendezvousError: they name a worker that is not in the group, or devices that are not there.
    """
    counts = {member.info.name: member.device_count for member in members}
    for to, device_map in options.device_maps.items():
        if to not in counts:
            raise RendezvousError(
                f"Node {me.name} has invalid target node names in its device maps: {to!r} is not one of "
                f"{', '.join(counts)}"
            )
        for device, target in device_map.items():
            named = ((me.name, "source", torch.device(device)), (to, "target", torch.device(target)))
            for worker, side, each in named:
                if each.type == "cuda" and (each.index or 0) >= counts[worker]:
                    raise RendezvousError(
                        f"Node {me.name} has unexpected {side} devices in its device map for {to}: {worker} has "
                        f"no {each}, it has {counts[worker]} CUDA devices"
                    )
