"""The CUDA streams, events and GPUs that the engine uses. Tests pass another implementation."""

from contextlib import AbstractContextManager
from typing import Protocol, cast, final

import torch
from torch import Tensor

from ....errors import UnsupportedOperationError

__all__ = ["CudaGpus", "Event", "Gpus", "Stream"]


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
