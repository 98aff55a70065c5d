"""What the channels of one agent share: its devices, copies to the host and back, and what frees segments."""

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch

from ...contracts.devices import DeviceBuffer, StartedCopy
from ...contracts.options import RpcBackendOptions
from ...execution.executor import Executor
from ..base import SegmentLimit
from .runtime import DeviceRuntime

__all__ = ["FIRST_NUMBER", "DeviceStaging", "Devices"]

MAX_SEGMENTS = 1024
"""Segments of one agent. Each has an event that is shared, of which a process can have some 20,000."""

FIRST_NUMBER = 1 << 62
"""Of the segments. Those of shared memory have smaller numbers, as both are given back in the same frames."""

MAX_DIRECT_BYTES = 64 << 10
"""Bytes of a message, at most, that are copied to the host without page-locked memory if the device is idle."""

LOOK_S = 3e-4
"""Seconds in which a thread looks again and again whether copies are complete, before it sleeps until they are."""

CLOSE_TIMEOUT_S = 5.0
"""Seconds that a closing agent waits until its segments are freed."""


@final
class DeviceStaging:
    """What all messages of one agent share. A DeviceReader. Safe to use from any thread."""

    def __init__(
        self,
        load: Callable[[], DeviceRuntime],
        blocking: Callable[[], AbstractContextManager[None]],
        max_pinned_bytes: int,
    ) -> None:
        """Loads no runtime before the first tensor is sent from a device or to one: many workers have no CUDA.

        `blocking` returns a context for waits on a thread that serves calls. Messages use so much page-locked
        memory at a time; the others use ordinary memory.
        """
        self._load = load
        self._blocking = blocking
        self._max_pinned_bytes = max_pinned_bytes
        self._lock = threading.Lock()
        self._runtime: DeviceRuntime | None = None
        self._pinned_bytes = 0
        self._returned: deque[int] = deque()
        """Bytes of pinned memory that is not used any more. Finalizers append to it, without a lock."""

    @property
    def runtime(self) -> DeviceRuntime:
        """The runtime, which is loaded when it is first needed. Raises DeviceError."""
        if self._runtime is None:
            with self._lock:
                if self._runtime is None:
                    self._runtime = self._load()
        return self._runtime

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory in use."""
        with self._lock:
            return self._count_returned()

    def to_host(self, elements: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies in the memory of the host: see DeviceWriter."""
        if sum(each.numel() for each in elements) <= MAX_DIRECT_BYTES and self._are_idle(elements):
            return [each.cpu() for each in elements]
        copies: list[StartedCopy] = []
        on_host: list[torch.Tensor] = []
        try:
            for each in elements:
                pinned = self._take_pinned(each.numel())
                if pinned is not None:
                    copies.append(self.runtime.start_copy(pinned, each))
                on_host.append(each.cpu() if pinned is None else pinned)
        finally:
            self.wait(copies)
        return on_host

    def to_device(
        self, source: torch.Tensor | DeviceBuffer, device: torch.device
    ) -> tuple[torch.Tensor, StartedCopy]:
        """Starts to copy elements to a device: see DeviceReader."""
        target = self.runtime.empty(device, len(source))
        if not isinstance(source, torch.Tensor):
            return target, source.copy_to(target)
        pinned = self._take_pinned(len(source))
        return target, self.runtime.start_copy(target, source if pinned is None else pinned.copy_(source))

    def wait(self, copies: Sequence[StartedCopy]) -> None:
        """Waits for copies; on a thread that serves calls, another one takes its place if that takes long."""
        end = time.monotonic() + LOOK_S
        left = [copy for copy in copies if not copy.is_complete()]
        while left and time.monotonic() < end:
            os.sched_yield()
            left = [copy for copy in left if not copy.is_complete()]
        if left:
            with self._blocking():
                for copy in left:
                    copy.wait()

    def _are_idle(self, elements: Sequence[torch.Tensor]) -> bool:
        return all(map(self.runtime.is_idle, {each.device for each in elements}))

    def _take_pinned(self, nbytes: int) -> torch.Tensor | None:
        """Returns page-locked memory, which counts as long as something refers to it; None beyond the limit."""
        size = 1 << (nbytes - 1).bit_length()  # which the runtime allocates
        with self._lock:
            if self._count_returned() + size > self._max_pinned_bytes:
                return None
            self._pinned_bytes += size
        try:
            pinned = self.runtime.pinned(nbytes)
        except RuntimeError:  # the system has a limit of its own
            self._returned.append(size)
            return None
        # An array, because all views of its memory refer to it, and tensors as well.
        array = pinned.numpy()
        weakref.finalize(array, self._returned.append, size).atexit = False
        return torch.from_numpy(array)

    def _count_returned(self) -> int:
        """Returns the bytes in use. Called with the lock."""
        while self._returned:
            self._pinned_bytes -= self._returned.popleft()
        return self._pinned_bytes


@final
class Devices:
    """The CUDA devices of this process, and what frees their memory. Does nothing with CUDA before it is used."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        options: RpcBackendOptions,
        load: Callable[[], DeviceRuntime],
    ) -> None:
        """Does nothing with CUDA yet. `load` returns the runtime of the devices; see DeviceStaging."""
        self.staging = DeviceStaging(load, executor.blocking, options.cuda.max_pinned_bytes)
        self.channels = options.channels
        self.options = options.cuda
        self.limit = SegmentLimit(options.cuda.max_ipc_bytes, MAX_SEGMENTS, FIRST_NUMBER)
        self.executor = executor
        self.is_closed = False
        self._loop = loop
        self._freeing: set[asyncio.Future[None]] = set()

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a task on a thread of the executor. Called on any thread, also by finalizers."""
        self.call_soon(self._start, task)

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Calls a function on the loop, unless that has ended. Called on any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _start(self, task: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._freeing.add(done)
        done.add_done_callback(self._freeing.discard)
        self.executor.submit_urgent(self._run, task, done)

    def _run(self, task: Callable[[], None], done: "asyncio.Future[None]") -> None:
        try:
            task()
        finally:
            self.call_soon(done.cancel)

    async def close(self) -> None:
        """Waits until what the channels have dropped is freed."""
        await asyncio.sleep(0)  # what has been submitted begins
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=CLOSE_TIMEOUT_S)
