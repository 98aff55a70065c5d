"""Runs torch's own RPC test suites on gradwire.

python -m tests.conformance                       # all of them
python -m tests.conformance -k rref_type          # those with "rref_type" in their name
python -m tests.conformance -k RemoteModuleTest.  # a suite
python -m tests.conformance --stock -k test_add   # on torch's own agent
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from .fork_server import Outcome, TestRun, run_module
from .report import Report
from .suites import MODULES, Module, load

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
RULE = "-" * 100
MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


def main() -> int:
    """Runs the command line; returns the exit code."""
    arguments = _arguments()
    modules = [module for module in MODULES if arguments.module in (None, module.name)]
    if arguments.list:
        print("\n".join(name for module in modules for name in load(module)))
        return 0
    started = time.monotonic()
    outcomes = []
    exceptions = {} if arguments.stock else tomllib.loads(EXCEPTIONS.read_text())
    with tempfile.TemporaryDirectory(prefix="conformance-") as logs:
        run = TestRun(
            stock=arguments.stock,
            transports=tuple(arguments.transports.split(",")),
            parallel=arguments.jobs,
            timeout=arguments.timeout,
            words=tuple(arguments.k),
            logs=Path(logs),
            excepted=frozenset(exceptions),
        )
        for module in modules:
            for outcome in _outcomes(module, run):
                outcomes.append(outcome)
                print(f"{MARKS[outcome.kind]:<8}{outcome.seconds:6.1f} s  {outcome.test}", flush=True)
                if arguments.verbose and outcome.output:
                    print(f"{outcome.output}\n{RULE}", flush=True)
                if outcome.kind == "failed" and not arguments.quiet:
                    print(f"{outcome.text or outcome.output}\n{RULE}", flush=True)
    complete = not arguments.k and not arguments.module and not arguments.stock
    report = Report(outcomes, exceptions, complete=complete)
    print(f"\n{report.table()}\n{len(outcomes)} tests in {time.monotonic() - started:.0f} s")
    return 0 if report.good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description="torch's RPC tests on gradwire"
    )
    parser.add_argument("-k", action="append", default=[], metavar="WORD", help="tests with this in their name")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the output of all tests")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no output of tests")
    parser.add_argument("--module", choices=[module.name for module in MODULES], help="one module of suites")
    parser.add_argument("--stock", action="store_true", help="run on torch's own agent")
    parser.add_argument("--transports", default="unix,tcp,grpc", help="what may carry messages (unix,tcp,grpc)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests that run at once")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for one test")
    parser.add_argument("--list", action="store_true", help="print the names of the tests")
    return parser.parse_args()


def _outcomes(module: Module, run: TestRun) -> Iterator[Outcome]:
    """Runs a module in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_module, args=(module, run, sender), name=module.name)
    process.start()
    sender.close()
    try:
        while (outcome := receiver.recv()) is not None:
            yield outcome
    except EOFError:
        raise SystemExit(
            f"the process of module {module.name!r} ended with exit code {process.exitcode}"
        ) from None
    finally:
        process.join()


if __name__ == "__main__":
    sys.exit(main())
