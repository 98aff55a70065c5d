"""The examples run as a user runs them, and report a worker that dies."""

import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from examples import parameter_server
from tests.certificates import TOKEN, make_authority, write

PARAMETER_SERVER = parameter_server.__file__


@pytest.fixture(autouse=True)
def nothing_is_left(python, monkeypatch) -> Iterator[None]:
    """No process, and so no listening port, and no shared segment outlives an example."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("GRADWIRE_TEST", mark)  # new interpreters inherit it
    before, sessions = set(os.listdir("/dev/shm")), python.sessions
    yield
    started = python.sessions - sessions  # not of the tests before: the system uses process ids again
    left = [process for process in psutil.process_iter() if _has(process, mark) or _is_of(process, started)]
    _, alive = psutil.wait_procs(left, timeout=20)  # multiprocessing's own end a moment after the program
    assert alive == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "gradwire" in name]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("GRADWIRE_TEST") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _is_of(process: psutil.Process, sessions: set[int]) -> bool:
    try:
        return os.getsid(process.pid) in sessions
    except ProcessLookupError:
        return False


def test_the_parameter_server_trains(python, tmp_path, monkeypatch):
    """With a token, which is not told; the tests below start it without, or by torchrun."""
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    picture = tmp_path / "deep" / "curve.png"
    done = python.run(PARAMETER_SERVER, "--epochs", "5", "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(text) for text in re.findall(r"test accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 80
    assert picture.read_bytes().startswith(b"\x89PNG")
    for worker in ("coordinator", "server", "trainer0", "trainer1"):
        assert re.search(rf"^{worker} +[\d,]+ +[\d,]+ +[\d.]+ +[\d.]+$", done.stdout, re.M), done.stdout
    assert "epoch  1/5" in done.stderr  # the progress bar
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("credentials", ["token", "certificates"])
def test_it_runs_under_torchrun(python, tmp_path, monkeypatch, credentials):
    program = PARAMETER_SERVER
    if credentials == "token":
        monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    else:
        ca = make_authority()
        for rank in range(3):
            write(tmp_path / f"of-{rank}", ca, parameter_server.role(rank))
        program = str(tmp_path / "program.py")
        Path(program).write_text(WITH_CERTIFICATES.format(folder=tmp_path, program=PARAMETER_SERVER))
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    options = ["--nproc-per-node", "3"]
    monkeypatch.setenv("PYTHON_EXEC", str(python.executable))  # torchrun starts it
    done = python.run(torchrun, *options, program, "--epochs", "2", "--quiet", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch  2" in done.stdout


WITH_CERTIFICATES = """
import os, runpy
for name in ("ca", "certificate", "key"):
    os.environ["GRADWIRE_" + name.upper()] = "{folder}/of-" + os.environ["RANK"] + "/" + name
runpy.run_path("{program}", run_name="__main__")
"""
"""Runs a program with a certificate for each rank."""


def read_until(printed: IO[str], text: str) -> str:
    """Returns what the program prints up to a line with this text; fails if the program ends before."""
    seen = ""
    for line in printed:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the program ended without {text!r}:\n{seen}")


def test_a_killed_server_is_named_and_nothing_hangs(python):
    reading, writing = os.pipe()
    with open(reading) as printed, open(writing, "w") as output:
        arguments = [PARAMETER_SERVER, "--epochs", "1000", "--quiet"]
        with python.start(*arguments, stdout=output, stderr=output) as program:
            output.close()
            seen = read_until(printed, "epoch  1")
            os.kill(int(re.search(r"server (\d+)", seen)[1]), signal.SIGKILL)
            killed = time.monotonic()
            read_until(printed, "coordinator: worker 'server' is lost")
            print(f"reported after {time.monotonic() - killed:.2f} s")
            assert program.wait(60) == 1
            print(f"all processes ended after {time.monotonic() - killed:.2f} s")


def test_help_explains_every_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parameter_server.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        parameter_server.main()
    flags = re.findall(r"^  (?:-h, )?--([a-z-]+)(?: \S+)?\s+(\S.*)?$", capsys.readouterr().out, re.M)
    assert {"epochs", "trainers", "batch-size", "lr", "momentum", "seed", "plot", "quiet"} <= {f for f, _ in flags}


def test_bad_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parameter_server.py", "--epochs", "0"])
    with pytest.raises(SystemExit, match=r"^2$"):
        parameter_server.main()
    assert "must be at least 1" in capsys.readouterr().err
