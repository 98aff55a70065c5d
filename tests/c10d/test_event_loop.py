"""The loop that stores and agents share."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from gradwire.c10d import TCPStore
from gradwire.c10d.addresses import format_address, is_loopback
from gradwire.c10d.event_loop import acquire_event_loop
from gradwire.errors import StoreError


async def current_thread() -> threading.Thread:
    return threading.current_thread()


def test_its_users_share_one_thread_that_ends_with_the_last():
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


def use_after_fork() -> int:
    """The exit status of a child that is forked while there is a loop, and uses one."""
    held = acquire_event_loop()
    child = os.fork()
    if child == 0:
        try:
            acquire_event_loop().run(current_thread(), 30)
        except TimeoutError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    held.run(current_thread())
    held.release()
    return status


def test_a_forked_process_starts_its_own(workers):
    assert workers(1)[0].run(use_after_fork) == 0


def test_it_refuses_to_wait_for_itself():
    held = acquire_event_loop()

    async def wait_for_oneself() -> None:
        held.run(current_thread())

    with pytest.raises(RuntimeError, match="cannot wait for the event loop"):
        held.run(wait_for_oneself())
    held.release()


def test_what_takes_too_long_is_cancelled():
    held = acquire_event_loop()
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        held.run(forever(), 0.01)
    assert cancelled.wait(60)
    held.release()


def test_tasks_end_with_the_loop():
    held = acquire_event_loop()
    started, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    held.spawn(forever())
    assert started.wait(60)
    held.release()
    assert ended.is_set()


def test_servers_come_and_go_in_many_threads():
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
