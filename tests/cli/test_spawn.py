"""`gradwire spawn` starts processes of a program, names their lines, restarts them, and ends them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from gradwire.cli.group import gradwire

from tests.interpreters import Program, have_ended
from tests.remote_functions import wait_until

PROGRAM = """
import os, pathlib, signal, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
name, size = os.environ["GRADWIRE_WORKER_NAME"], os.environ["WORLD_SIZE"]
print(name, rank, size, restart, sys.argv[1:])
sys.stderr.write("half a line")
began = pathlib.Path(__file__).with_name("began")
if "fail" in sys.argv and rank == "1":
    while not began.exists():
        time.sleep(0.01)
    sys.exit(7)
if "die once" in sys.argv and rank == "1" and restart == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if "wait" in sys.argv:
    began.touch()
    print(os.getpid())
    signal.pause()
"""


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_lines_have_names_and_a_process_that_dies_is_started_again(python, program):
    options = ["--restarts", 1, "--names", "server,trainer"]
    done = python.run("-m", "gradwire", "spawn", *options, 2, program, "die once", "-x")
    assert done.returncode == 0, done.stderr
    arguments = "['die once', '-x']"
    assert sorted(done.stdout.splitlines()) == [
        f"[server] server 0 2 0 {arguments}",
        f"[trainer] trainer 1 2 0 {arguments}",
        f"[trainer] trainer 1 2 1 {arguments}",
    ]
    assert done.stderr.count("[trainer] half a line\n") == 2
    assert done.stderr.count("was killed by SIGKILL; it is started again in 0.5 s (restart 1 of 1)") == 1


def test_the_status_is_that_of_the_process_that_failed(python, program):
    done = python.run("-m", "gradwire", "spawn", "--grace", 0.1, "--no-prefix", 2, program, "fail", "wait")
    assert done.returncode == 7
    assert "worker1 (pid " in done.stderr
    assert done.stderr.endswith("exited with status 7\n")
    assert "worker0 0 2 0 ['fail', 'wait']\n" in done.stdout


@pytest.fixture
def waiting(python, program, tmp_path) -> Iterator[tuple[Program, list[psutil.Process]]]:
    """A `gradwire spawn` of two processes that wait, and these."""
    reading, writing = os.pipe()
    with (
        open(reading) as printed,
        open(writing, "w") as output,
        (tmp_path / "errors").open("w") as errors,
        python.start("-m", "gradwire", "spawn", 2, program, "wait", stdout=output, stderr=errors) as launcher,
    ):
        output.close()
        lines = [printed.readline().split() for _ in range(4)]
        yield launcher, [psutil.Process(int(line[1])) for line in lines if len(line) == 2]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_quietly(waiting, tmp_path, number, status):
    launcher, processes = waiting
    assert len(processes) == 2
    os.kill(launcher.pid, number)
    assert launcher.wait(60) == status
    assert have_ended(processes)
    printed = (tmp_path / "errors").read_text()
    assert printed.replace("[worker0] half a line\n", "").replace("[worker1] half a line\n", "").strip() == ""


def test_all_processes_die_with_the_launcher(waiting):
    launcher, processes = waiting
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: have_ended(processes))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["0", "x.py"], "0 is not in the range"),
        (["2", "--restarts", "1", "x.py"], "options of gradwire spawn come before N"),
        (["2", "-m"], "-m is no program"),
        (["2", "no_such.py"], "there is no file 'no_such.py'"),
        (["--names", "a", "2", "x.py"], "there are 1 names for 2 processes"),
        (["--names", "a,a", "2", "x.py"], "give different names"),
    ],
)
def test_wrong_arguments_are_refused(arguments, problem):
    done = CliRunner().invoke(gradwire, ["spawn", *arguments])
    assert done.exit_code in {1, 2}
    assert problem in done.output
