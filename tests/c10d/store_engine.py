"""An engine of a third party that moves all data through the group's store: slow, but short."""

import time
from collections.abc import Sequence

import torch
from gradwire.c10d import register_engine
from gradwire.c10d.engines import Engine, Setup
from gradwire.c10d.engines.reductions import Reduction, combine_all, prepared
from gradwire.errors import CollectiveMismatchError, CollectiveTimeoutError, ProcessGroupError
from torch import Tensor


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def copy_bytes(data: bytes, tensor: Tensor) -> None:
    if len(data) != tensor.nbytes:
        raise ProcessGroupError(f"a rank has sent {len(data)} bytes for a tensor of {tensor.nbytes}")
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class StoreEngine(Engine):
    name = "store"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.store, self.global_ranks = setup.store, setup.global_ranks
        self.round = 0
        self.message_counts: dict[tuple[int, int, int], int] = {}

    def wait(self, keys: list[str], timeout: float) -> None:
        """Waits until all keys are set, or the group has failed."""
        deadline = time.monotonic() + timeout
        while self.failure is None and not self.store.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.store.check([key])]
                raise CollectiveTimeoutError("an operation", timeout, f"what other ranks set: {missing}")
            time.sleep(0.001)
        self.raise_if_failed()

    def exchange(self, call: str, data: bytes, timeout: float) -> list[bytes]:
        """Returns the data of all ranks, in the order of ranks, if all of them make the same call."""
        self.round += 1
        self.store.set(f"{self.round}/{self.rank}", call.encode() + b"\n" + data)
        if self.round > 2:  # all have read it: else they would not have set what the last round has waited for
            self.store.delete_key(f"{self.round - 2}/{self.rank}")
        keys = [f"{self.round}/{rank}" for rank in range(self.size)]
        self.wait(keys, timeout)
        calls, found = zip(*(self.store.get(key).split(b"\n", 1) for key in keys), strict=True)
        if others := [self.global_ranks[rank] for rank, each in enumerate(calls) if each != calls[self.rank]]:
            raise CollectiveMismatchError(others, f"ranks {others} do not call {call}, as rank {self.rank} does")
        return list(found)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> None:
        for output, data in zip(outputs, self.exchange("all_gather", to_bytes(tensor), timeout), strict=True):
            copy_bytes(data, output)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> None:
        call = f"all_reduce {reduction.name} {tensor.dtype} {tensor.numel()}"
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        for part, data in zip(
            parts, self.exchange(call, to_bytes(prepared(reduction, tensor)), timeout), strict=True
        ):
            copy_bytes(data, part)
        combine_all(reduction, parts, tensor)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        data = to_bytes(tensor) if self.rank == root else b""
        copy_bytes(self.exchange(f"broadcast {root} {tensor.nbytes}", data, timeout)[root], tensor)

    def barrier(self, timeout: float) -> None:
        self.exchange("barrier", b"", timeout)

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> None:
        self.store.set(self.message_key(self.rank, peer, tag), to_bytes(tensor))

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> int:
        if peer is None:
            raise self.unsupported("recv from any rank")
        key = self.message_key(peer, self.rank, tag)
        self.wait([key], timeout)
        copy_bytes(self.store.get(key), tensor)
        return peer

    def message_key(self, source: int, target: int, tag: int) -> str:
        """Returns the key of the next message with this tag from one rank to another."""
        route = (source, target, tag)
        number = self.message_counts[route] = self.message_counts.get(route, 0) + 1
        return f"{source}/{target}/{tag}/{number}"


register_engine("slow_store", StoreEngine, devices=["cpu"])
