"""Programs end in every way: one run of some of those of `python -m tests.endings`; each takes a second."""

from tests.endings.__main__ import ROOT, endings

NAMES = ["handler", "thread", "twice", "atexit", "SIGTERM that exits", "Ctrl-C", "peer killed and handler"]


def test_programs_end_in_every_way(python, monkeypatch):
    monkeypatch.chdir(ROOT)
    for report in endings(0, 1, python, NAMES):
        assert (report.hangs, report.wrong) == ([], []), "\n".join([*report.hangs, *report.wrong])
        assert report.runs == 1
