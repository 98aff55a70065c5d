"""Correct programs print nothing that torch's agent does not print: one run of `python -m tests.quiet_runs`."""

import pytest

from tests.quiet_runs.__main__ import PROGRAMS, ROOT, Report, new_lines, quiet_runs


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_are_quiet(python, monkeypatch, program):
    monkeypatch.chdir(ROOT)
    report = quiet_runs(program, "gradwire", 1, python.run)
    assert report.failed == []
    assert report.lines == {}


def test_what_torch_prints_too_is_allowed():
    allowed, report = Report("p", "torch", 1), Report("p", "gradwire", 1)
    allowed.add("[W1122 02:05:10.68 a.cpp:723] eof from 0x7f00\n")
    report.add("[W1123 14:15:16.17 a.cpp:723] eof from 0xabcd\nbread 12\nbread 13\n\n")
    assert new_lines(report, allowed) == {"bread #": 2}
    assert new_lines(report, None) == {"[W# #:#:#.# a.cpp:#] eof from #": 1, "bread #": 2}
