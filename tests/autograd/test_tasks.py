"""Autograd contexts of asyncio tasks and of what they start: each has its own, or that which it was made in."""

import asyncio
import gc
import weakref

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd.contexts import Context
from gradwire.rpc import aio

from tests.remote_functions import wait_until


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


async def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return await aio.call("worker1", torch.mul, (tensor, factor))


def gradient(context_id: int, output: torch.Tensor, of: torch.Tensor) -> list[float]:
    autograd.backward(context_id, [output.sum()])
    return autograd.get_gradients(context_id)[of].tolist()


def test_contexts_of_tasks_that_overlap_are_their_own(two_workers):
    a, _ = two_workers

    async def main() -> tuple[list[float], list[float]]:
        first_is_in, second_is_in, first_is_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> list[float]:
            x = leaf()
            with autograd.context() as context_id:
                first_is_in.set()
                await second_is_in.wait()
                found = gradient(context_id, await scaled(x, 10), x)
            first_is_done.set()
            return found

        async def second() -> list[float]:
            await first_is_in.wait()
            x = leaf()
            with autograd.context() as context_id:
                second_is_in.set()
                await first_is_done.wait()
                return gradient(context_id, await scaled(x, 20), x)

        return tuple(await asyncio.gather(first(), second()))

    assert a.run(lambda: asyncio.run(main())) == ([10, 10], [20, 20])


def test_a_task_without_a_context_is_in_none(two_workers):
    a, _ = two_workers

    async def main() -> bool:
        is_in, may_go_on = asyncio.Event(), asyncio.Event()

        async def with_context() -> None:
            with autograd.context():
                is_in.set()
                await may_go_on.wait()

        other = asyncio.create_task(with_context())
        await is_in.wait()
        result = await scaled(leaf(), 2)
        may_go_on.set()
        await other
        return result.is_leaf

    assert a.run(lambda: asyncio.run(main()))


async def by_task(x: torch.Tensor) -> torch.Tensor:
    return await asyncio.create_task(scaled(x, 3))


async def by_thread(x: torch.Tensor) -> torch.Tensor:
    return await asyncio.to_thread(rpc.rpc_sync, "worker1", torch.mul, (x, 3))


async def by_callback(x: torch.Tensor) -> torch.Tensor:
    first = rpc.rpc_async("worker1", torch.add, (torch.ones(2), 1))
    return await asyncio.to_thread(first.then(lambda _: rpc.rpc_sync("worker1", torch.mul, (x, 3))).wait)


@pytest.mark.parametrize("start", [by_task, by_thread, by_callback])
def test_what_is_started_inside_a_context_belongs_to_it(two_workers, start):
    a, _ = two_workers

    async def main() -> list[float]:
        x = leaf()
        with autograd.context() as context_id:
            return gradient(context_id, await start(x), x)

    assert a.run(lambda: asyncio.run(main())) == [3, 3]


def test_a_task_that_outlives_its_context_is_in_none(two_workers):
    a, _ = two_workers

    async def main() -> bool:
        has_ended = asyncio.Event()

        async def later() -> torch.Tensor:
            await has_ended.wait()
            return await scaled(leaf(), 2)

        with autograd.context():
            task = asyncio.create_task(later())
        has_ended.set()
        return (await task).is_leaf

    assert a.run(lambda: asyncio.run(main()))


def test_a_connection_that_begins_inside_a_context_does_not_keep_it(workers):
    """Its task would take it along, as those of a program do."""
    a, _ = workers.rpc(2)

    def check() -> None:
        with autograd.context():
            rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
            context = weakref.ref(Context.current())
        wait_until(lambda: gc.collect() is not None and context() is None)

    a.run(check)
