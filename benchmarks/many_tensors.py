"""The cost of messages with many tensors: state dicts, lists of frames, gradients."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from .calls import KIB, MIB
from .harness import Case
from .systems import System, worker_name

__all__ = ["CASES"]


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the number of the tensors, and the sum of their first elements."""
    some = tensors[0], tensors[len(tensors) // 2], tensors[-1]
    return torch.tensor([float(len(tensors)), *(float(each.detach().reshape(-1)[0]) for each in some)])


class ManyTensors(Case):
    """Sends a list of tensors to some workers at once; the time is that of one call."""

    count: ClassVar[int]
    nbytes: ClassVar[int]
    receivers: ClassVar[int] = 1

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._tensors = self.make()

    def make(self) -> list[torch.Tensor]:
        """Returns the tensors."""
        return [torch.full((self.nbytes // 4,), float(number % 1000)) for number in range(self.count)]

    def results(self) -> list[torch.Tensor]:
        """Returns what the receivers have found in them."""
        names = [worker_name(1 + each) for each in range(self.receivers)]
        calls = [self._rpc.rpc_async(name, total, args=(self._tensors,)) for name in names]
        return [call.wait() for call in calls]


class Frames(ManyTensors):
    """Frames of a game, as actors send them to a learner."""

    name = "2,048 frames of 84x84"
    count = 2048

    def make(self) -> list[torch.Tensor]:
        """Returns the frames, each with memory of its own."""
        return [torch.full((84, 84), number % 256, dtype=torch.uint8) for number in range(self.count)]


class MixedTensors(ManyTensors):
    """Tensors of several dtypes, half of which are transposed."""

    name = "1,024 tensors of mixed dtypes"
    count = 1024
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)

    def make(self) -> list[torch.Tensor]:
        """Returns matrices of 64 times 48 elements."""
        made = [torch.full((64, 48), number % 100, dtype=self.dtypes[number % 4]) for number in range(self.count)]
        return [each.t() if number % 8 > 3 else each for number, each in enumerate(made)]


class Parameters(ManyTensors):
    """Leaves that require grad, sent in a context."""

    name = "512 parameters of 32 KiB in a context"
    count = 512
    nbytes = 32 * KIB

    def make(self) -> list[torch.Tensor]:
        """Returns the leaves."""
        return [each.requires_grad_() for each in super().make()]

    def results(self) -> list[torch.Tensor]:
        """Sends them in a context of their own."""
        with self._autograd.context():
            return super().results()


def _list(count: int, nbytes: int, size: str, receivers: int = 1) -> type[Case]:
    """Returns the case of a list of tensors of one size."""
    name = f"{count:,} tensors of {size}" if receivers == 1 else f"{receivers} receivers, {count:,} x {size}"
    sizes = {"count": count, "nbytes": nbytes, "receivers": receivers}
    return ManyTensors.variant(name, workers=1 + receivers, calls=receivers, **sizes)


CASES: list[type[Case]] = [
    _list(2048, 8 * KIB, "8 KiB"),
    _list(512, 32 * KIB, "32 KiB"),
    _list(256, 64 * KIB, "64 KiB"),
    _list(1000, KIB, "1 KiB"),
    _list(300, 4 * MIB, "4 MiB"),
    Frames,
    MixedTensors,
    Parameters,
    _list(2048, 8 * KIB, "8 KiB", 4),
    _list(512, 32 * KIB, "32 KiB", 4),
    _list(256, 64 * KIB, "64 KiB", 4),
]
