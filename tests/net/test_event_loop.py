"""The event loop that stores and agents share."""

import asyncio
import contextvars
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from gradwire.c10d import TCPStore
from gradwire.errors import StoreError
from gradwire.net.addresses import format_address, is_loopback
from gradwire.net.event_loop import acquire_event_loop


async def current_thread() -> threading.Thread:
    return threading.current_thread()


def test_users_share_one_thread_that_ends_with_the_last_release():
    first, second = acquire_event_loop(), acquire_event_loop()
    thread = first.run(current_thread())
    assert second.run(current_thread()) is thread
    first.release()
    first.release()
    assert second.run(current_thread()) is thread
    second.release()
    assert not thread.is_alive()
    third = acquire_event_loop()
    assert third.run(current_thread()) is not thread
    third.release()


async def find_variable() -> str:
    return _variable.get()


_variable = contextvars.ContextVar("_variable", default="that of no thread")


def test_tasks_take_no_context_variables_along_unless_they_are_given():
    loop = acquire_event_loop()
    given = contextvars.Context()

    async def set_in_given() -> None:
        await asyncio.get_running_loop().create_task(set_variable(), context=given)

    async def set_variable() -> None:
        _variable.set("in the given context")

    before = _variable.set("that of the calling thread")
    try:
        assert loop.run(find_variable()) == "that of no thread"
        loop.run(set_in_given())
        assert given[_variable] == "in the given context"
    finally:
        _variable.reset(before)
        loop.release()


def use_after_fork() -> int:
    """Returns the exit status of a child that is forked while the loop runs, and uses the loop too."""
    loop = acquire_event_loop()
    child = os.fork()
    if child == 0:
        try:
            acquire_event_loop().run(current_thread(), 30)
        except TimeoutError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    loop.run(current_thread())
    loop.release()
    return status


def test_a_forked_process_starts_its_own_loop(workers):
    assert workers(1)[0].run(use_after_fork) == 0


def test_the_loops_own_thread_cannot_wait_for_it():
    loop = acquire_event_loop()

    async def wait_for_oneself() -> None:
        loop.run(current_thread())

    with pytest.raises(RuntimeError, match="cannot wait for the event loop"):
        loop.run(wait_for_oneself())
    loop.release()


def test_a_coroutine_that_times_out_is_cancelled():
    loop = acquire_event_loop()
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        loop.run(forever(), 0.01)
    assert cancelled.wait(60)
    loop.release()


def test_tasks_end_with_the_loop():
    loop = acquire_event_loop()
    started, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop.spawn(forever())
    assert started.wait(60)
    loop.release()
    assert ended.is_set()


def test_servers_start_and_stop_on_many_threads():
    def host(_: int) -> None:
        for _ in range(5):
            with TCPStore("127.0.0.1", 0, is_master=True) as master:
                with TCPStore("127.0.0.1", master.port) as client:
                    client.set("key", "value")
                assert master.get("key") == b"value"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(host, range(4)))


def test_addresses():
    assert format_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert format_address("::1", 1) == "[::1]:1"
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "8.8.8.8"))
    with pytest.raises(StoreError, match="cannot be resolved"):
        is_loopback("a" * 64 + ".invalid")
