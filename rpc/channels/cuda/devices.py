"""What the segments of device memory of one agent share: the devices, and the work that waits for them."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import final

from ...contracts.options import RpcBackendOptions
from ...execution.executor import Executor
from ..base import SegmentLimit
from .runtime import DeviceRuntime
from .sending import FIRST_NUMBER, MAX_SEGMENTS
from .staging import DeviceStaging

__all__ = ["Devices"]

CLOSE_TIMEOUT_S = 5.0
"""Seconds that a closing agent waits until its segments are freed."""


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
