"""Runs one program with all processes that it starts, and returns its outcome."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

from .catalog import Program

__all__ = ["Outcome", "agree", "run"]

HERE = Path(__file__).parent
PACKAGES = Path(sys.prefix) / "programs"
"""The folder of the packages of requirements-programs.txt, separate from gradwire's own dependencies."""

ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a program.

    status: its exit status, negative for the signal that killed it; None if it exceeded its time limit.
    results: its output lines that begin with "result", sorted, since processes print concurrently.
    reason: the last error that it printed, if it failed.
    seconds: its duration.
    output: its whole output.
    """

    status: int | None
    results: tuple[str, ...]
    reason: str
    seconds: float
    output: str

    @property
    def succeeded(self) -> bool:
        """Whether the exit status is 0."""
        return self.status == 0


def run(program: Program, *, on_gradwire: bool, folder: Path = HERE, python: str = sys.executable) -> Outcome:
    """Runs a program until it ends, or its time limit is over; kills its process group afterwards.

    Args:
        program: what runs.
        on_gradwire: whether it runs on gradwire, or else on torch's own agent.
        folder: where the program is.
        python: the path of the interpreter.
    """
    launcher = ["-m", "gradwire.compat"] if on_gradwire else []
    command = [python, *launcher, str(folder / program.path), *program.arguments]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="program-") as work, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=work, env=_environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(program.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - started
        output.seek(0)
        text = output.read()
    results = tuple(sorted(line for line in text.splitlines() if line.startswith("result ")))
    return Outcome(status, results, _reason(program, status, text), seconds, text)


def agree(left: Sequence[str], right: Sequence[str], tolerance: float) -> bool:
    """Returns whether two lists of results are equal, with a tolerance for numbers."""
    if len(left) != len(right):
        return False
    words, others = " ".join(left).split(), " ".join(right).split()
    return len(words) == len(others) and all(
        _is_near(word, other, tolerance) for word, other in zip(words, others, strict=True)
    )


def _is_near(word: str, other: str, tolerance: float) -> bool:
    if word == other:
        return True
    try:
        here, there = float(word), float(other)
    except ValueError:
        return False
    return abs(here - there) <= tolerance * max(1.0, abs(here), abs(there))


def _environment() -> dict[str, str]:
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {  # without PYTHONUNBUFFERED, so that processes write whole lines
        **inherited,
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "TP_SOCKET_IFNAME": "lo",
    }


def _reason(program: Program, status: int | None, text: str) -> str:
    if status == 0:
        return ""
    if status is None:
        return f"took more than {program.timeout_s:g} s"
    errors = [error for error in ERROR.findall(text) if "ProcessRaisedException" not in error]
    return errors[-1].strip().replace(f"{PACKAGES}/", "") if errors else f"exit status {status}"
