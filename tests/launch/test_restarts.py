"""`launch.spawn(..., restarts=N)` starts processes again that fail, as often as it may."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from gradwire import launch, rpc
from gradwire.errors import WorkerLostError
from gradwire.launch import Backoff, supervisor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.multiprocessing.spawn import ProcessException

from tests.interpreters import Program, have_ended
from tests.remote_functions import set_event, wait_for, wait_until

ENDS = {
    "raises": (ProcessRaisedException, "ValueError: the reason\nand more", "raised ValueError: the reason"),
    "raises from": (ProcessRaisedException, "KeyError: 'another'", "raised KeyError: 'another'"),
    "exits": (ProcessExitedException, "exit code 7", "exited with status 7"),
    "is killed": (ProcessExitedException, "SIGKILL", "was killed by SIGKILL"),
}
"""How a process may fail: the error of `spawn`, its text, and what the log says of a restart."""


def fail(how: str) -> None:
    match how:
        case "raises":
            raise ValueError("the reason\nand more")
        case "raises from":
            try:
                fail("raises")
            except ValueError as error:
                raise KeyError("another") from error
        case "exits":
            os._exit(7)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)


def restart_count() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fail_at_first(rank: int, folder: Path, how: str, times: int) -> None:
    """Rank 1 fails so many times. Each process leaves a file that says what its environment says of it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    (folder / f"{rank}-{restart_count()}").write_text(" ".join(os.environ[name] for name in names))
    if rank == 1 and restart_count() < times:
        fail(how)


def fail_always_but_one(rank: int, folder: Path, how: str) -> None:
    """Rank 1 fails whenever rank 0 runs. Each process leaves a file with its process id."""
    if rank:
        wait_until(lambda: (folder / "0-0").exists() and (folder / "0-0").read_text())
    (folder / f"{rank}-{restart_count()}").write_text(str(os.getpid()))
    if rank:
        fail(how)
    signal.pause()


def restarts_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what the launcher has logged; threads of other tests may have logged something, too."""
    return [record for record in caplog.records if record.name == supervisor.__name__]


def text_without_pid(record: logging.LogRecord) -> str:
    return re.sub(r"\(pid \d+\)", "(pid 0)", record.getMessage())


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_fails_is_started_again_under_its_rank(tmp_path, caplog, how):
    """The pauses in between double, up to the maximum."""
    backoff = Backoff(initial=0.01, maximum=0.03, reset_after=3600)
    started = (tmp_path, how, 4)
    launch.spawn(fail_at_first, 2, started, start_method="forkserver", restarts=4, backoff=backoff)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0-0": "0 0 2 4",
        **{f"1-{count}": "1 1 2 4" for count in range(5)},
    }
    *_, end = ENDS[how]
    assert [text_without_pid(record) for record in restarts_in(caplog)] == [
        f"process 1 (pid 0) {end}; it is started again in {pause} s (restart {number} of 4)"
        for number, pause in enumerate(["0.01", "0.02", "0.03", "0.03"], 1)
    ]


def test_the_traceback_is_logged_at_level_info(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    started = (tmp_path, "raises", 1)
    launch.spawn(fail_at_first, 2, started, start_method="forkserver", restarts=1, backoff=Backoff(initial=0))
    text = text_without_pid(restarts_in(caplog)[0])
    assert text.startswith("process 1 (pid 0) raised\nTraceback (most recent call last):\n")
    assert "in fail_at_first" in text
    assert text.endswith("ValueError: the reason\nand more")


@pytest.mark.parametrize("how", ENDS)
def test_one_that_fails_too_often_ends_the_others_with_its_error(tmp_path, how):
    error, text, _ = ENDS[how]
    options = {"start_method": "forkserver", "backoff": Backoff(initial=0), "grace_period": 0.1}
    with pytest.raises(error, match=text) as raised:
        launch.spawn(fail_always_but_one, 2, (tmp_path, how), restarts=2, **options)
    assert isinstance(raised.value, ProcessException)
    assert raised.value.error_index == 1
    pids = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert pids.keys() == {"0-0", "1-0", "1-1", "1-2"}
    assert raised.value.error_pid == pids["1-2"]
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]


def test_each_rank_has_restarts_of_its_own(tmp_path):
    options = {"start_method": "forkserver", "backoff": Backoff(initial=0)}
    launch.spawn(fail_once, 3, (tmp_path,), restarts=1, **options)
    assert {path.name for path in tmp_path.iterdir()} == {f"{rank}-{n}" for rank in range(3) for n in range(2)}


def fail_once(rank: int, folder: Path) -> None:
    (folder / f"{rank}-{restart_count()}").touch()
    if restart_count() == 0:
        fail("exits")


def test_pauses_begin_anew_after_a_long_run():
    backoff = Backoff(initial=2, maximum=10, reset_after=20)
    assert backoff.next_pause(None, ran=0) == 2
    assert [backoff.next_pause(previous, ran=20) for previous in (2, 4, 8, 10)] == [4, 8, 10, 10]
    assert backoff.next_pause(8, ran=20.1) == 2


@pytest.mark.parametrize(
    "options", [{"initial": -1}, {"initial": 31}, {"maximum": float("inf")}, {"reset_after": -1}]
)
def test_pauses_out_of_range_are_refused(options):
    (value,) = options.values()
    with pytest.raises(ValueError, match=f"{next(iter(options))}={value}"):
        Backoff(**options)


@pytest.mark.parametrize("restarts", [-1, True, 1.0, None])
def test_a_bad_number_of_restarts_is_refused(restarts):
    with pytest.raises(ValueError, match=f"restarts is {restarts}"):
        launch.spawn(fail_once, 1, restarts=restarts)


# Workers of a group.


def join(rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE"):  # so that the group is dynamic
        del os.environ[name]
    rpc.init_rpc(f"worker{rank}")


def lose_and_get_back(rank: int, folder: Path) -> None:
    """worker0 kills worker1 during a call, and calls the one that is started in its place."""
    join(rank)
    if rank:
        wait_for("end")
        rpc.shutdown()
        return
    events: SimpleQueue[str] = SimpleQueue()
    with (
        rpc.on_worker_joined(lambda worker: events.put(f"{worker.name} joins")) as joined,
        rpc.on_worker_left(lambda worker, _: events.put(f"{worker.name} leaves")),
    ):
        if "worker1" not in [worker.name for worker in joined.workers]:
            assert events.get(timeout=60) == "worker1 joins"
        first = rpc.rpc_sync("worker1", os.getpid)
        pending = rpc.rpc_async("worker1", wait_for, ("never",))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            pending.wait()
        assert [events.get(timeout=60) for _ in range(2)] == ["worker1 leaves", "worker1 joins"]
    assert rpc.rpc_sync("worker1", restart_count) == 1
    assert rpc.rpc_sync("worker1", os.getpid) != first
    rpc.rpc_sync("worker1", set_event, ("end",))
    (folder / f"{restart_count()}").touch()
    rpc.shutdown()


def test_callers_see_a_worker_come_back_into_a_dynamic_group(tmp_path):
    launch.spawn(lose_and_get_back, 2, (tmp_path,), start_method="forkserver", restarts=1)
    assert (tmp_path / "0").exists()  # worker0 has not been restarted


# The end of the launcher.


def announce(rank: int) -> None:
    if rank == 1 and restart_count() == 0:
        fail("is killed")
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.1)  # not signal.pause: the signal may come just before it


LAUNCHER = """
import signal
from gradwire import launch
from tests.launch.test_restarts import announce
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background programs ignore
launch.spawn(announce, 2, start_method="fork", restarts=3)
"""


@pytest.fixture
def launcher(python, tmp_path) -> Iterator[tuple[Program, list[psutil.Process]]]:
    """A launcher in a process group of its own, and its processes, one of which has been restarted."""
    reading, writing = os.pipe()
    with (
        open(reading) as printed,
        open(writing, "w") as output,
        (tmp_path / "errors").open("w") as errors,
        python.start("-c", LAUNCHER, stdout=output, stderr=errors) as program,
    ):
        output.close()
        yield program, [psutil.Process(int(printed.readline())) for _ in range(2)]


def test_all_processes_die_with_the_launcher(launcher):
    program, processes = launcher
    os.kill(program.pid, signal.SIGKILL)
    wait_until(lambda: have_ended(processes))


def test_ctrl_c_ends_all_processes(launcher, tmp_path):
    program, processes = launcher
    os.killpg(program.pid, signal.SIGINT)
    assert program.wait() == -signal.SIGINT
    wait_until(lambda: have_ended(processes))
    errors = (tmp_path / "errors").read_text()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("started again") == 1
