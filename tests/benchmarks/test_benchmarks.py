"""The benchmarks run, and the systems compute the same. Their times are not checked."""

import contextlib
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as table
from benchmarks import (
    autograd,
    broadcast_call,
    call_steps,
    calls,
    collectives,
    idle,
    many_tensors,
    observability,
    stalled_peer,
    throughput,
    tls,
)
from benchmarks.harness import Comparison
from benchmarks.report import PAIRS
from tests.hosts import why_unavailable
from tests.workers import use_fork_server

ROOT = Path(__file__).parent.parent.parent

SLOW = {"echo 64 MiB", "echo 256 MiB", "300 tensors of 4 MiB", "backward, 5,000 nodes in one process"}
"""Cases that are measured as others are, and take long on a busy machine."""

Command = Callable[[Sequence[str]], None]


@pytest.fixture
def measure(capsys):
    """Returns a function that runs a command, with workers of the tests' fork server, and returns its output."""

    def run(command: Command, *arguments: object) -> list[str]:
        command([str(argument) for argument in arguments])
        return capsys.readouterr().out.splitlines()

    return run


def test_importing_the_benchmarks_leaves_the_fork_server_of_the_tests_alone():
    assert vars(forkserver._forkserver)["ensure_running"] is use_fork_server


@pytest.mark.timeout(300)
def test_every_case_is_measured_and_the_systems_agree(measure, tmp_path):
    file = tmp_path / "figures.json"
    systems = ["gradwire", "torch"]
    cases = *calls.CASES, *many_tensors.CASES, *autograd.CASES
    names = [case.name for case in cases if case.name not in SLOW and case.workers < 5]
    arguments = ["-k", *names, "--rounds", 1, "--seconds", 0, "--json", file]
    lines = measure(table.main, "--systems", *systems, *arguments)
    assert any(line.startswith("load average before: ") for line in lines)
    figures = json.loads(file.read_text())
    assert sorted(case["case"] for case in figures["measured"]) == sorted(names)
    for case in figures["measured"]:
        (row,) = (line for line in lines if line.startswith(f"{case['case']:38}"))
        ours, theirs = (case["systems"][name] for name in systems)
        for measured in (ours, theirs):
            assert [len(steps) for steps in measured["rounds"]] == [1]
            assert 0 < measured["median"] <= measured["p99"]
            assert measured["cpu"] > 0
        median, ratio, _, _, cpu = row[38:].split()
        assert float(median) == pytest.approx(ours["median"] * 1e3, abs=0.001)
        assert float(ratio) == pytest.approx(ours["median"] / theirs["median"], abs=0.01)
        assert float(cpu) == pytest.approx(ours["cpu"] / theirs["cpu"], abs=0.01)
        assert len(ours["results"]) == len(theirs["results"]) > 0
        for mine, peers in zip(ours["results"], theirs["results"], strict=True):
            assert mine["shape"] == peers["shape"]
            assert mine["norm"] > 0
            assert mine["norm"] == pytest.approx(peers["norm"], rel=1e-5)
        assert case["largest difference of results"] < 1e-5


@pytest.mark.timeout(120)
def test_the_command_writes_the_page_of_all_systems(python, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra `examples` is not installed")
    monkeypatch.chdir(ROOT)
    options = ["-k", "64 in flight", "--rounds", 1, "--seconds", 0, "--save", tmp_path]
    done = python.run("-m", "benchmarks", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "figures.md").read_text()
    ratios, times = re.findall(r"^\| noop, 64 in flight \|.*", page, re.M)
    names = re.search(r"^\| case \| gradwire ms \|.*", page, re.M)[0]
    assert all(f"{pair.title}: {name}" in names for pair in PAIRS for name in ("median", "p99", "cpu"))
    assert ratios.count("|") == names.count("|")
    assert times.count("|") == len(table.SYSTEMS) + 2
    assert "](figures.png)" in page
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_the_case_of_the_docs_is_measured(measure, tmp_path, monkeypatch):
    (code,) = re.findall(
        r"```python\n(# my_cases\.py\n.*?)```", (ROOT / "docs" / "benchmarks.md").read_text(), re.S
    )
    (tmp_path / "my_cases.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    lines = measure(table.main, "--cases", "my_cases", "--systems", "gradwire", "--rounds", 1, "--seconds", 0)
    assert any(line.startswith("matrix product") for line in lines)


def test_a_case_without_a_name_has_that_of_its_class():
    unnamed: Any = type("Unnamed", (calls.Noop,), {})
    named: Any = type("Named", (calls.Noop,), {"name": "a name"})
    assert (unnamed.name, named.name) == ("Unnamed", "a name")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (table, ["-k", "nothing like it"], "no case has 'nothing like it' in its name"),
        (table, ["--rounds", "0"], "--rounds is 0: give at least 1"),
        (table, ["--save", "/no/folder"], "--save /no/folder is no folder"),
        (throughput, ["one-to-one"], "'one-to-one' is no pattern: give many-to-one or one-to-many"),
        (throughput, ["--peers", "0"], "--peers is 0: give at least 1"),
        (throughput, ["--in-flight", "-1"], "--in-flight is -1: give at least 1"),
        (throughput, ["--seconds", "0"], "--seconds is 0: give more than 0"),
        (table, ["--cases", "benchmarks.harness"], "module 'benchmarks.harness' has no list CASES"),
        (idle, ["--workers", "1"], "--workers is 1: give at least 2"),
        (observability, ["--rounds", "0"], "--rounds is 0: give at least 1"),
        (observability, ["--save", "/no/folder"], "--save /no/folder is no folder"),
        (tls, ["--rounds", "0"], "--rounds is 0: give at least 1"),
        (tls, ["--save", "/no/folder"], "--save /no/folder is no folder"),
    ],
)
def test_wrong_arguments_are_refused(command, arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert message in f"{refused.value} {capsys.readouterr().err}"


def test_figures_of_a_comparison():
    rounds = {"a": [[1.0, 3.0], [2.0]], "b": [[4.0, 4.0], [8.0]]}
    results = {"a": [np.array([1.0, 2.0])], "b": [np.array([1.0, 2.5])]}
    comparison = Comparison("case", 2, rounds, results, {"a": [1.0, 5.0, 2.0]})
    assert comparison.median("a") == 2.0
    assert comparison.p99("b") == pytest.approx(7.92)
    assert comparison.cpu_of("a") == 2.0
    assert comparison.ratio("a", "b") == 0.5
    assert comparison.ratios("a", "b") == [0.5, 0.25]
    assert comparison.difference == 0.5


@pytest.mark.timeout(120)
def test_throughput_is_measured_and_no_call_is_lost(measure, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--peers", 2, "--in-flight", 8, "--seconds", 0.02, "--systems", "gradwire", "torch-tcp"]
    lines = measure(throughput.main, *arguments, "--json", file)
    measured = json.loads(file.read_text())["measured"]
    assert [(each["pattern"], each["system"]) for each in measured] == [
        (pattern, system) for pattern in throughput.PATTERNS for system in ("gradwire", "torch-tcp")
    ]
    for each in measured:
        assert each["calls"] >= 2 * 8  # rounds, and calls in flight
        assert min(each["seconds"], each["cpu"], each["bytes_before"], each["bytes_after"]) > 0
        assert any(line.split()[:3] == [each["pattern"], each["system"], str(each["calls"])] for line in lines)


def test_calls_that_are_lost_or_run_twice_are_counted():
    counter = throughput.CallCounter()
    for number in (0, 1, 1):
        counter.add(number)
    assert counter.take() == (3, 2)
    assert counter.take() == (0, 0)


def test_idle_workers_are_measured(measure, tmp_path):
    file = tmp_path / "figures.json"
    lines = measure(idle.main, "--workers", 3, "--pause", 0, "--seconds", 0.01, "--json", file)
    (measured,) = json.loads(file.read_text())["measured"]
    assert any(line.split()[:2] == ["gradwire", "3"] for line in lines)
    assert len(measured["cpu"]) == 3
    assert min(measured["start_s"], measured["connect_s"]) > 0
    assert measured["threads"] >= measured["python_threads"] > 1
    assert measured["first_threads"] > 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loopback", [False, True], ids=["namespaces", "loopback"])
def test_the_cost_of_tls_is_measured(measure, tmp_path, loopback):
    if not loopback and (reason := why_unavailable()):
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    flags = ["--loopback"] if loopback else []
    lines = measure(tls.main, *flags, "--rounds", 2, "--seconds", 0.01, "--json", file, "--save", tmp_path)
    assert (tmp_path / "tls.txt").read_text().splitlines() == lines
    figures = json.loads(file.read_text())
    assert ("loopback" in figures["facts"]["hosts"]) == loopback
    assert [each["system"] for each in figures["measured"]] == list(tls.VARIANTS)
    assert [each["carried by"] for each in figures["measured"]] == ["tcp", "tcp", "unix", "unix"]
    for baseline, other in (figures["measured"][:2], figures["measured"][2:]):
        for measured in (baseline, other):
            assert measured["calls"] >= len(measured["medians of rounds"]) == 2
            assert 0 < measured["median"] <= measured["p99"]
            assert measured["cpu"] > 0
        (row,) = (line for line in lines if line.startswith(other["system"]))
        rounds = zip(other["medians of rounds"], baseline["medians of rounds"], strict=True)
        ratio = statistics.median(mine / its for mine, its in rounds)
        assert float(row.partition("|")[2].split()[0]) == pytest.approx(ratio, abs=0.001)


@pytest.mark.timeout(120)
def test_the_cost_of_watching_is_measured(measure, tmp_path):
    file = tmp_path / "figures.json"
    names = ["view", "otel, every call"]
    flags = ["--rounds", 2, "--seconds", 0.05, "--json", file, "--save", tmp_path]
    lines = measure(observability.main, "--rows", *names, *flags)
    assert (tmp_path / "observability.txt").read_text().splitlines() == lines
    figures = json.loads(file.read_text())
    assert [each["system"] for each in figures["measured"]] == ["off", *names]
    for measured in figures["measured"]:
        assert measured["calls"] >= len(measured["medians of rounds"]) == 2
        assert 0 < measured["median"] <= measured["p99"]
        assert measured["cpu"] > 0


def test_where_there_are_no_two_hosts_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(tls, "_namespace", lambda: subprocess.Popen(["/no/such/program"]))
    with contextlib.ExitStack() as stack:
        hosts, what = tls._hosts(stack, loopback=False)
    assert [host.address for host in hosts] == ["127.0.0.1"] * 2
    assert "/no/such/program" in what


@pytest.mark.parametrize("system", ["gradwire", "gradwire-tcp"])
def test_the_steps_of_a_call_are_measured(measure, system):
    lines = measure(call_steps.main, "--system", system, "--calls", 200)
    steps = [line.split() for line in lines if re.match(r" *\d+\.\d +\d+\.\d  calle[er]: ", line)]
    assert [" ".join(step[3:]) for step in steps] == [text for _, _, text in call_steps.STEPS]
    assert all(float(step[0]) >= 0 for step in steps)


def test_steps_of_calls_follow_the_marks_of_both_workers():
    names = [[name for side, name, _ in call_steps.STEPS if side == each] for each in (0, 1)]
    times = {(side, name): 10 * number for number, (side, name, _) in enumerate(call_steps.STEPS, 1)}
    marks = [[(times[side, name], name) for name in names[side]] for side in (0, 1)]
    second = [[(1000 + when, name) for when, name in each] for each in marks]
    del second[1][-1]  # a call that went another way
    steps = list(call_steps.steps_of_calls([0, 1000], [iter(marks[side] + second[side]) for side in (0, 1)]))
    assert steps == [[10] * len(call_steps.STEPS)]


@pytest.mark.timeout(120)
def test_engines_are_measured_against_their_peers(measure):
    pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    arguments = ["--ranks", 2, "--operations", "all_reduce", "barrier", "--sizes", 1024]
    lines = measure(collectives.main, *arguments, "--rounds", 1, "--seconds", 0.01)
    for engine in collectives.PEERS:
        for case in ("all_reduce    1 KiB", "barrier"):
            (row,) = (line for line in lines if line.startswith(engine) and case in line)
            median, _, its, _, ratio, *_, over = row.split(case)[1].split()
            assert float(ratio) == pytest.approx(float(median) / float(its), rel=0.05, abs=0.01)
            assert float(over) == pytest.approx(float(median) - float(its), abs=0.2)


def test_broadcast_calls_are_measured(measure):
    lines = measure(broadcast_call.main, "--receivers", 2, "--mib", 1, "--rounds", 1)
    (row,) = (line for line in lines if line.strip().startswith("1 MiB"))
    ours, theirs, ratio = map(float, (row.split()[2], row.split()[4], row.split()[6]))
    assert ratio == pytest.approx(ours / theirs, rel=0.01, abs=0.02)


def test_a_stalled_peer_is_measured(measure):
    lines = measure(stalled_peer.main, "--seconds", 2, "--kib", 16, "--in-flight", 1)
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("before", "during", "ratio"))}
    for column, index in ((2, 1), (4, 2)):
        ratio = float(rows["during"][column]) / float(rows["before"][column])
        assert float(rows["ratio"][index]) == pytest.approx(ratio, abs=0.01, rel=0.01)
    for worker in ("stopped", "slow"):
        (row,) = (line for line in lines if line.startswith(f"calls to the {worker} worker"))
        count, highest = int(row.split()[5].rstrip(",")), float(row.split("at most")[1].split()[0])
        assert count > 16
        assert 0 < highest <= 1.0
    assert any(line.startswith("the caller's memory grew by ") for line in lines)
