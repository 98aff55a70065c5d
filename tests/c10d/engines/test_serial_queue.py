"""Serial queues run tasks in order, on whichever thread gets to them first."""

import threading

import pytest
from gradwire.c10d.engines.threads import SerialQueue
from gradwire.c10d.groups.work import GroupWork


def test_a_caller_that_waits_runs_the_task_itself():
    queue = SerialQueue("test")
    threads = []
    task = queue.submit(lambda: threads.append(threading.current_thread()), needs_thread=False)
    task.wait(None)
    assert threads == [threading.current_thread()]
    queue.close()


def test_a_task_without_a_waiter_runs_on_the_queues_thread():
    queue = SerialQueue("test")
    ran = threading.Event()
    names = []
    task = queue.submit(lambda: names.append(threading.current_thread().name), needs_thread=True)
    task.on_done(ran.set)
    assert ran.wait(60)
    assert names == ["test"]
    assert task.done()
    queue.close()
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_a_caller_that_waits_with_a_timeout_does_not_run_the_task():
    queue = SerialQueue("test")
    go_on = threading.Event()
    threads = []

    def run() -> None:
        threads.append(threading.current_thread().name)
        go_on.wait(60)

    task = queue.submit(run, needs_thread=False)
    with pytest.raises(TimeoutError):
        task.wait(0.01)
    go_on.set()
    task.wait(None)
    assert threads == ["test"]
    queue.close()


def test_only_an_empty_queue_can_be_acquired():
    queue = SerialQueue("test")
    assert queue.try_acquire()
    assert not queue.try_acquire()
    ran = threading.Event()
    queue.submit(ran.set, needs_thread=False)
    queue.release()  # the queue's thread runs the task submitted meanwhile
    assert ran.wait(60)
    queue.close()


def test_tasks_run_in_order_whichever_is_waited_for():
    queue = SerialQueue("test")
    order: list[int] = []
    tasks = [queue.submit(lambda i=i: order.append(i), needs_thread=bool(i % 3)) for i in range(300)]
    waiters = [threading.Thread(target=task.wait, args=(None,)) for task in tasks[::7]]
    for waiter in waiters:
        waiter.start()
    tasks[-1].wait(None)
    for waiter in waiters:
        waiter.join()
    assert order == list(range(300))
    queue.close()


def test_a_task_can_be_waited_for_while_another_thread_runs_the_first():
    queue = SerialQueue("test")
    begun, go_on = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go_on.wait(60)

    first = queue.submit(block, needs_thread=False)
    runner = threading.Thread(target=first.wait, args=(None,))
    runner.start()
    assert begun.wait(60)
    second = queue.submit(lambda: 7, needs_thread=False)
    with pytest.raises(TimeoutError):
        second.wait(0.01)
    go_on.set()
    second.wait(None)
    assert second.source() == 7
    runner.join()
    queue.close()


def test_an_error_reaches_every_waiter_and_the_next_task_runs():
    queue = SerialQueue("test")

    def fail() -> None:
        raise KeyError("the reason")

    failing, after = queue.submit(fail, needs_thread=False), queue.submit(lambda: None, needs_thread=False)
    after.wait(None)
    for _ in range(2):
        with pytest.raises(KeyError, match="the reason"):
            failing.wait(None)
    queue.close()


def test_callbacks_of_a_future_can_wait_for_the_queue():
    queue = SerialQueue("test")
    go_on = threading.Event()
    first = queue.submit(lambda: go_on.wait(60) and None, needs_thread=True)
    work = GroupWork("first", ["value"], first)

    def then(future):
        second = queue.submit(lambda: 3, needs_thread=False)
        second.wait(60)
        return future.wait(), second.source()

    result = work.get_future().then(then)
    go_on.set()
    assert result.wait() == (["value"], 3)
    for thread in threading.enumerate():
        if thread.name == "gradwire-work":
            thread.join()
    queue.close()


def test_a_failed_work_raises_its_error_everywhere():
    queue = SerialQueue("test")

    def fail() -> None:
        raise ValueError("the reason")

    work = GroupWork("all_reduce", [], queue.submit(fail, needs_thread=True))
    future = work.get_future()
    for wait in (work.wait, work.synchronize, work.result):
        with pytest.raises(ValueError, match="the reason"):
            wait()
    with pytest.raises(RuntimeError, match="ValueError: the reason"):  # raised by torch for an error in a callback
        future.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    queue.close()
