"""The NCCL engine, which turns operations on CUDA tensors into requests to its runner."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Final, cast, final

from torch import Tensor

from ....errors import UnsupportedOperationError
from ..base import Engine, Setup
from ..pending import PendingOperation
from ..reductions import Reduction
from . import plans
from .library import Library, load
from .plans import GpuRank, Plan
from .runner import NcclRequest, Runner
from .streams import CudaGpus, Gpus

__all__ = ["NcclEngine"]


@final
class NcclEngine(Engine):
    """Connects GPUs by NCCL, through cupy. Plans (plans.py) say which calls of NCCL an operation consists of.

    Args:
        setup: see engines/base.py.
        library: NCCL, or a replacement for tests.
        gpus: of this process, or a replacement for tests.
        blocking_wait: whether `wait` blocks until the operation is done, as with torch's TORCH_NCCL_BLOCKING_WAIT.
        interval: seconds between polls of the watchdog.

    Raises:
        UnsupportedOperationError: torch finds no GPU, or cupy is missing.
    """

    name: ClassVar[str] = "nccl"
    blocking: ClassVar[bool] = False
    uses_streams: ClassVar[bool] = True

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
        self._collected = threading.local()  # requests of the `start` that runs on a thread

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> PendingOperation | None:
        """Broadcasts by NCCL."""
        return self._start_collective(
            "broadcast", [tensor], timeout, partial(plans.broadcast, tensor=tensor, root=root)
        )

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Reduces by NCCL, or else gathers by NCCL and combines by torch on every rank."""
        plan = partial(plans.all_reduce, tensor=tensor, reduction=reduction)
        return self._start_collective("all_reduce", [tensor], timeout, plan)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Reduces by NCCL, or else gathers by NCCL and combines by torch on the root."""
        plan = partial(plans.reduce, tensor=tensor, root=root, reduction=reduction)
        return self._start_collective("reduce", [tensor], timeout, plan)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> PendingOperation | None:
        """Gathers by one call if the sizes are equal, or else by broadcasts in one group."""
        plan = partial(plans.all_gather, outputs=outputs, tensor=tensor)
        return self._start_collective("all_gather", [tensor, *outputs], timeout, plan)

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> PendingOperation | None:
        """Gathers by NCCL."""
        plan = partial(plans.all_gather_single, output=output, tensor=tensor)
        return self._start_collective("all_gather", [tensor, output], timeout, plan)

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float
    ) -> PendingOperation | None:
        """Gathers by sends and receives in one group."""
        plan = partial(plans.gather, outputs=outputs, tensor=tensor, root=root)
        return self._start_collective("gather", [tensor, *outputs], timeout, plan)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float
    ) -> PendingOperation | None:
        """Scatters by sends and receives in one group."""
        plan = partial(plans.scatter, tensor=tensor, inputs=inputs, root=root)
        return self._start_collective("scatter", [tensor, *inputs], timeout, plan)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Reduces by one call if the sizes are equal, or else by reductions in one group."""
        plan = partial(plans.reduce_scatter, tensor=tensor, inputs=inputs, reduction=reduction)
        return self._start_collective("reduce_scatter", [tensor, *inputs], timeout, plan)

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Reduces by NCCL, or else exchanges the chunks by NCCL and combines them by torch."""
        plan = partial(plans.reduce_scatter_single, tensor=tensor, whole=whole, reduction=reduction)
        return self._start_collective("reduce_scatter", [tensor, whole], timeout, plan)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
    ) -> PendingOperation | None:
        """Exchanges the tensors by sends and receives in one group."""
        plan = partial(plans.all_to_all, outputs=outputs, inputs=inputs)
        return self._start_collective("all_to_all", [*inputs, *outputs], timeout, plan)

    def barrier(self, timeout: float) -> PendingOperation | None:
        """Reduces a number on the GPUs that were used last, or else the current one; `wait` blocks the caller."""
        gpus = self._last_gpus or (self._gpus.current(),)
        request = NcclRequest(
            name="barrier",
            gpus=gpus,
            plans=[plans.barrier] * len(gpus),
            tensors=(),
            timeout=timeout,
            blocks_host=True,
        )
        return self._submit(request)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> PendingOperation | None:  # noqa: ARG002
        """Sends by NCCL, which has no tags: messages are received in the order in which they were sent."""
        plan = partial(plans.send, tensor=tensor)
        return self._start_message("send", tensor, (self.rank, peer), timeout, plan)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> PendingOperation:  # noqa: ARG002
        """Receives by NCCL, which cannot receive from any rank."""
        if peer is None:
            raise UnsupportedOperationError(self.name, "recv from any rank", "name the rank that sends")
        plan = partial(plans.recv, tensor=tensor)
        return self._start_message("recv", tensor, (peer, self.rank), timeout, plan)  # type: ignore[return-value]

    def multigpu(
        self,
        name: str,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        steps: Sequence[Callable[[GpuRank], Plan]],
        timeout: float,
    ) -> PendingOperation | None:
        """Starts a collective in which every process takes part with several GPUs.

        Args:
            name: of the operation.
            tensors: one on each GPU that takes part.
            kept: all tensors that the operation uses.
            steps: the plan for each GPU.
            timeout: seconds that the operation may take.

        Raises:
            ValueError: several tensors are on one GPU.
        """
        gpus = tuple(self._gpus.index_of(tensor) for tensor in tensors)
        if len(set(gpus)) != len(gpus):
            raise ValueError(f"{name} takes one tensor on each GPU, but they are on the GPUs {gpus}")
        self._last_gpus = gpus
        return self._submit(NcclRequest(name=name, gpus=gpus, plans=steps, tensors=kept, timeout=timeout))

    def start(
        self, steps: Sequence[Callable[[], PendingOperation | int | None]], finish: Callable[[], None] | None
    ) -> PendingOperation | None:
        """Starts the operations in one group of NCCL; `finish` runs on the engine's stream after them."""
        if len(steps) == 1 and finish is None:
            return cast("PendingOperation | None", steps[0]())
        requests: list[NcclRequest] = []
        self._collected.requests = requests
        try:
            for step in steps:
                step()
        finally:
            self._collected.requests = None
        return self._runner.submit(requests, finish) if requests else None

    def drain(self) -> None:
        """Blocks until the GPUs have done all operations in flight."""
        self._runner.drain()

    def fail(self, error: Exception) -> None:
        """Fails all operations in flight, then aborts the communicators."""
        self._runner.fail(error)

    def close(self) -> None:
        """Ends the threads and releases the communicators."""
        self._runner.close()

    def _start_collective(
        self, name: str, tensors: Sequence[Tensor], timeout: float, plan: Callable[[GpuRank], Plan]
    ) -> PendingOperation | None:
        gpus = self._last_gpus = (self._gpus.index_of(tensors[0]),)
        return self._submit(NcclRequest(name=name, gpus=gpus, plans=[plan], tensors=tensors, timeout=timeout))

    def _start_message(
        self, name: str, tensor: Tensor, route: tuple[int, int], timeout: float, plan: Callable[[GpuRank], Plan]
    ) -> PendingOperation | None:
        if route[0] == route[1]:
            raise UnsupportedOperationError(self.name, f"{name} to the rank itself", "copy the tensor")
        gpus = (self._gpus.index_of(tensor),)
        request = NcclRequest(name=name, gpus=gpus, plans=[plan], tensors=[tensor], timeout=timeout, route=route)
        return self._submit(request)

    def _submit(self, request: NcclRequest) -> PendingOperation | None:
        """Submits a request to the runner, or leaves it to the `start` that runs on this thread."""
        requests: list[NcclRequest] | None = getattr(self._collected, "requests", None)
        if requests is None:
            return self._runner.submit([request], None)
        requests.append(request)
        return None
