"""Generators that the tests of streams run on other workers."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import torch
from gradwire import rpc

from tests.remote_functions import event, identity, wait_for

advanced = 0
"""The number of times that the generators of this worker have been advanced."""


def count_to(stop: int) -> Iterator[int]:
    yield from range(stop)


def all_kinds() -> Iterator[Any]:
    for size in (0, 1, 1000, 100_000, 3_000_000):
        yield torch.full((size,), float(size))
        yield {"size": size, "pair": [torch.arange(3), torch.arange(size)]}
    yield rpc.RRef("kept at the producer")
    yield None


def fail_after(items: int) -> Iterator[int]:
    yield from range(items)
    raise LookupError("no more of these")


def watched(name: str, items: int = 1 << 30, nbytes: int = 8) -> Iterator[torch.Tensor]:
    """Yields tensors, and sets an event when it is closed."""
    global advanced
    try:
        for _ in range(items):
            advanced += 1
            yield torch.zeros(nbytes, dtype=torch.uint8)
    finally:
        event(name).set()


def times_advanced() -> int:
    return advanced


def waits(name: str) -> Iterator[str]:
    yield wait_for(name)


def waits_between(name: str) -> Iterator[str]:
    yield "first"
    yield wait_for(name)


def after_event(name: str, items: int, nbytes: int) -> Iterator[bytes]:
    """Yields nothing at once, and items of this size after an event."""
    yield b""
    wait_for(name)
    for _ in range(items):
        yield bytes(nbytes)


def opens_late(name: str) -> Iterator[int]:
    """Returns an iterator only after an event."""
    wait_for(name)
    return iter(range(10))


def wait_for_event(name: str) -> bool:
    return event(name).wait(20)


class Untransportable:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return complain, ()


def complain() -> None:
    raise ValueError("cannot be made again")


def yields_an_item_that_does_not_unpickle() -> Iterator[Any]:
    yield 1
    yield Untransportable()
    yield 3


def yields_an_item_that_does_not_pickle() -> Iterator[Any]:
    yield 1
    yield {"lock": threading.Lock()}


async def count_slowly(stop: int, name: str = "closed") -> AsyncIterator[int]:
    try:
        for i in range(stop):
            await asyncio.sleep(0)
            yield await rpc.rpc_async(rpc.get_worker_info(), identity, (i,))
    finally:
        event(name).set()


def squares(n: int) -> Iterator[int]:
    return map(int.__mul__, range(n), range(n))


def scaled(weight: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for i in range(1, count + 1):
        yield weight * i


def relay(items: int) -> Iterator[int]:
    """Yields the items of a stream from the worker that consumes this one."""
    with rpc.rpc_stream(1 - rpc.get_worker_info().id, count_to, (items,), window_items=3) as source:
        for item in source:
            yield item + 1


def references(count: int) -> Iterator[rpc.RRef]:
    for i in range(count):
        yield rpc.RRef(i)


def random_items(seed: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    chance = random.Random(seed)
    for i in range(count):
        yield i, torch.full((chance.choice([0, 1, 999, 1000, 2500, 2501, 50_000]),), i, dtype=torch.uint8)


def large_items(total: int, nbytes: int) -> Iterator[dict[str, Any]]:
    """Yields tensors with the bytes outstanding at the producer when each is made, and its memory in use."""
    process = psutil.Process()
    for i in range(total // nbytes):
        buffered = rpc.debug_info()["stream_bytes_sent"]
        tensor = torch.full((nbytes,), i % 251, dtype=torch.uint8)
        yield {"tensor": tensor, "buffered": buffered, "rss": process.memory_info().rss}
