"""Checks that correct programs print nothing on stderr that they do not print on torch's own agent.

    python -m tests.quiet_runs --runs 100

runs two programs for torch.distributed.rpc (a parameter server and a pipeline) on gradwire, and a few times on
torch's agent, whose lines are allowed; and gradwire's example of a parameter server, which must print nothing.
The processes of a run are forked from one that has torch loaded, and end with their interpreter, as those of a
script do. `--spawned` also runs the scripts as a user does, which takes several seconds each.
"""

import argparse
import gc
import importlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.ports import free_port

__all__ = ["PROGRAMS", "Report", "quiet_runs"]

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ("tests.compat.programs.parameter_server", "tests.compat.programs.pipeline")
EXAMPLE = "examples.parameter_server"

MAX_TORCH_RUNS = 5
"""Runs of a program on torch's agent at most: it prints the same each time."""

Python = Callable[..., subprocess.CompletedProcess[str]]

RUN_TIMEOUT_S = 100.0
"""Seconds that a run may take before it is killed."""


@dataclass
class Report:
    """The output of some runs of one program.

    program: the name of its module.
    agent: "gradwire", "torch", or "example" for one that needs no layer.
    runs: how many there were.
    failed: the exit status, or the stderr, of each run that failed.
    lines: how often each line was printed on stderr, with "#" for numbers and addresses.
    """

    program: str
    agent: str
    runs: int
    failed: list[str] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)

    def add(self, stderr: str) -> None:
        """Counts the lines of one process."""
        self.lines.update(_shape(line) for line in stderr.splitlines() if line.strip())


def new_interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in the folder of the tests."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)


def quiet_runs(program: str, agent: str, runs: int, python: Python = new_interpreter) -> Report:
    """Runs a program `runs` times, its processes forked from one that has it loaded, which `python` runs."""
    report = Report(program, agent, runs)
    with tempfile.TemporaryDirectory() as folder:
        done = python("-m", __spec__.name, "--serve", program, agent, str(runs), folder)
        report.add(done.stderr)
        for output in Path(folder).glob("*.stderr"):
            report.add(output.read_text(errors="replace"))
        statuses = Path(folder, "statuses").read_text().split() if done.returncode == 0 else [done.stderr]
        report.failed = [status for status in statuses if status != "0"]
    return report


def spawned_runs(program: str, agent: str, runs: int) -> Report:
    """Runs a program `runs` times as a user does, in new interpreters."""
    report = Report(program, agent, runs)
    path = str(ROOT.joinpath(*program.split(".")).with_suffix(".py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    layer = ["-m", "gradwire.compat"] if agent == "gradwire" else []
    arguments = ["--epochs", "1", "--quiet"] if agent == "example" else []
    for _ in range(runs):
        command = [sys.executable, *layer, path, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env=environment, check=False
        )
        report.add(done.stderr)
        if done.returncode:
            report.failed.append(done.stderr)
    return report


def new_lines(report: Report, allowed: Report | None) -> dict[str, int]:
    """Returns the lines that torch's agent does not print, and how often each was printed."""
    known = allowed.lines if allowed is not None else {}
    return {line: count for line, count in report.lines.items() if line not in known}


def _shape(line: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", line.strip())


# In the process from which the processes of a run are forked.


def serve(program: str, agent: str, runs: int, folder: Path) -> None:
    """Runs a program again and again. Returns in this process, and in each that it has forked."""
    if agent == "gradwire":
        from gradwire import compat

        compat.install()
    module = importlib.import_module(program)
    importlib.import_module("torch._dynamo")  # which torch.optim loads on the first step
    if "triton" not in sys.modules:  # whose bindings, in CUDA builds, report what stays as leaks
        gc.freeze()  # what is loaded by now stays: the end of a forked process need not look at it
    part, size = _example_part(module) if agent == "example" else (module.main, module.WORLD_SIZE)
    statuses = []
    for run in range(runs):
        port = free_port()
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                _write_to(folder / f"{run}-{rank}")
                part(rank, port)
                return
            children.append(child)
        statuses += [_status_of(child) for child in children]
    (folder / "statuses").write_text(" ".join(map(str, statuses)))


def _example_part(module: object) -> tuple[Callable[[int, int], None], int]:
    """Returns the function that a process of the example runs, and how many processes there are."""
    sys.argv = [EXAMPLE, "--epochs", "1", "--trainers", "2", "--quiet"]
    arguments = module.parse_arguments()  # type: ignore[attr-defined]
    size = 2 + arguments.trainers

    def part(rank: int, port: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        module.work(rank, arguments)  # type: ignore[attr-defined]

    return part, size


def _write_to(path: Path) -> None:
    for number, stream in ((1, "stdout"), (2, "stderr")):
        output = os.open(f"{path}.{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(output, number)
        os.close(output)


def _status_of(child: int) -> int:
    """Waits for a process, which is killed after RUN_TIMEOUT_S, and returns its exit code."""
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], RUN_TIMEOUT_S)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.quiet_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=100, help="of each program (default 100)")
    parser.add_argument("--spawned", type=int, default=0, help="runs of each script as a user runs it (default 0)")
    parser.add_argument("programs", nargs="*", default=[*PROGRAMS, EXAMPLE], help="modules (default: all)")
    runs = parser.parse_args()
    loud = False
    for program in runs.programs:
        agent = "example" if program == EXAMPLE else "gradwire"
        for way, count in ((quiet_runs, runs.runs), (spawned_runs, runs.spawned)):
            if not count:
                continue
            allowed = way(program, "torch", min(count, MAX_TORCH_RUNS)) if agent == "gradwire" else None
            started = time.monotonic()
            report = way(program, agent, count)
            extra = new_lines(report, allowed)
            loud |= bool(extra or report.failed)
            print(
                f"{program} on {agent}, {way.__name__}: {count} runs in {time.monotonic() - started:.0f} s, "
                f"{len(report.failed)} failures, {sum(extra.values())} lines that torch's agent does not print",
                flush=True,
            )
            for line, number in sorted(extra.items()):
                print(f"  {number} x {line}")
            for failure in report.failed[:3]:
                print(f"  failed: {failure}")
    return int(loud)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        sys.exit(main())
