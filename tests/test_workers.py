"""The worker processes of the other tests: tests/workers.py."""

import os
import sys

import psutil
import pytest

from tests.interpreters import Python
from tests.remote_functions import wait_until
from tests.servers import Servers
from tests.workers import WorkerDiedError


def fail() -> None:
    raise LookupError("on purpose")


def test_a_worker_runs_functions_in_its_own_process(workers):
    a, b = workers(2)
    assert len({os.getpid(), a.run(os.getpid), b.run(os.getpid)}) == 3


def test_work_goes_on_while_the_test_does(workers, tmp_path):
    (a,) = workers(1)
    os.mkfifo(tmp_path / "gate")

    def wait_for_the_gate() -> str:
        return (tmp_path / "gate").read_text()

    pending = a.start(wait_for_the_gate)
    assert not pending.done()
    (tmp_path / "gate").write_text("open")
    assert pending.result() == "open"


def test_an_exception_keeps_its_type_and_brings_its_traceback(workers):
    (a,) = workers(1)
    with pytest.raises(LookupError, match="on purpose") as caught:
        a.run(fail)
    assert "in fail" in caught.value.__notes__[0]


def raise_attribute_error() -> None:
    raise AttributeError("there is no such function")


class Vanished:
    """As a function that was renamed after the test began: it cannot be found where it is unpickled."""

    def __reduce__(self):
        return raise_attribute_error, ()


def test_what_cannot_be_unpickled_fails_at_once(workers):
    (a,) = workers(1)
    with pytest.raises(AttributeError, match="no such function"):
        a.run(print, Vanished())
    assert a.run(os.getpid) == a.pid


def test_a_dead_worker_is_reported(workers):
    (a,) = workers(1)
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        a.run(os._exit, 3)


def test_output_and_stacks_are_described(workers):
    (a,) = workers(1)
    a.run(print, "hello from the worker")
    assert "hello from the worker" in a.describe()
    wait_until(lambda: "_worker_main" in a.describe())  # faulthandler writes line by line


def test_workers_and_programs_are_forked_from_two_processes_for_all_of_the_run(workers, python):
    first, second = (psutil.Process(worker.pid).ppid() for worker in workers(2))
    programs = int(python.run("-c", "import os; print(os.getppid())").stdout)
    assert first == second
    assert psutil.Process(first).ppid() == programs


def test_these_processes_end_when_nobody_uses_them(python, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(python.executable))  # which has torch loaded
    servers = Servers.start()
    own = Python(servers)
    assert own.run("-c", "print(6 * 7)").stdout == "42\n"
    own.close()
    assert servers.folder.exists()
    servers.close()
    wait_until(lambda: not servers.folder.exists())
