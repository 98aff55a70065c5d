"""What is started as `python.executable` behaves as an interpreter does."""

import signal
import subprocess

import psutil
import pytest

from tests.interpreters import TIMEOUT_S, have_ended
from tests.remote_functions import wait_until

WAITS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture
def start(python):
    """Starts code, with what is given to Popen."""

    def run(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen([python.executable, "-c", code, *arguments], text=True, **options)

    return run


def test_arguments_environment_folder_and_files_are_those_of_the_command(start, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADWIRE_TEST", "1")
    code = "import os, sys; print(sys.argv[1:], os.environ['GRADWIRE_TEST'], os.getcwd(), sys.stdin.read())"
    with start(code, "a", "b", stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.communicate("c")[0] == f"['a', 'b'] 1 {tmp_path} c\n"


def test_descriptors_are_passed_on(start, tmp_path):
    with (tmp_path / "file").open("w") as file:
        code = f"import os; os.write({file.fileno()}, b'written')"
        assert start(code, pass_fds=[file.fileno()]).wait(TIMEOUT_S) == 0
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.abort()", -signal.SIGABRT)]
)
def test_it_ends_as_its_program(start, code, status):
    assert start(code, stderr=subprocess.DEVNULL).wait(TIMEOUT_S) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_program_ends_with_it(start, number):
    with start(WAITS, stdout=subprocess.PIPE) as process:
        program = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(60) == -number
        wait_until(lambda: have_ended([program]))


def test_a_signal_that_comes_as_soon_as_its_program_runs_is_passed_on(start):
    code = """
import signal
import sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("runs", flush=True)
sys.exit(int(signal.sigwait({signal.SIGTERM}) == signal.SIGTERM) * 5)
"""
    with start(code, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "runs\n"
        process.terminate()
        assert process.wait(TIMEOUT_S) == 5
