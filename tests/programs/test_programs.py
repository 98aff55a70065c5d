"""`make programs` runs programs on torch's agent and on gradwire, and its table shows the differences."""

from pathlib import Path

import pytest

from tests.programs.catalog import PROGRAMS, Program
from tests.programs.report import Comparison, table
from tests.programs.runner import Outcome, agree, run
from tests.remote_functions import wait_until

ROOT = Path(__file__).parent.parent.parent


def outcome(*results: str, status: int | None = 0, reason: str = "") -> Outcome:
    return Outcome(status, results, reason, 1.25, "")


@pytest.fixture
def script(tmp_path):
    def write(text: str, seconds: float = 60.0) -> Program:
        (tmp_path / "script.py").write_text(text)
        return Program(name="mine", source="mine", path="script.py", timeout_s=seconds)

    return write


@pytest.mark.timeout(300)
def test_a_program_ends_alike_on_both(python, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = python.run(
        "-m", "tests.programs", "rnn", "--python", python.executable, timeout=280
    )  # of two processes
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| rnn")]
    assert [cell.split()[0] for cell in line.strip("| ").split("|")[2:]] == ["ok", "ok", "none"]
    assert "1 programs, 0 differences" in done.stdout


def test_results_and_reasons_are_read_from_what_is_printed(script, tmp_path):
    good = run(
        script("print('result b 2'); print('noise'); print('result a 1')"), on_gradwire=False, folder=tmp_path
    )
    assert (good.succeeded, good.status, good.results, good.reason) == (True, 0, ("result a 1", "result b 2"), "")
    bad = run(script("raise ValueError('no such thing')"), on_gradwire=False, folder=tmp_path)
    assert (bad.succeeded, bad.status, bad.reason) == (False, 1, "ValueError: no such thing")
    killed = run(script("import os; os.kill(os.getpid(), 9)"), on_gradwire=False, folder=tmp_path)
    assert (killed.status, killed.reason) == (-9, "exit status -9")


def test_lines_of_processes_side_by_side_are_whole(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    unbuffered = run(
        script("import sys; print('result', sys.stdout.write_through)"), on_gradwire=False, folder=tmp_path
    )
    assert unbuffered.results == ("result False",)


def test_no_process_outlives_a_program(script, tmp_path):
    slow = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    late = run(script(slow, seconds=10.0), on_gradwire=False, folder=tmp_path)
    assert (late.status, late.reason) == (None, "took more than 10 s")
    pid = int((tmp_path / "child").read_text())
    wait_until(lambda: _has_ended(pid))


def _has_ended(pid: int) -> bool:
    """Returns whether a process has ended; a killed one may wait for init to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_which_results_agree():
    assert agree(["result loss 1.00001 x"], ["result loss 1.00002 x"], 1e-4)
    assert agree(["result nan"], ["result nan"], 1e-4)
    assert agree(["result a 1.00001", "result b 2.0"], ["result a 1.00002", "result b 2.00001"], 1e-4)
    for other in (
        ["result loss 1.01 x"],
        ["result", "loss 1.00001 x"],
        ["result loss 1.00001 y"],
        ["result loss 1.00001 x", "more"],
        [],
    ):
        assert not agree(["result loss 1.00001 x"], other, 1e-4)


def test_what_is_a_difference():
    program = Program(name="one", source="some", path="one.py")
    failed = outcome(status=1, reason="ValueError: no")
    slow = outcome(status=None, reason="took more than 180 s")
    for torch, gradwire, difference, told in (
        (outcome("result 1"), outcome("result 1"), "", "none"),
        (outcome("result 1"), outcome("result 2"), "other results", "other results"),
        (outcome("result 1"), failed, "fails on gradwire: ValueError: no", "fails on gradwire: ValueError: no"),
        (slow, outcome("result 1"), "fails on torch's agent: took more than 180 s", None),
        (failed, failed, "", "none; fails on both: ValueError: no"),
    ):
        comparison = Comparison(program, torch, gradwire)
        assert comparison.difference == difference
        assert comparison.row[-1] == (told or difference)
    assert table([Comparison(program, outcome(), failed)]).splitlines() == [
        "| program | code | torch    | gradwire    | difference |",
        "| ------- | ---- | -------- | ----------- | ---------- |",
        "| one     | some | ok 1.2 s | fails 1.2 s | fails on gradwire: ValueError: no |",
    ]


def test_the_catalog_names_scripts_that_are_there():
    folder = ROOT / "tests" / "programs"
    named = {program.path for program in PROGRAMS}
    found = {
        str(path.relative_to(folder)) for kind in ("examples", "packages") for path in (folder / kind).glob("*.py")
    }
    assert named == found
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
