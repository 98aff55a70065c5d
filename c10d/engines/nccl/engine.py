"""The engine for CUDA tensors, on NCCL: what it is asked for, as requests for its runner."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Final, cast, final

from torch import Tensor

from ....errors import UnsupportedOperationError
from ...reductions import Reduction
from ..base import Engine, PendingOperation, Setup
from . import plans
from .library import Library, load
from .plans import Plan, PlanMember
from .runner import Request, Runner
from .streams import CudaGpus, Gpus

__all__ = ["NcclEngine"]


@final
class NcclEngine(Engine):
    """NCCL, through cupy. See plans.py for what each operation is, and engines.base for what it does.

    Args:
        setup: see engines.base.
        library: NCCL, or what stands in for it.
        gpus: CUDA's, or what stands in for them.
        blocking_wait: a `wait` waits until the operation is over, as with torch's TORCH_NCCL_BLOCKING_WAIT.
        interval: seconds between two looks at what is under way.

    Raises:
        UnsupportedOperationError: torch finds no GPU, or cupy is missing.
    """

    name: ClassVar[str] = "nccl"
    blocking: ClassVar[bool] = False
    on_streams: ClassVar[bool] = True

    def __init__(
        self,
        setup: Setup,
        *,
        library: Library | None = None,
        gpus: Gpus | None = None,
        blocking_wait: bool = False,
        interval: float = 0.1,
    ) -> None:
        super().__init__(setup)
        self._gpus: Final = CudaGpus() if gpus is None else gpus
        self._runner: Final = Runner(
            setup,
            load() if library is None else library,
            self._gpus,
            blocking_wait=blocking_wait,
            interval=interval,
        )
        self._last_gpus: tuple[int, ...] | None = None
        self._together = threading.local()

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> PendingOperation | None:
        """NCCL's own."""
        return self._one("broadcast", [tensor], timeout, partial(plans.broadcast, tensor=tensor, root=root))

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """NCCL's own, or else gathered and combined by torch."""
        plan = partial(plans.all_reduce, tensor=tensor, reduction=reduction)
        return self._one("all_reduce", [tensor], timeout, plan)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """As all_reduce."""
        plan = partial(plans.reduce, tensor=tensor, root=root, reduction=reduction)
        return self._one("reduce", [tensor], timeout, plan)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> PendingOperation | None:
        """In one call if the sizes are the same, or else as broadcasts in one group."""
        plan = partial(plans.all_gather, outputs=outputs, tensor=tensor)
        return self._one("all_gather", [tensor, *outputs], timeout, plan)

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> PendingOperation | None:
        """NCCL's own."""
        plan = partial(plans.all_gather_single, output=output, tensor=tensor)
        return self._one("all_gather", [tensor, output], timeout, plan)

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float
    ) -> PendingOperation | None:
        """Messages in one group."""
        plan = partial(plans.gather, outputs=outputs, tensor=tensor, root=root)
        return self._one("gather", [tensor, *outputs], timeout, plan)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float
    ) -> PendingOperation | None:
        """Messages in one group."""
        plan = partial(plans.scatter, tensor=tensor, inputs=inputs, root=root)
        return self._one("scatter", [tensor, *inputs], timeout, plan)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """In one call if the sizes are the same, or else as reductions in one group."""
        plan = partial(plans.reduce_scatter, tensor=tensor, inputs=inputs, reduction=reduction)
        return self._one("reduce_scatter", [tensor, *inputs], timeout, plan)

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """NCCL's own, or else messages that torch combines."""
        plan = partial(plans.reduce_scatter_single, tensor=tensor, whole=whole, reduction=reduction)
        return self._one("reduce_scatter", [tensor, whole], timeout, plan)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
    ) -> PendingOperation | None:
        """Messages in one group."""
        plan = partial(plans.all_to_all, outputs=outputs, inputs=inputs)
        return self._one("all_to_all", [*inputs, *outputs], timeout, plan)

    def barrier(self, timeout: float) -> PendingOperation | None:
        """On the GPUs that were used last, or else the current one. Its `wait` waits until all ranks have come."""
        gpus = self._last_gpus or (self._gpus.current(),)
        steps = [plans.barrier] * len(gpus)
        request = Request(name="barrier", gpus=gpus, plans=steps, kept=(), timeout=timeout, on_host=True)
        return self._ask(request)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> PendingOperation | None:  # noqa: ARG002
        """NCCL has no tags: a rank's messages are received in the order in which they were sent."""
        plan = partial(plans.send, tensor=tensor)
        return self._message("send", tensor, (self.rank, peer), timeout, plan)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingOperation:  # noqa: ARG002
        """From a named rank; NCCL does not receive from any."""
        if peer is None:
            raise UnsupportedOperationError(self.name, "recv from any rank", "name the rank that sends")
        plan = partial(plans.recv, tensor=tensor)
        return self._message("recv", tensor, (peer, self.rank), timeout, plan)  # type: ignore[return-value]

    def multigpu(
        self,
        name: str,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        steps: Sequence[Callable[[PlanMember], Plan]],
        timeout: float,
    ) -> PendingOperation | None:
        """A collective of several GPUs of each process: those that `tensors` are on, with a plan for each."""
        gpus = tuple(self._gpus.of(tensor) for tensor in tensors)
        if len(set(gpus)) != len(gpus):
            raise ValueError(f"{name} takes one tensor on each GPU, but they are on the GPUs {gpus}")
        self._last_gpus = gpus
        return self._ask(Request(name=name, gpus=gpus, plans=steps, kept=kept, timeout=timeout))

    def start(
        self, steps: Sequence[Callable[[], PendingOperation | int | None]], finish: Callable[[], None] | None
    ) -> PendingOperation | None:
        """In one group of NCCL, after which `finish` is done on the same stream."""
        if len(steps) == 1 and finish is None:
            return cast("PendingOperation | None", steps[0]())
        requests: list[Request] = []
        self._together.requests = requests
        try:
            for step in steps:
                step()
        finally:
            self._together.requests = None
        return self._runner.begin(requests, finish) if requests else None

    def drain(self) -> None:
        """Waits until the GPUs are done."""
        self._runner.drain()

    def fail(self, error: Exception) -> None:
        """Wakes all who wait, then has NCCL let go of the GPUs."""
        self._runner.fail(error)

    def close(self) -> None:
        """Gives back threads and communicators."""
        self._runner.close()

    def _one(
        self, name: str, kept: Sequence[Tensor], timeout: float, plan: Callable[[PlanMember], Plan]
    ) -> PendingOperation | None:
        gpus = self._last_gpus = (self._gpus.of(kept[0]),)
        return self._ask(Request(name=name, gpus=gpus, plans=[plan], kept=kept, timeout=timeout))

    def _message(
        self, name: str, tensor: Tensor, ranks: tuple[int, int], timeout: float, plan: Callable[[PlanMember], Plan]
    ) -> PendingOperation | None:
        if ranks[0] == ranks[1]:
            raise UnsupportedOperationError(self.name, f"{name} to the rank itself", "copy the tensor")
        gpus = (self._gpus.of(tensor),)
        request = Request(name=name, gpus=gpus, plans=[plan], kept=[tensor], timeout=timeout, message=ranks)
        return self._ask(request)

    def _ask(self, request: Request) -> PendingOperation | None:
        """Begins it, or leaves it to `start`."""
        requests: list[Request] | None = getattr(self._together, "requests", None)
        if requests is None:
            return self._runner.begin([request], None)
        requests.append(request)
        return None
