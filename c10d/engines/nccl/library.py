"""What the engine uses of NCCL, as cupy.cuda.nccl names it, and of CUDA, as torch does.

Tests pass other implementations.
"""

from contextlib import AbstractContextManager
from typing import Protocol, cast, final

import torch
from torch import Tensor

from ....errors import ProcessGroupError, UnsupportedOperationError

__all__ = ["Communicator", "CudaGpus", "Event", "Gpus", "Library", "Stream", "load", "translate_error"]

MIN_CUPY = 14
"""The first release of cupy whose ids of communicators are bytes."""


class Communicator(Protocol):
    """One rank of a communicator.

    Tensors are given as device pointers and counts of elements, datatypes and reductions as numbers (plans.py),
    and streams as cudaStream_t. Operations are enqueued on the stream, those inside a group at its end.
    """

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int, /) -> None:  # noqa: N802
        """Reduces all ranks' `sendbuf` into every rank's `recvbuf`."""

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int, /
    ) -> None:
        """Reduces all ranks' `sendbuf` into the root's `recvbuf`."""

    def broadcast(self, sendbuf: int, recvbuf: int, count: int, datatype: int, root: int, stream: int, /) -> None:
        """Copies the root's `sendbuf` to every rank's `recvbuf`."""

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int, /) -> None:  # noqa: N802
        """Concatenates the `count` elements of every rank's `sendbuf` into `recvbuf`."""

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int, /
    ) -> None:
        """Reduces the i-th `recvcount` elements of all ranks' `sendbuf` into rank i's `recvbuf`."""

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Sends to the peer's next `recv` from this rank."""

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Receives the peer's next `send` to this rank."""

    def check_async_error(self) -> None:
        """Raises the asynchronous error of the communicator, if there was one."""

    def abort(self) -> None:
        """Ends operations in flight and releases the communicator."""

    def destroy(self) -> None:
        """Releases the communicator. No operation may be in flight."""


class Library(Protocol):
    """The functions of the module cupy.cuda.nccl."""

    def get_version(self) -> int:
        """Returns the version, such as 22703 for 2.27.3."""

    def get_unique_id(self) -> bytes:
        """Returns an id for a new communicator, which all its ranks must pass to it."""

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int, /) -> Communicator:  # noqa: N802, N803
        """Joins a communicator of `ndev` ranks with the current GPU.

        Blocks until all ranks have joined; inside a group, the end of the group blocks.
        """

    def groupStart(self) -> None:  # noqa: N802
        """Starts a group: operations that this thread calls are collected."""

    def groupEnd(self) -> None:  # noqa: N802
        """Ends the group: starts all collected operations at once."""


def load() -> Library:
    """Returns cupy.cuda.nccl.

    Raises:
        UnsupportedOperationError: cupy is not installed or too old, or finds no NCCL.
    """
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise UnsupportedOperationError(
            "nccl", "start", f"it needs cupy: pip install 'cupy-cuda13x>=14' ({error})"
        ) from None
    if int(cupy.__version__.split(".")[0]) < MIN_CUPY:
        raise UnsupportedOperationError(
            "nccl", "start", f"it needs cupy {MIN_CUPY} or newer, and finds {cupy.__version__}"
        )
    if not nccl.available:
        raise UnsupportedOperationError(
            "nccl",
            "start",
            "cupy cannot load libnccl.so.2: install the nvidia-nccl wheel for your CUDA, as torch does",
        )
    return cast(Library, nccl)


_UNNAMED_ERRORS = {6: "a process exited or the network failed", 7: "still in progress"}
"""Error codes of NCCL whose names cupy lacks; it raises KeyError with the code."""


def translate_error(operation: str, error: Exception) -> ProcessGroupError:
    """Returns the error to raise for an error of NCCL."""
    text = str(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in _UNNAMED_ERRORS:
        text = f"error {error.args[0]}: {_UNNAMED_ERRORS[error.args[0]]}"
    return ProcessGroupError(f"NCCL failed in {operation}: {text} (NCCL_DEBUG=WARN prints more)")


class Event(Protocol):
    """A point in the work of a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Returns whether the stream has passed the point."""


class Stream(Protocol):
    """A queue of work of one GPU, as torch.cuda.Stream."""

    cuda_stream: int
    """The stream's cudaStream_t."""

    def record_event(self) -> Event:
        """Returns an event after the work that is on the stream now."""

    def wait_event(self, event: Event, /) -> None:
        """Makes later work on this stream wait for an event of another stream."""


class Gpus(Protocol):
    """The GPUs of this process, by their index as torch counts them."""

    def index_of(self, tensor: Tensor, /) -> int:
        """Returns the GPU that a tensor is on."""

    def current(self) -> int:
        """Returns the current GPU of this thread."""

    def device(self, gpu: int, /) -> torch.device:
        """Returns the torch device of a GPU."""

    def uuid(self, gpu: int, /) -> str:
        """Returns an id that all processes agree on, different for different GPUs."""

    def compute_capability(self, gpu: int, /) -> tuple[int, int]:
        """Returns the compute capability of a GPU, such as `(9, 0)`."""

    def new_stream(self, gpu: int, /) -> Stream:
        """Returns a new stream of high priority."""

    def current_stream(self, gpu: int, /) -> Stream:
        """Returns the stream that torch enqueues work of this thread on."""

    def use(self, stream: Stream, /) -> AbstractContextManager[object]:
        """Makes a stream, and its GPU, current in a `with` block."""

    def is_capturing(self) -> bool:
        """Returns whether the current stream is being captured into a CUDA graph."""


@final
class CudaGpus:
    """The GPUs that torch finds.

    Raises:
        UnsupportedOperationError: there are none.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedOperationError("nccl", "start", "torch finds no GPU here; use engine 'shm' or 'gloo'")

    def index_of(self, tensor: Tensor) -> int:
        """Returns the GPU that a tensor is on."""
        assert tensor.device.index is not None
        return tensor.device.index

    def current(self) -> int:
        """Returns the current GPU of this thread."""
        return torch.cuda.current_device()

    def device(self, gpu: int) -> torch.device:
        """Returns the torch device of a GPU."""
        return torch.device("cuda", gpu)

    def uuid(self, gpu: int) -> str:
        """Returns CUDA's UUID of a GPU."""
        return str(torch.cuda.get_device_properties(gpu).uuid)

    def compute_capability(self, gpu: int) -> tuple[int, int]:
        """Returns the compute capability of a GPU, such as `(9, 0)`."""
        return torch.cuda.get_device_capability(gpu)

    def new_stream(self, gpu: int) -> Stream:
        """Returns a new stream of high priority, as other work waits for collectives."""
        return cast(Stream, torch.cuda.Stream(gpu, priority=-1))  # type: ignore[no-untyped-call]

    def current_stream(self, gpu: int) -> Stream:
        """Returns the stream that torch enqueues work of this thread on."""
        return cast(Stream, torch.cuda.current_stream(gpu))

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes a stream, and its GPU, current in a `with` block."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def is_capturing(self) -> bool:
        """Returns whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()
