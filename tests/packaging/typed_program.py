"""A page of a user's program for test_types.py, which compares what mypy says of it with the comments.

It is never run.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import torch
from gradwire import autograd, rpc
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer
from gradwire.rpc import aio
from torch import Tensor, nn


class Server:
    def __init__(self, features: int, name: str = "server") -> None:
        self.name = name

    def lookup(self, rows: list[int]) -> Tensor:
        return torch.ones(len(rows))

    @staticmethod
    def version() -> str:
        return "1"

    @classmethod
    def small(cls, features: int) -> "Server":
        return cls(features)


def scale(value: Tensor, factor: float = 2.0) -> Tensor:
    return value * factor


def describe(name: str, *, loud: bool) -> str:
    return name.upper() if loud else name


def total(*numbers: int) -> int:
    return sum(numbers)


def hello() -> str:
    return "hello"


def first(items: list[float]) -> float:
    return items[0]


def count(stop: int) -> Iterator[int]:
    yield from range(stop)


async def ticks(seconds: float) -> AsyncIterator[str]:
    yield "tick"


@rpc.functions.async_execution
def add_later(to: str, x: Tensor, y: Tensor) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: future.wait() * 2)


x, y = torch.ones(3), torch.ones(3)

# Results of calls.
assert_type(rpc.rpc_sync("worker1", scale, (x,)), Tensor)
assert_type(rpc.rpc_sync("worker1", scale, (x, 3.0), timeout=5), Tensor)
assert_type(rpc.rpc_sync(1, scale, [x, 3.0]), Tensor)
assert_type(rpc.rpc_sync("worker1", scale, (x,), {"factor": 3.0}), Tensor)
assert_type(rpc.rpc_sync("worker1", scale, kwargs={"value": x}), Tensor)
assert_type(rpc.rpc_sync("worker1", hello), str)
assert_type(rpc.rpc_sync("worker1", total, (1, 2, 3)), int)
assert_type(rpc.rpc_sync("worker1", describe, ("a",), {"loud": True}), str)
assert_type(rpc.rpc_sync("worker1", torch.add, (x, y)), Tensor)
assert_type(rpc.rpc_sync("worker1", torch.ones, (3,), {"requires_grad": True}), Tensor)
assert_type(rpc.rpc_sync("worker1", Server.version), str)
assert_type(rpc.rpc_sync(rpc.get_worker_info("worker1"), Server.small, (3,)), Server)
assert_type(rpc.rpc_sync("worker1", add_later, ("worker2", x, y)), Tensor)

# Wrong arguments.
rpc.rpc_sync("worker1", scale, ("x",))  # error: arg-type
rpc.rpc_sync("worker1", scale)  # error: arg-type
rpc.rpc_sync("worker1", scale, (x, 1.0, 2.0))  # error: arg-type
rpc.rpc_sync("worker1", hello, (1,))  # error: arg-type
rpc.rpc_sync("worker1", total, (1, "2"))  # error: arg-type
rpc.rpc_sync("worker1", torch.add, (x, "y"))  # error: arg-type
rpc.rpc_sync("worker1", add_later, ("worker2", x))  # error: arg-type
rpc.rpc_sync("worker1", "scale", (x,))  # error: call-overload
rpc.rpc_sync("worker1", scale, x)  # error: call-overload
rpc.rpc_sync(1.5, scale, (x,))  # error: call-overload
rpc.rpc_sync("worker1", scale, (x,), timeout="5")  # error: call-overload
rpc.rpc_async("worker1", scale, ("x",))  # error: arg-type
rpc.remote("worker1", Server, ("x",))  # error: arg-type
rpc.remote("worker1", nn.Linear, (3, "x"))  # error: arg-type
rpc.broadcast_call(["worker1"], scale, ("x",))  # error: arg-type
rpc.rpc_stream("worker1", count, ("x",))  # error: arg-type
rpc.rpc_stream("worker1", hello, (1,))  # error: arg-type
answer: int = rpc.rpc_sync("worker1", scale, (x,))  # error: assignment

# Futures.
future = rpc.rpc_async("worker1", scale, (x,))
assert_type(future, rpc.Future[Tensor])
assert_type(future.wait(), Tensor)
assert_type(future.value(), Tensor)
assert_type(future.then(lambda done: done.value().shape), torch.futures.Future[torch.Size])
assert_type([each.wait() for each in rpc.broadcast_call(["worker1", "worker2"], hello)], list[str])
future.wait().no_such_method()  # error: attr-defined

# References.
server = rpc.remote("worker1", Server, (3,))
assert_type(server, rpc.RRef[Server])
assert_type(server.to_here(), Server)
assert_type(server.local_value().name, str)
assert_type(server.rpc_sync().lookup([1]), Tensor)
server.rpc_sync().lookup("rows")  # error: arg-type
server.rpc_sync().look([1])  # error: attr-defined
assert_type(server.rpc_async().lookup([1]), rpc.Future[Any])
assert_type(server.remote().lookup([1]), rpc.RRef[Any])
assert_type(rpc.RRef(x).to_here(), Tensor)
linear: rpc.RRef[nn.Module] = rpc.remote("worker1", nn.Linear, (3, 4))
assert_type(rpc.remote("worker1", torch.ones, (3,)).to_here(timeout=3), Tensor)


def forward(layer: rpc.RRef[nn.Linear], value: rpc.RRef[Tensor]) -> Tensor:
    result: Tensor = layer.local_value()(value.to_here())
    return result


rpc.rpc_sync("worker1", forward, (rpc.remote("worker1", nn.Linear, (3, 4)), rpc.RRef(x)))
rpc.rpc_sync("worker1", forward, (server, rpc.RRef(x)))  # error: arg-type

# Streams and asyncio.
assert_type(list(rpc.rpc_stream("worker1", count, (3,))), list[int])
with rpc.rpc_stream("worker1", count, (3,), window=1024) as numbers:
    assert_type(next(numbers), int)


async def main() -> None:
    assert_type(await rpc.rpc_async("worker1", scale, (x,)), Tensor)
    assert_type(await aio.call("worker1", hello), str)
    await aio.call("worker1", scale, ("x",))  # error: arg-type
    assert_type(await server.to_here_async(), Server)
    assert_type(await aio.wait(future.then(lambda done: done.value().numel())), int)
    async with rpc.rpc_stream("worker1", ticks, (1.0,)) as stream:
        async for tick in stream:
            assert_type(tick, str)
    async for event in aio.worker_events():
        if isinstance(event, rpc.WorkerLeft):
            assert_type(event.reason, str)


asyncio.run(main())

# The group.
assert_type(rpc.all_gather(1), dict[str, int])
assert_type(rpc.get_worker_infos(), list[rpc.WorkerInfo])
rpc.on_worker_joined(lambda worker: print(worker.name)).remove()
rpc.on_worker_left(lambda worker: None)  # error: arg-type, misc


def log_loss(worker: rpc.WorkerInfo, reason: str) -> None:
    print(worker.name, reason)


with rpc.on_worker_left(log_loss) as handle:
    assert_type(handle.workers, tuple[rpc.WorkerInfo, ...])

# What takes any call hands it on.
Function = Callable[..., Any]


def retry(to: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    return rpc.rpc_sync(to, function, args, kwargs)


# Training.
remote_layer = RemoteModule("worker1/cpu", nn.Linear, (3, 4))
optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(x)], lr=0.1)
with autograd.context() as context_id:
    assert_type(context_id, int)
    autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, (x,)).sum()])
    optimizer.step(context_id)
