"""Calls for asyncio programs.

    result = await aio.call("worker1", torch.add, (a, b))
    first, second = await asyncio.gather(rpc.rpc_async("worker1", f), rpc.rpc_async("worker2", f))
    value = await rref.to_here_async()
    async with rpc.rpc_stream("worker1", read, (path,)) as items:
        async for item in items: ...

The futures of calls are awaitable as they are, in any event loop. Cancelling the task that awaits one cancels
the call, as `future.cancel()` does; `asyncio.shield` keeps it from that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .agent import Destination
from .calls import UNSET_RPC_TIMEOUT, rpc_async
from .futures import wait_in_loop

__all__ = ["call", "wait"]


async def call(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs a function on a worker and returns its result. Takes and raises what `rpc_async` does.

    Cancelling it cancels the call: see `Future.cancel`.
    """
    return await rpc_async(to, func, args, kwargs, timeout)


async def wait(future: torch.futures.Future[Any]) -> Any:
    """Waits for any torch future, such as one that `then` or `collect_all` has made.

    Returns:
        Its result; its exception is raised.

    Cancelling the wait cancels the call if the future is that of one, and nothing otherwise.
    """
    return await wait_in_loop(future)
