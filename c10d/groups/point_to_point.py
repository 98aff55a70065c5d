"""Sends and receives of a process group, under the names by which torch calls them."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ..engines.collective_call import ANY_RANK, CallOptions, CollectiveCall, Step
from ..engines.staging import Staging
from ..torch_types import TorchProcessGroup
from .checks import check_rank, check_tag, check_tensors, single_item
from .work import GroupWork

__all__ = ["PointToPoint"]

Tensors = Sequence[Tensor]

_NO_OPTIONS = CallOptions()


class PointToPoint(TorchProcessGroup):
    """A torch ProcessGroup with the methods that torch.distributed calls for sends and receives.

    Each takes a list of one tensor and returns a Work. Bad arguments raise ValueError or TypeError on this rank,
    before anything is sent.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a form that the stubs lack
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank  # torch's own method takes ten times as long, and every call asks

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return self._size

    @abstractmethod
    def start(self, call: CollectiveCall) -> GroupWork | None:
        """Starts an operation. Returns its Work; None if the caller asked to wait, which has happened by then."""

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> GroupWork | None:
        """Sends a tensor to rank `dst`, which receives it with the same tag."""
        tensor = single_item("send", tensors)
        check_tensors("send", [tensor])
        check_rank("send", "dst", dst, self.size())
        check_tag("send", tag)
        staging = Staging()
        step = Step("send", staging.input(tensor), dst, tag)
        inputs = [tensor]
        return self.start(
            CollectiveCall("send", [step], staging, inputs, [], _NO_OPTIONS, result=inputs, peer=dst, tag=tag)
        )

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> GroupWork | None:
        """Receives what rank `src` sends with this tag."""
        check_rank("recv", "src", src, self.size())
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork | None:
        """Receives what any rank sends with this tag; `source_rank()` of the Work returns which rank sent."""
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> GroupWork | None:
        tensor = single_item("recv", tensors)
        check_tensors("recv", [tensor])
        check_tag("recv", tag)
        staging = Staging()
        step = Step("recv", staging.output(tensor), src, tag)
        peer = ANY_RANK if src is None else src
        return self.start(CollectiveCall("recv", [step], staging, [], [tensor], _NO_OPTIONS, peer=peer, tag=tag))
