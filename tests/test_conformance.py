"""The runner of torch's suites: that it runs them, and tells good from bad."""

import subprocess
import sys
from pathlib import Path

from gradwire import rpc

from tests.conformance.fork_server import Outcome
from tests.conformance.report import Report

ROOT = Path(__file__).parent.parent


def outcome(test: str, kind: str, text: str = "") -> Outcome:
    return Outcome(test, kind, text, "", 0.1)


def test_a_test_of_torch_runs_on_gradwire():
    command = [sys.executable, "-m", "tests.conformance", "-v", "-k", "RpcTest.test_py_raise_in_user_func_escaped"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RpcTest.test_py_raise_in_user_func_escaped_str" in done.stdout
    assert str(Path(rpc.__file__).with_name("calls.py")) in done.stdout  # in the traceback that the callee prints
    assert "1 tests in" in done.stdout


def test_the_workers_of_a_test_that_fails_are_heard():
    command = [sys.executable, "-m", "tests.conformance", "--timeout", "30", "-k", "RpcTest.test_shutdown_errors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=110)
    assert "FAILED" in done.stdout
    assert "RuntimeError not raised" in done.stdout  # the worker's traceback
    assert done.returncode == 0  # this one is excepted
    assert "excepted  RpcTest.test_shutdown_errors: The test replaces" in done.stdout


def test_a_report_is_good_when_only_exceptions_fail():
    outcomes = [outcome("A.a", "passed"), outcome("A.b", "failed"), outcome("B.c", "skipped", "no GPU")]
    report = Report(outcomes, {"A.b": "cannot be"}, complete=True)
    assert report.good
    table = report.table().splitlines()
    assert [line.split() for line in table[1:4]] == [
        ["A", "1", "0", "1", "0"],
        ["B", "0", "0", "0", "1"],
        ["all", "1", "0", "1", "1"],
    ]
    assert "skipped   B.c: no GPU" in table
    assert "excepted  A.b: cannot be" in table


def test_a_report_is_bad_when_something_else_fails():
    report = Report([outcome("A.a", "failed")], {}, complete=True)
    assert not report.good
    assert report.unexpected == ["A.a"]


def test_a_report_is_bad_when_an_exception_is_none():
    outcomes = [outcome("A.a", "passed")]
    assert Report(outcomes, {"A.a": "fails"}, complete=False).outdated == ["A.a"]
    assert Report(outcomes, {"A.b": "is gone"}, complete=True).outdated == ["A.b"]
    assert Report(outcomes, {"A.b": "did not run"}, complete=False).good


def test_a_report_is_bad_when_nothing_ran():
    assert not Report([], {}, complete=False).good
