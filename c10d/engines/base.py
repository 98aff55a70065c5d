"""The contract of an engine: what carries out the operations of a process group on one kind of device.

An engine is made by all ranks of a group together and used by one group. What it is given has been checked and
brought into shape by the group: tensors are dense, contiguous, on the engine's device, outside autograd and of
matching dtypes and sizes; roots and peers are ranks of this group.

A `blocking` engine returns when the operation is done, or raises. Its collectives are called one after another in
the order in which this rank issued them, and so are its sends to one peer and its receives from one peer, but
these three on different threads. One that is not blocking starts the operation and returns a Pending. Between them
is one that blocks but `posts_receives`: its `recv` returns a Pending, so receives with different tags may end in
any order.

One that works `on_streams` of a GPU is not blocking, and goes further: waiting for its Pending makes the current
streams wait, not the caller, and `on_done` calls back as soon as a wait would not block.
"""

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from ...errors import UnsupportedOperationError
from ..pending import All, Finishing
from ..reductions import Reduction
from ..torch_types import TorchStore

__all__ = ["Engine", "EngineFactory", "PendingOperation", "Setup", "chunks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an engine is made from.

    store: shared by the ranks of the group, and used by this engine alone.
    rank: this process's number in the group.
    size: how many ranks the group has.
    timeout: seconds that the ranks may take to come together.
    device: type of the device that the tensors are on, such as `"cpu"`.
    global_ranks: the number that each rank of the group has in the default group.
    group: name of the group.
    failed: to be called with the error if the engine finds that the group cannot go on, and does not raise it from
        a blocking operation. The group then calls `fail`, perhaps with an error that says it more exactly.
    """

    store: TorchStore
    rank: int
    size: int
    timeout: float
    device: str
    global_ranks: tuple[int, ...]
    group: str
    failed: Callable[[Exception], None] = field(default=lambda _: None)


class PendingOperation(Protocol):
    """An operation under way."""

    def wait(self, timeout: float | None) -> None:
        """Waits until it is done, at most `timeout` seconds (None: as long as the operation itself may take).

        Raises what the operation raised, or TimeoutError if it is still under way.
        """

    def done(self) -> bool:
        """Is it over, well or badly?"""

    def source(self) -> int:
        """Of a receive that is done: the rank that sent."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""


class Engine(ABC):
    """Carries out operations. Those that a subclass does not define are refused.

    Tensors are changed in place. `timeout` is in seconds; CollectiveTimeoutError is raised when it is over.
    """

    name: ClassVar[str]
    """What users call it, such as `"gloo"`."""

    blocking: ClassVar[bool] = True
    posts_receives: ClassVar[bool] = False
    on_streams: ClassVar[bool] = False
    notices_departures: ClassVar[bool] = False
    """Does it raise RankLostError by itself where a rank that has left the group is needed, and only there?"""

    def __init__(self, setup: Setup) -> None:
        self.rank = setup.rank
        self.size = setup.size

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> PendingOperation | None:
        """Every rank's `tensor` becomes the root's."""
        raise self._refusal("broadcast")

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Every rank's `tensor` becomes the reduction of all, bit for bit the same on all ranks."""
        raise self._refusal("all_reduce")

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """The root's `tensor` becomes the reduction of all; the others' stay or not, as the engine likes."""
        raise self._refusal("reduce")

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> PendingOperation | None:
        """`outputs[i]` becomes the tensor of rank i; the sizes may differ, if each rank gives the right ones."""
        raise self._refusal("all_gather")

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> PendingOperation | None:
        """As all_gather of tensors of one size into one tensor, one after another."""
        return self.all_gather(chunks(output, self.size), tensor, timeout)

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float
    ) -> PendingOperation | None:
        """On the root, `outputs[i]` becomes the tensor of rank i; elsewhere there are no outputs."""
        raise self._refusal("gather")

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float
    ) -> PendingOperation | None:
        """Rank i's `tensor` becomes the root's `inputs[i]`; elsewhere there are no inputs."""
        raise self._refusal("scatter")

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Rank i's `tensor` becomes the reduction of all ranks' `inputs[i]`."""
        raise self._refusal("reduce_scatter")

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """As reduce_scatter of tensors of one size that lie one after another in `whole`."""
        return self.reduce_scatter(tensor, chunks(whole, self.size), reduction, timeout)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
    ) -> PendingOperation | None:
        """Rank i's `outputs[j]` becomes rank j's `inputs[i]`; the sizes may differ."""
        raise self._refusal("all_to_all")

    def all_to_all_single(self, output: Tensor, whole: Tensor, timeout: float) -> PendingOperation | None:
        """As all_to_all of tensors of one size that lie one after another."""
        return self.all_to_all(chunks(output, self.size), chunks(whole, self.size), timeout)

    def barrier(self, timeout: float) -> PendingOperation | None:
        """Returns once all ranks have called it."""
        raise self._refusal("barrier")

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> PendingOperation | None:
        """Sends to `peer`'s `recv` with this tag. May return before it is received; the tensor is then free."""
        raise self._refusal("send")

    def can_send(self, tensor: Tensor, peer: int) -> bool:
        """Would `send` return without waiting, as things are? A blocking engine's then needs no other thread."""
        return False

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingOperation | int:
        """Receives what `peer`, or anyone if it is None, sends with this tag; the rank that sent it."""
        raise self._refusal("recv")

    def start(
        self, steps: Sequence[Callable[[], PendingOperation | int | None]], finish: Callable[[], None] | None
    ) -> PendingOperation | None:
        """Of one that does not block: starts several operations as one, after which `finish` is done.

        An engine may do better than this: put them into one message, or have the device do what follows.
        """
        begun = [step() for step in steps]
        under_way = [pending for pending in begun if pending is not None and not isinstance(pending, int)]
        if not under_way:
            if finish is not None:
                finish()
            return None
        pending = under_way[0] if len(under_way) == 1 else All(under_way)
        return pending if finish is None else Finishing(pending, finish)

    def drain(self) -> None:
        """Waits for what is under way though nobody waits for it. Called before the group ends in good order."""

    def fail(self, error: Exception) -> None:
        """Makes all that is under way, and all that comes, raise `error`. Called from any thread."""

    def close(self) -> None:
        """Gives back what the engine holds. Nothing is under way any more. Called once."""

    def _refusal(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(self.name, operation, "it has no such operation; use another engine")


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    """So many flat pieces of one size of a contiguous tensor, whose size `count` divides."""
    return list(tensor.view(count, -1).unbind()) if tensor.numel() else [tensor.view(-1)] * count


EngineFactory = Callable[[Setup], Engine]
"""What makes an engine; an Engine class is one."""
