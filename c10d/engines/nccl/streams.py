"""Streams and events of CUDA, as far as the engine uses them; tests put others in their place."""

from contextlib import AbstractContextManager
from typing import Protocol, cast, final

import torch
from torch import Tensor

from ....errors import UnsupportedOperationError

__all__ = ["CudaGpus", "Event", "Gpus", "Stream"]


class Event(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Has the stream passed it?"""


class Stream(Protocol):
    """Work of one GPU, done in order."""

    cuda_stream: int
    """As CUDA knows it."""

    def record_event(self) -> Event:
        """The point that it is at now."""

    def wait_event(self, event: Event, /) -> None:
        """What comes, waits until another stream has passed that point."""


class Gpus(Protocol):
    """The GPUs of this process, by index."""

    def of(self, tensor: Tensor, /) -> int:
        """Where a tensor is."""

    def current(self) -> int:
        """The one that is used unless another is named."""

    def device(self, gpu: int, /) -> torch.device:
        """What torch calls it."""

    def identity(self, gpu: int, /) -> str:
        """The same in all processes, and different for different GPUs."""

    def capability(self, gpu: int, /) -> tuple[int, int]:
        """What it can do, such as (9, 0)."""

    def new_stream(self, gpu: int, /) -> Stream:
        """Another stream."""

    def current_stream(self, gpu: int, /) -> Stream:
        """Where torch puts work of this thread."""

    def on(self, stream: Stream, /) -> AbstractContextManager[object]:
        """Makes it, and its GPU, current."""

    def capturing(self) -> bool:
        """Is the current stream being captured into a graph?"""


@final
class CudaGpus:
    """torch's."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedOperationError("nccl", "start", "torch finds no GPU here; use engine 'shm' or 'gloo'")

    def of(self, tensor: Tensor) -> int:
        """Where a tensor is."""
        assert tensor.device.index is not None
        return tensor.device.index

    def current(self) -> int:
        """The one that is used unless another is named."""
        return torch.cuda.current_device()

    def device(self, gpu: int) -> torch.device:
        """What torch calls it."""
        return torch.device("cuda", gpu)

    def identity(self, gpu: int) -> str:
        """Its UUID."""
        return str(torch.cuda.get_device_properties(gpu).uuid)

    def capability(self, gpu: int) -> tuple[int, int]:
        """What it can do, such as (9, 0)."""
        return torch.cuda.get_device_capability(gpu)

    def new_stream(self, gpu: int) -> Stream:
        """One of high priority: others wait for what it does."""
        return cast(Stream, torch.cuda.Stream(gpu, priority=-1))  # type: ignore[no-untyped-call]

    def current_stream(self, gpu: int) -> Stream:
        """Where torch puts work of this thread."""
        return cast(Stream, torch.cuda.current_stream(gpu))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes it, and its GPU, current."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def capturing(self) -> bool:
        """Is the current stream being captured into a graph?"""
        return torch.cuda.is_current_stream_capturing()
