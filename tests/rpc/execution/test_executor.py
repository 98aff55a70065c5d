"""The executor starts as many threads as it needs, and ends them."""

import ctypes
import signal
import socket
import subprocess
import threading
from functools import partial

import pytest
from gradwire.rpc.execution import executor as executor_module
from gradwire.rpc.execution import poller
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.execution.poller import READABLE

from tests.remote_functions import wait_until

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


@pytest.fixture
def executor(monkeypatch):
    monkeypatch.setattr(executor_module, "IDLE_TIMEOUT_S", 0.1)
    made = Executor(2, "test-executor")
    yield made
    made.close(10)
    assert made.threads == 0
    wait_until(lambda: not threads_of("test-executor"))  # which end a moment later


def threads_of(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(f"{name}-") and "stalls" not in t.name]


def start_blocked_tasks(executor, count, *, declared=False):
    """Submits tasks that wait for the returned event, within `blocking` if the wait is to be declared.

    Returns:
        The event, and a semaphore that each task releases when it starts.
    """
    resume, started = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        started.release()
        if declared:
            with executor.blocking():
                assert resume.wait(30)
        else:
            assert resume.wait(30)

    for _ in range(count):
        executor.submit(wait)
    return resume, started


def test_no_more_threads_than_needed(executor):
    for _ in range(50):
        done = threading.Event()
        executor.submit(done.set)
        assert done.wait(60)
    # One more, if the thread that ran a task had to wait for a processor before it could take the next one.
    assert executor._started < 10
    wait_until(lambda: executor.threads <= 2)


@pytest.mark.parametrize("declared", [True, False])
def test_waiting_tasks_do_not_starve_others(executor, declared):
    resume, started = start_blocked_tasks(executor, 10, declared=declared)
    for _ in range(10):
        assert started.acquire(timeout=60)
    resume.set()


def test_a_task_that_waits_for_the_next_one():
    """Both tasks are queued before the only thread wakes up."""
    executor = Executor(1, "test-pair")
    for _ in range(100):
        resume, done = threading.Event(), threading.Event()

        def wait(resume=resume, done=done) -> None:
            if resume.wait(20):
                done.set()

        executor.submit(wait)
        executor.submit(resume.set)
        assert done.wait(60)
    assert executor.close(10)


def test_blocking_has_no_effect_on_other_threads(executor):
    with executor.blocking():
        done = threading.Event()
        executor.submit(done.set)
        assert done.wait(60)
    assert executor.threads == 2  # one ran the task, one waits for the next


def test_surplus_threads_end(executor):
    resume, started = start_blocked_tasks(executor, 8, declared=True)
    for _ in range(8):
        assert started.acquire(timeout=60)
    threads = threads_of("test-executor")
    assert len(threads) == executor.threads >= 8
    resume.set()
    wait_until(lambda: executor.threads <= 2)
    wait_until(lambda: sum(thread.is_alive() for thread in threads) <= 2)


def test_the_last_watcher_does_not_end(monkeypatch):
    """A function waits for the next message of a socket that its thread keeps, and the one watcher is surplus."""
    monkeypatch.setattr(executor_module, "MAX_WATCHERS", 1)
    monkeypatch.setattr(poller, "WATCH_FOR_S", 60.0)  # so that the thread that finds the socket busy watches
    executor = Executor(2, "test-watcher")
    blocked = [start_blocked_tasks(executor, 1, declared=True) for _ in range(3)]
    for _, started in blocked:
        assert started.acquire(timeout=30)
    is_watching, resume, is_running, done = (threading.Event() for _ in range(4))
    busy, busy_end = socket.socketpair()
    ours, theirs = socket.socketpair()

    def on_busy() -> bool:
        if executor.poller.is_busy:
            is_watching.set()
            assert resume.wait(30)
            return False
        return True

    def run_first() -> None:
        is_running.set()
        assert done.wait(30)

    def on_message() -> bool:
        executor.submit(run_first if ours.recv(1) == b"1" else done.set)
        return True

    with busy, busy_end, ours, theirs:
        busy_end.send(b"x")
        executor.watch(busy.fileno(), READABLE, on_busy)
        assert is_watching.wait(30)
        # The last one first, which does not stay: it would end if it found the others waiting.
        for count, (release, _) in enumerate(reversed(blocked), 2):
            release.set()
            wait_until(lambda count=count: executor.idle == count)
        executor.watch(ours.fileno(), READABLE, on_message)
        theirs.send(b"1")
        assert is_running.wait(30)
        resume.set()
        theirs.send(b"2")
        is_done = done.wait(10)
        done.set()
        assert executor.close(10)
    assert is_done


def start_tied_child() -> subprocess.Popen:
    """Starts a process that is killed when the calling thread ends, as those of torch.multiprocessing are."""
    libc = ctypes.CDLL(None)
    tie = partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    return subprocess.Popen(["/bin/sleep", "1000"], preexec_fn=tie)


def test_threads_stay_to_which_something_may_be_tied(monkeypatch):
    """The first ones, as many as may run at a time, and any other that has a child process."""
    monkeypatch.setattr(executor_module, "IDLE_TIMEOUT_S", 0.01)
    executor = Executor(4, "test-ties")
    together = threading.Barrier(9)
    children: list[subprocess.Popen] = []

    def numbers() -> set[int]:
        return {int(thread.name.rpartition("-")[2]) for thread in threads_of("test-ties")}

    def run() -> None:
        with executor.blocking():
            together.wait(60)
        if threading.current_thread().name in ("test-ties-6", "test-ties-8"):
            children.append(start_tied_child())
        with executor.blocking():
            together.wait(60)

    for _ in range(8):
        executor.submit(run)
    together.wait(60)
    together.wait(60)
    try:
        wait_until(lambda: numbers() == {1, 2, 3, 4, 6, 8})
        assert [child.poll() for child in children] == [None, None]
    finally:
        for child in children:
            child.kill()
            child.wait()
    wait_until(lambda: numbers() == {1, 2, 3, 4})
    done = threading.Event()
    executor.submit(done.set)
    assert done.wait(60)
    assert numbers() == {1, 2, 3, 4}
    assert executor.close(10)


def test_a_task_that_raises_is_logged_and_the_thread_goes_on(executor, caplog):
    def fail() -> None:
        raise ValueError("on purpose")

    executor.submit(fail)
    done = threading.Event()
    executor.submit(done.set)
    assert done.wait(60)
    assert executor.close(10)
    assert "on purpose" in caplog.text


def test_close_drops_what_is_queued():
    executor = Executor(1, "test-close")
    resume, started = start_blocked_tasks(executor, 1)
    assert started.acquire(timeout=60)
    ran = threading.Event()
    executor.submit(ran.set)
    assert not executor.close(0)
    resume.set()
    assert executor.close(10)
    assert not ran.is_set()
    executor.submit(ran.set)
    assert not ran.is_set()


def test_it_can_be_closed_from_one_of_its_threads():
    executor = Executor(2, "test-close-inside")
    result: list[bool] = []
    done = threading.Event()

    def close() -> None:
        result.append(executor.close(10))
        done.set()

    executor.submit(close)
    assert done.wait(60)
    assert result == [True]


def test_threads_are_woken_without_the_lock(executor, monkeypatch):
    """Whoever wakes a thread gives it the interpreter, and it needs the lock at once."""
    wake, could_lock = executor.poller.wake, []

    def take_the_lock_and_wake() -> None:
        could_lock.append(executor._lock.acquire(timeout=5))
        if could_lock[-1]:
            executor._lock.release()
        wake()

    executor.submit(lambda: None)  # starts a thread, which waits in epoll from then on
    wait_until(lambda: executor.idle)
    monkeypatch.setattr(executor.poller, "wake", take_the_lock_and_wake)
    done = threading.Event()
    executor.submit(done.set)
    assert done.wait(60)
    monkeypatch.undo()
    assert could_lock
    assert all(could_lock)


def test_what_the_last_call_of_a_task_submits_needs_no_other_thread(executor, monkeypatch):
    done, woken = threading.Event(), []

    def task() -> None:
        monkeypatch.setattr(executor.poller, "wake", lambda: woken.append(threading.current_thread().name))
        executor.call_last(lambda: executor.submit(done.set))

    for _ in range(2):  # so that two threads are there
        executor.submit(lambda: None)
    wait_until(lambda: executor.idle == 2)
    executor.submit(task)
    assert done.wait(60)
    monkeypatch.undo()
    assert not woken


@pytest.mark.parametrize("declared", [True, False])
def test_threads_are_bounded(monkeypatch, declared):
    """Beyond the bound tasks wait, while urgent ones, such as answers, still run."""
    monkeypatch.setattr(executor_module, "MAX_THREADS", 6)
    monkeypatch.setattr(executor_module, "STALL_TIMEOUT_S", 0.001)
    executor = Executor(2, "test-bound")
    hold = threading.Event()
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        if declared:
            with executor.blocking():
                assert hold.wait(20)
        else:
            assert hold.wait(20)
        ended.release()

    for _ in range(20):
        executor.submit(wait)
    for _ in range(6):
        assert begun.acquire(timeout=20)
    if not declared:
        wait_until(lambda: executor._extra == 6)  # it would have allowed two more
    urgent = threading.Event()
    executor.submit_urgent(urgent.set)
    assert urgent.wait(20)
    assert executor.queued == 14
    assert executor.threads <= 8  # one waits in epoll, another may have ended the urgent task
    hold.set()
    for _ in range(20):
        assert ended.acquire(timeout=20)
    assert executor.close(10)


def test_a_stall_detector_that_gets_no_thread_can_be_started_later(monkeypatch, caplog):
    executor = Executor(1, "test-no-thread")
    hold, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert hold.wait(60)

    executor.submit(wait)
    assert begun.wait(60)
    wait_until(lambda: executor.idle == 1)

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        executor.submit(ended.set)
    assert "cannot start the thread that finds stalled functions" in caplog.text
    executor.submit(ended.set)
    assert ended.wait(60)
    hold.set()
    assert executor.close(10)
