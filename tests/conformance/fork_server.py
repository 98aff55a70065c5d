"""Runs the tests of one module, each in a process forked from this one, which has imported torch already.

torch's `MultiProcessTestCase` spawns the four workers of a test, and each imports torch anew. Here they are forked
from the test's process, which is itself forked from this one: a clean process, without threads, in which nothing
has run yet.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import unittest
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

import torch

from .suites import Module, load

__all__ = ["Outcome", "TestRun", "form_groups_together", "run_module"]

KILL_AFTER_S = 30.0
"""Seconds after torch's own time limit, which prints the workers' stacks, until a test is killed."""

EXCEPTED_TIMEOUT_S = 20
"""Time limit in seconds of tests that are known to fail: some of them hang."""

_forking = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a test.

    test: "Suite.test".
    kind: "passed", "failed" or "skipped".
    text: the reason for skipping, or the tracebacks of the test and its workers.
    output: what the test and its workers printed.
    seconds: the duration.
    """

    test: str
    kind: str
    text: str
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TestRun:
    """The options of a run.

    stock: whether to use torch's own agent instead of gradwire.
    transports: what may carry gradwire's messages.
    parallel: number of tests that run at the same time.
    timeout: seconds for one test.
    words: run the tests with one of these in "Suite.test"; all if empty.
    logs: a folder for the output of each test.
    excepted: "Suite.test" of the tests that are known to fail.
    """

    stock: bool
    transports: tuple[str, ...]
    parallel: int
    timeout: int
    words: tuple[str, ...]
    logs: Path
    excepted: frozenset[str]


def run_module(module: Module, run: TestRun, report: Connection) -> None:
    """Runs the selected tests of a module; sends an Outcome for each, and None at the end."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(run.timeout)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to look for GPUs in a way that does not forbid forking
    script = functools.partial(torch.jit.script)  # no object that compat knows
    if not run.stock:
        import gradwire.compat

        gradwire.compat.install(transports=run.transports)
    with mock.patch.object(torch.jit, "script", script):  # the suites compile remote calls, which compat refuses
        tests = load(module)
    _shorten(run.excepted)
    importlib.import_module("torch._dynamo")  # which torch.optim imports on the first step
    with (  # asking Triton or Numba for a GPU initializes CUDA, after which it cannot be used in forked processes
        mock.patch("torch.utils._triton.has_triton", return_value=False),
        mock.patch("torch.testing._internal.common_utils.TEST_NUMBA", new=False),
    ):
        importlib.import_module("torch.testing._internal.common_device_type")  # which every test imports
    _fork_instead_of_spawn()
    _keep_process_groups()
    form_groups_together()
    gc.collect()
    gc.freeze()
    waiting = [name for name in tests if not run.words or any(word in name for word in run.words)]
    running: list[_RunningTest] = []
    parallel = min(run.parallel, module.max_parallel or run.parallel)
    while waiting or running:
        while waiting and len(running) < parallel:
            name = waiting.pop(0)
            running.append(_RunningTest(name, tests[name], run))
        wait([test.sentinel for test in running], timeout=1)
        for test in [test for test in running if test.is_done()]:
            running.remove(test)
            report.send(test.outcome())
    report.send(None)


class _RunningTest:
    def __init__(self, name: str, case: unittest.TestCase, run: TestRun) -> None:
        self._name = name
        self._log = run.logs / f"{name}.log"
        self._started = time.monotonic()
        self._limit = run.timeout + KILL_AFTER_S
        self._answer, theirs = _forking.Pipe(duplex=False)
        self._process = _forking.Process(target=_run_test, args=(case, self._log, theirs), name=name)
        self._process.start()
        theirs.close()
        self.sentinel = self._process.sentinel

    def is_done(self) -> bool:
        """Returns whether the test has ended; kills it if it is over its time limit."""
        if self._process.is_alive() and time.monotonic() - self._started > self._limit:
            _kill_group(self._process.pid)
            self._process.join()
        return not self._process.is_alive()

    def outcome(self) -> Outcome:
        """Returns the outcome of a test that has ended."""
        _kill_group(self._process.pid)  # processes that the test left running
        kind, text = "failed", ""  # the outcome of a process that died
        with contextlib.suppress(EOFError):
            kind, text = self._answer.recv()
        self._answer.close()
        output = self._log.read_text(errors="replace") + f"(exit code {self._process.exitcode})"
        return Outcome(self._name, kind, text, output, time.monotonic() - self._started)


def _run_test(case: unittest.TestCase, log: Path, answer: Connection) -> None:
    os.setpgrp()  # so that the test can be ended together with all of its workers
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    faulthandler.enable()
    if torch.cuda.is_available() and torch.cuda._is_in_bad_fork():
        answer.send(("failed", "CUDA was initialized before the tests were forked, so they cannot use it"))
        return
    result = unittest.TestResult()
    case.run(result)
    if failures := [*result.failures, *result.errors]:
        answer.send(("failed", "\n".join(text for _, text in failures)))
    elif result.skipped:
        answer.send(("skipped", result.skipped[0][1]))
    else:
        answer.send(("passed", ""))


def _kill_group(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _shorten(tests: Iterable[str]) -> None:
    """Gives tests of torch a shorter time limit."""
    from torch.testing._internal import common_distributed

    limits = common_distributed.TIMEOUT_OVERRIDE
    limits.update({test.partition(".")[2]: EXCEPTED_TIMEOUT_S for test in tests})


def _fork_instead_of_spawn() -> None:
    """Makes torch's test cases fork their workers."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def fork(self: MultiProcessTestCase) -> None:
        self._start_processes(_forking.Process)

    MultiProcessTestCase._spawn_processes = fork


def form_groups_together() -> None:
    """Has workers leave `init_process_group` and `new_group` when all of them have the group, not only they.

    torch's tests call workers right after their own `init_process_group`, and those that run by then form groups.
    A worker that is called before it has noted its default group cannot, and the others wait for it, whatever the
    RPC agent. torch had this barrier once, and still has it for those who ask for it.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"


def _keep_process_groups() -> None:
    """Makes workers keep the process groups that they destroy until they exit, when no destructor runs.

    Where a DDP module is the last to hold a group, torch joins its thread under the interpreter's lock, for
    which that thread may be waiting, and the worker hangs (pytorch#56297), whatever the RPC agent.
    """
    from torch.distributed import distributed_c10d

    kept: list[object] = []
    destroy = torch.distributed.destroy_process_group

    def keep_and_destroy(*arguments: object, **keywords: object) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        destroy(*arguments, **keywords)

    torch.distributed.destroy_process_group = keep_and_destroy
