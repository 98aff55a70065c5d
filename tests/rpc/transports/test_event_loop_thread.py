"""Waits on the event loop's own thread."""

import queue
import threading
from collections.abc import Callable

from gradwire import rpc
from gradwire.errors import RpcError
from gradwire.rpc.contracts.agent import holder


def wait_for_event() -> str:
    _go_on.wait(20)
    return "done"


_go_on = threading.Event()


def test_waits_on_the_event_loop_raise(agents):
    """They would wait for themselves. What was called goes on, and other threads can wait for it."""
    a, b = agents(2)
    raised: queue.SimpleQueue[str] = queue.SimpleQueue()
    called: list[rpc.Future[str]] = []

    def wait(wait_here: Callable[[], object]) -> None:
        try:
            wait_here()
        except RpcError as error:
            raised.put(str(error))

    def call_and_wait() -> object:
        with holder.using(a):
            called.append(rpc.rpc_async(b.info, wait_for_event))
            return called[0].wait()

    def call_sync() -> object:
        with holder.using(a):
            return rpc.rpc_sync(b.info, len, ("abc",))

    def gather() -> object:
        with holder.using(a):
            return rpc.barrier()

    for wait_here in (call_and_wait, call_sync, gather):
        a._network.call_soon(wait, wait_here)
        assert "use rpc_async and add_done_callback" in raised.get(timeout=20).lower()
    _go_on.set()
    assert called[0].wait() == "done"
    done = threading.Event()
    a._network.call_soon(lambda: (called[0].wait(), done.set()))  # which does not wait
    assert done.wait(20)
