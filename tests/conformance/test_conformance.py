"""The runner of torch's RPC suites runs them, and its report tells expected failures from unexpected ones."""

import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu

from tests.certificates import TOKEN
from tests.conformance.fork_server import Outcome, form_groups_together
from tests.conformance.report import Report
from tests.conformance.suites import gpus_needed


def outcome(test: str, kind: str, text: str = "") -> Outcome:
    return Outcome(test, kind, text, "", 0.1)


@pytest.fixture
def conformance(python, monkeypatch, request):
    """Runs `python -m tests.conformance`."""
    monkeypatch.chdir(request.config.rootpath)
    return functools.partial(python.run, "-m", "tests.conformance")


@pytest.mark.parametrize("options", [(), ("--transports", "tcp,grpc")], ids=["as it is", "TLS"])
def test_a_test_of_torch_runs_on_gradwire(conformance, monkeypatch, options):
    if options:
        monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    words = ["-k", "RpcTest.test_py_raise_in_user_func_escaped"]
    done = conformance("--module", "tensorpipe", "-v", *options, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RpcTest.test_py_raise_in_user_func_escaped_str" in done.stdout
    # In the traceback that the callee prints, torch's own agent has a frame of its own.
    assert "in raise_func_escape" in done.stdout
    assert "rpc/internal.py" not in done.stdout
    assert "1 tests in" in done.stdout


def test_tests_for_one_gpu_are_listed_and_say_why_they_are_skipped(conformance):
    listed = conformance("--module", "cuda", "--list")
    assert len(listed.stdout.split()) == 42, listed.stderr  # one of them needs no GPU
    words = ["-k", "CudaDistAutogradTest.test_gpu_simple", "-k", "test_device_map_cpu_to_gpu_default"]
    done = conformance("--module", "cuda", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    if not torch.cuda.is_available():
        # Of CUDA, or of an accelerator in newer releases of torch.
        assert len(re.findall(r": Need at least 1 \w+ device$", done.stdout, re.M)) == 2


def test_how_many_gpus_a_test_needs():
    @functools.wraps(print)
    def wrapper(x):
        return x

    assert gpus_needed(print) == gpus_needed(wrapper) == 0
    assert gpus_needed(skip_if_lt_x_gpu(2)(print)) == 2
    assert gpus_needed(functools.wraps(skip_if_lt_x_gpu(4)(print))(wrapper)) == 4


def test_the_workers_of_a_test_that_fails_are_heard(conformance):
    done = conformance("--module", "tensorpipe", "--timeout", "30", "-k", "RpcTest.test_shutdown_errors")
    assert "FAILED" in done.stdout
    assert "RuntimeError not raised" in done.stdout  # the worker's traceback
    assert done.returncode == 0  # this one is excepted
    assert "excepted  RpcTest.test_shutdown_errors: The test replaces" in done.stdout


def test_no_worker_leaves_init_process_group_before_all_have_their_group(workers, tmp_path):
    """The second worker notes its group when the first one has begun to wait for it, or has not waited."""

    def first_to(does: str) -> str:
        """Notes what the first worker does, unless something is noted; returns what is."""
        return events().compare_set("first", "", does).decode()

    def events() -> dist.Store:
        return dist.FileStore(f"{tmp_path}/events")

    def form_group(rank: int, function: str, before) -> None:
        form_groups_together()
        called = getattr(dist.distributed_c10d, function)

        def call(*args):
            before()
            return called(*args)

        with mock.patch.object(dist.distributed_c10d, function, call):
            dist.init_process_group("gloo", f"file://{tmp_path}/group", rank=rank, world_size=2)

    def wait_first() -> str:
        form_group(0, "_store_based_barrier", lambda: first_to("wait"))
        return first_to("leave")

    a, b = workers(2)
    does = a.start(wait_first)
    b.run(form_group, 1, "_update_default_pg", lambda: events().wait(["first"]))
    assert does.result() == "wait"


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
