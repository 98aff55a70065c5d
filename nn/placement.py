"""Where a module lives: the text "worker/device"."""

from dataclasses import dataclass
from typing import final

import torch

__all__ = ["Placement"]


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """A worker, and a device of its machine.

    worker: a name, a rank, or None for the worker that asks.
    """

    worker: str | int | None
    device: torch.device

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Reads "<worker>/<device>", "rank:<rank>/<device>", "<device>" or "<worker>", which means its CPU.

        Raises:
            TypeError: `text` is no string.
            ValueError: it has none of these forms.
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
