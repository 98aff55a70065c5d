"""Lanes run jobs in order, on whichever thread gets to them."""

import threading

import pytest
from gradwire.c10d.serial_queue import SerialQueue
from gradwire.c10d.work import GroupWork


def test_the_caller_that_waits_runs_the_job_itself():
    lane = SerialQueue("test")
    threads = []
    job = lane.put(lambda: threads.append(threading.current_thread()), now=True)
    job.wait(None)
    assert threads == [threading.current_thread()]
    lane.close()


def test_what_nobody_waits_for_runs_on_a_thread_of_its_own():
    lane = SerialQueue("test")
    ran = threading.Event()
    names = []
    job = lane.put(lambda: names.append(threading.current_thread().name), now=False)
    job.on_done(ran.set)
    assert ran.wait(10)
    assert names == ["test"]
    assert job.done()
    lane.close()
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_who_waits_with_a_limit_does_not_run_the_job_itself():
    lane = SerialQueue("test")
    go_on = threading.Event()
    threads = []

    def run() -> None:
        threads.append(threading.current_thread().name)
        go_on.wait(10)

    job = lane.put(run, now=True)
    with pytest.raises(TimeoutError):
        job.wait(0.01)
    go_on.set()
    job.wait(None)
    assert threads == ["test"]
    lane.close()


def test_a_lane_is_entered_only_when_nothing_is_on_it():
    lane = SerialQueue("test")
    assert lane.enter()
    assert not lane.enter()
    ran = threading.Event()
    lane.put(ran.set, now=True)
    lane.leave()  # and somebody else runs what has come
    assert ran.wait(10)
    lane.close()


def test_jobs_run_in_order_whoever_waits_for_which():
    lane = SerialQueue("test")
    order: list[int] = []
    jobs = [lane.put(lambda i=i: order.append(i), now=i % 3 == 0) for i in range(300)]
    waiters = [threading.Thread(target=job.wait, args=(None,)) for job in jobs[::7]]
    for waiter in waiters:
        waiter.start()
    jobs[-1].wait(None)
    for waiter in waiters:
        waiter.join()
    assert order == list(range(300))
    lane.close()


def test_a_waiter_for_a_later_job_gets_it_though_another_thread_runs_the_first():
    lane = SerialQueue("test")
    begun, go_on = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go_on.wait(10)

    first = lane.put(block, now=True)
    runner = threading.Thread(target=first.wait, args=(None,))
    runner.start()
    assert begun.wait(10)
    second = lane.put(lambda: 7, now=True)
    with pytest.raises(TimeoutError):
        second.wait(0.01)
    go_on.set()
    second.wait(None)
    assert second.source() == 7
    runner.join()
    lane.close()


def test_an_error_comes_to_everybody_who_waits_and_the_next_job_runs():
    lane = SerialQueue("test")

    def fail() -> None:
        raise KeyError("the reason")

    failing, after = lane.put(fail, now=True), lane.put(lambda: None, now=True)
    after.wait(None)
    for _ in range(2):
        with pytest.raises(KeyError, match="the reason"):
            failing.wait(None)
    lane.close()


def test_a_future_runs_callbacks_where_they_may_wait_for_the_lane():
    lane = SerialQueue("test")
    go_on = threading.Event()
    first = lane.put(lambda: go_on.wait(10) and None, now=False)
    work = GroupWork("first", ["value"], first)

    def then(future):
        second = lane.put(lambda: 3, now=True)
        second.wait(10)
        return future.wait(), second.source()

    result = work.get_future().then(then)
    go_on.set()
    assert result.wait() == (["value"], 3)
    for thread in threading.enumerate():
        if thread.name == "gradwire-work":
            thread.join()
    lane.close()


def test_a_failed_work_says_so_everywhere():
    lane = SerialQueue("test")

    def fail() -> None:
        raise ValueError("the reason")

    work = GroupWork("all_reduce", [], lane.put(fail, now=False))
    future = work.get_future()
    for wait in (work.wait, work.synchronize, work.result):
        with pytest.raises(ValueError, match="the reason"):
            wait()
    with pytest.raises(RuntimeError, match="ValueError: the reason"):  # torch's own, whatever a callback raises
        future.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    lane.close()
