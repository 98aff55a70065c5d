"""Parses the placement of a remote module, "worker/device"."""

from dataclasses import dataclass
from typing import final

import torch

__all__ = ["Placement"]


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """A worker and one of its devices.

    worker: its name, its rank, or None for the calling worker.
    device: the device, in that worker's process.
    """

    worker: str | int | None
    device: torch.device

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Parses "<worker>/<device>", "rank:<rank>/<device>", "<device>" on this worker, or "<worker>" on its CPU.

        Raises:
            TypeError: `text` is not a string.
            ValueError: `text` has none of these forms.
            RuntimeError: torch knows no such device.
        """
        if not isinstance(text, str):
            raise TypeError(f"remote_device is {text!r}: give a string such as 'worker1/cuda:0'")
        worker, slash, device = text.partition("/")
        if not slash:
            if (local := _local_device(text)) is not None:
                return cls(None, local)
            device = "cpu"
        kind, colon, rank = worker.partition(":")
        if not worker or "/" in device or (kind == "rank" and colon and not rank.isdecimal()):
            raise ValueError(
                f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' "
                "or 'rank:<rank>/<device>' or '<device>'"
            )
        return cls(int(rank) if kind == "rank" and colon else worker, torch.device(device))


def _local_device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
