"""Sends one request to several workers, and its bytes as seldom as possible."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

from ..channels.broadcast import Broadcasts
from ..contracts.devices import Device, DeviceMap
from ..contracts.messages import Request
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly
from ..execution.futures import Future
from ..peers.flow_control import has_event_loop
from ..peers.peer import Peer
from ..transports.base import Connecting
from ..wire.pickling import Packed
from ..wire.tensor_memory import make_sendable
from ..wire.tensors import bytes_of
from .call import CallParts
from .caller import Caller
from .codec import Codec

__all__ = ["MultiSender"]

CONNECT_TIMEOUT_S = 2.0
"""Seconds to wait for connections to workers of this host, before large payloads go to them one by one."""


@final
class MultiSender:
    """Sends requests to several workers."""

    def __init__(self, parts: CallParts, caller: Caller, codec: Codec, broadcasts: Broadcasts) -> None:
        """Sends nothing yet."""
        self._caller = caller
        self._codec = codec
        self._broadcasts = broadcasts
        self._peers, self._extensions, self._executor = parts.peers, parts.extensions, parts.executor
        self._timed_out: set[Connecting] = set()
        """The connections that were not made within CONNECT_TIMEOUT_S."""

    def send_all(
        self,
        workers: Sequence[WorkerInfo],
        request: Request,
        timeout: float,
        around: Callable[[WorkerInfo], contextlib.AbstractContextManager[None]],
    ) -> list[Future[Any]]:
        """Sends a request to several workers: see `RpcAgent.request_all`."""
        packed = self._pack_all(workers, request)
        broadcast = None
        if packed and all(each is packed[0] for each in packed):
            of_all, _ = packed[0]
            if self._broadcasts.suits(len(workers), len(of_all.body) + bytes_of(of_all.tensors)):
                peers = [self._peers.of(worker) for worker in workers]
                self._connect(peers)
                broadcast = self._broadcasts.broadcast([peer.channels for peer in peers if peer.absence is None])
            if broadcast is not None:
                of_all.tensors[:] = map(make_sendable, of_all.tensors)
                request = replace(request, keep=broadcast)

        def send(worker: WorkerInfo, packed: Packed, device_map: DeviceMap) -> Future[Any]:
            """Sends the request to one of the workers; an error fails this future only."""
            with around(worker):
                try:
                    body, tensors, references, leaves = packed
                    own = Packed((body, [*tensors], references, leaves))  # extensions replace some tensors in it
                    return self._caller.send_packed(worker, request, timeout, own, device_map, broadcast)
                except Exception as error:
                    operation = self._extensions.handlers[request.kind].operation
                    future: Future[Any] = Future(self._executor, None, worker.name, operation)
                    future.set_exception(error)
                    return future

        try:
            # In the order of ids: calls that wait for capacity hold back the broadcast that they take part in.
            in_order = sorted(zip(workers, packed, strict=True), key=lambda each: each[0].wire_id)
            sent = {worker.wire_id: send(worker, *each) for worker, each in in_order}
            return [sent[worker.wire_id] for worker in workers]
        finally:
            if broadcast is not None:
                broadcast.release()

    def _connect(self, peers: Sequence[Peer]) -> None:
        """Connects to the workers of this host that can share memory then, and waits for that, once for each.

        Does nothing on a thread that runs an event loop.
        """
        unconnected = self._broadcasts.unconnected([peer.channels for peer in peers])
        if not unconnected or has_event_loop():
            return
        connecting = {peer.transport.connect() for peer in peers if peer.channels in unconnected}
        with self._executor.blocking():
            connecting -= self._timed_out
            waited = wait_interruptibly(concurrent.futures.wait, connecting, CONNECT_TIMEOUT_S)
            self._timed_out |= waited.not_done

    def _pack_all(self, workers: Sequence[WorkerInfo], request: Request) -> list[tuple[Packed, DeviceMap]]:
        """Pickles a request for several workers: once for each device map."""
        by_map: dict[frozenset[tuple[Device, Device]], tuple[Packed, DeviceMap]] = {}
        packed = []
        for worker in workers:
            device_map = self._codec.device_map(worker)
            key = frozenset(device_map.items())
            if key not in by_map:
                by_map[key] = self._codec.pack_request(request, worker, device_map), device_map
            packed.append(by_map[key])
        return packed
