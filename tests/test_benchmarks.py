"""The benchmarks run, and both systems compute the same. Their times are not checked."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import all_gather
from benchmarks.autograd import CASES
from benchmarks.collectives import PEERS
from benchmarks.harness import Comparison

ROOT = Path(__file__).parent.parent


def measure(module: str, *arguments: object, seconds: float = 110) -> list[str]:
    """The lines that a benchmark prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(300)
def test_every_case_of_autograd_is_measured_on_both_systems(tmp_path):
    file = tmp_path / "figures.json"
    lines = measure("benchmarks", "autograd", "--rounds", 2, "--seconds", 0, "--json", file, seconds=280)
    assert any(line.startswith("load average before: ") for line in lines)
    figures = json.loads(file.read_text())
    assert [case["case"] for case in figures["cases"]] == [case.name for case in CASES]
    for case in figures["cases"]:
        assert any(line.startswith(case["case"]) for line in lines)
        ours, theirs = case["systems"]["gradwire"], case["systems"]["torch"]
        for measured in (ours, theirs):
            assert [len(steps) for steps in measured["rounds"]] == [1, 1]
            assert 0 < measured["median"] <= measured["p99"]
        assert case["ratio"] == pytest.approx(ours["median"] / theirs["median"])
        assert len(ours["results"]) == len(theirs["results"]) > 0
        for mine, peers in zip(ours["results"], theirs["results"], strict=True):
            assert mine["shape"] == peers["shape"]
            assert mine["norm"] > 0
            assert mine["norm"] == pytest.approx(peers["norm"], rel=1e-5)
        assert case["largest difference of results"] < 1e-5


def test_a_case_that_does_not_exist_is_refused():
    command = [sys.executable, "-m", "benchmarks", "autograd", "-k", "nothing like it"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode != 0
    assert "no case of autograd has 'nothing like it' in its name" in done.stderr


def test_figures_of_a_comparison():
    rounds = {"a": [[1.0, 3.0], [2.0]], "b": [[4.0, 4.0], [8.0]]}
    results = {"a": [np.array([1.0, 2.0])], "b": [np.array([1.0, 2.5])]}
    comparison = Comparison("case", 2, rounds, results)
    assert comparison.steps("a") == [1.0, 3.0, 2.0]
    assert comparison.median("a") == 2.0
    assert comparison.p99("b") == pytest.approx(7.92)
    assert comparison.ratio == 0.5
    assert comparison.ratios == [0.5, 0.25]
    assert comparison.difference == 0.5


@pytest.mark.timeout(120)
def test_engines_are_measured_against_their_peers():
    pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    arguments = ["--ranks", 2, "--operations", "all_reduce", "barrier", "--sizes", 1024]
    lines = measure("benchmarks.collectives", *arguments, "--rounds", 1, "--seconds", 0.01)
    for engine in PEERS:
        for case in ("all_reduce    1 KiB", "barrier"):
            (row,) = (line for line in lines if line.startswith(engine) and case in line)
            median, _, its, _, ratio, *_, over = row.split(case)[1].split()
            assert float(ratio) == pytest.approx(float(median) / float(its), rel=0.05, abs=0.01)
            assert float(over) == pytest.approx(float(median) - float(its), abs=0.2)


@pytest.mark.timeout(120)
def test_broadcast_calls_are_measured():
    lines = measure("benchmarks.broadcast_call", "--receivers", 2, "--mib", 1, "--rounds", 1)
    (row,) = (line for line in lines if line.strip().startswith("1 MiB"))
    ours, theirs, ratio = map(float, (row.split()[2], row.split()[4], row.split()[6]))
    assert ratio == pytest.approx(ours / theirs, abs=0.02)


@pytest.mark.timeout(120)
def test_all_gather_is_measured():
    lines = measure("benchmarks.all_gather", "--workers", 2, "--rounds", 1, "--seconds", 0.01)
    for case in all_gather.SIZES:
        (row,) = (line for line in lines if f"2  {case} " in line)
        group, _, messages, _, ratio, *_ = row.split(case)[1].split()
        assert float(ratio) == pytest.approx(float(group) / float(messages), rel=0.05, abs=0.01)
