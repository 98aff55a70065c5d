"""The benchmarks run, and both systems compute the same. How fast they are is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gatherings
from benchmarks.autograd import CASES
from benchmarks.harness import Comparison

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_every_case_of_autograd_is_measured_on_both_systems(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "autograd", "--rounds", "2", "--seconds", "0", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "load average before: " in done.stdout
    figures = json.loads(file.read_text())
    assert [case["case"] for case in figures["cases"]] == [case.name for case in CASES]
    for case in figures["cases"]:
        assert any(line.startswith(case["case"]) for line in done.stdout.splitlines())
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
def test_broadcast_calls_are_measured():
    arguments = ["--receivers", "2", "--mib", "1", "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.broadcast_call", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.strip().startswith("1 MiB"))
    ours, theirs, ratio = map(float, (row.split()[2], row.split()[4], row.split()[6]))
    assert ratio == pytest.approx(ours / theirs, abs=0.02)


@pytest.mark.timeout(120)
def test_gatherings_are_measured():
    arguments = ["--workers", "2", "--rounds", "1", "--seconds", "0.01"]
    command = [sys.executable, "-m", "benchmarks.gatherings", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for case in gatherings.SIZES:
        (row,) = (line for line in done.stdout.splitlines() if f"2  {case} " in line)
        group, _, messages, _, ratio, *_ = row.split(case)[1].split()
        assert float(ratio) == pytest.approx(float(group) / float(messages), rel=0.05, abs=0.01)
