"""The shared memory of one agent: how much there is, and the segments that go to several workers."""

import asyncio
import threading
from collections.abc import Collection
from typing import final

from ...contracts.options import ChannelOptions
from ...execution.executor import Executor
from ..segment_limit import SegmentLimit
from .mapping import MAX_SEGMENTS
from .peer import PeerSegments, Unmapper
from .sending import Segment, SegmentPool

__all__ = ["SharedMemory"]


@final
class SharedMemory:
    """What the segments of one agent share. Safe to use from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor, options: ChannelOptions) -> None:
        self.options = options
        self._loop = loop
        self._unmapper = Unmapper(executor)
        self.limit = SegmentLimit(options.max_shared_bytes, MAX_SEGMENTS)
        self._lock = threading.Lock()
        """Guards `_pools`."""
        self._pools: dict[frozenset[PeerSegments], SegmentPool] = {}
        """Those of the segments that several workers receive, by receivers."""

    def new_segments(self) -> PeerSegments:
        """Returns the segments for a new socket to a worker."""
        return PeerSegments(self._loop, self.options, self.limit, self._unmapper)

    def pool_for(self, receivers: Collection[PeerSegments]) -> SegmentPool:
        """Returns the pool of the segments that exactly these receive."""
        key = frozenset(receivers)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = SegmentPool(self.limit, key)
                for each in key:
                    each.shared_pools = (*each.shared_pools, pool)
                    if not each.is_connected:  # since a moment ago: it may not know of this pool
                        self._unmapper.drop(pool.remove_receiver(each))
        if pool.spent:
            self.drop(pool.take_spent(), key)
        return pool

    def drop(self, segments: list[Segment], receivers: Collection[PeerSegments]) -> None:
        """Has segments unmapped, here and by their receivers."""
        numbers = [segment.number for segment in segments]
        for each in receivers:
            each.send_dropped(numbers)
        self._unmapper.drop(segments)

    def remove_idle(self) -> None:
        """Drops the free segments of the pools that were not used since the last call."""
        for receivers, pool in self._pools.copy().items():
            self.drop(pool.remove_idle(), receivers)
            if pool.close_if_empty():
                with self._lock:
                    del self._pools[receivers]
                    for each in receivers:
                        each.shared_pools = tuple(other for other in each.shared_pools if other is not pool)
