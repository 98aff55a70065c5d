"""`make matrix` runs the right commands, and its table has the right numbers."""

import os
from pathlib import Path

import pytest

from tests.matrix import ROOT, Result, main, table

FAKE = """#!/bin/sh
echo "make $*"
case "$*" in *2.99.0*) echo "=== 1 failed, 7 passed, 2 errors in 75.31s (0:01:15) ==="; exit 2;; esac
echo "=== 8 passed, 2 skipped in 12.50s ==="
"""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> str:
    """A make that runs no tests, and a checkout without environments."""
    (tmp_path / "requirements-torch.txt").write_text((ROOT / "requirements-torch.txt").read_text())
    monkeypatch.setattr("tests.matrix.ROOT", tmp_path)
    path = tmp_path / "make"
    path.write_text(FAKE)
    path.chmod(0o755)
    return os.fspath(path)


def test_each_release_has_its_environment(fake, tmp_path, capsys):
    assert main(["--make", fake, "2.13.0", "2.98.0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["torch 2.13.0, in .venv", "make --no-print-directory test"]
    assert printed[4] == (
        'make --no-print-directory test VENV=.venv/torch-2.98.0 TORCH_PINS="torch==2.98.0" "setuptools>=77"'
    )
    assert "8 passed" in Path(tmp_path / ".venv" / "torch-2.98.0" / "test.log").read_text()


def test_one_release_that_fails_fails_the_run(fake, capsys):
    assert main(["--make", fake, "2.99.0", "2.13.0"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows == [
        ["torch", "passed", "failed", "errors", "skipped", "time"],
        ["2.99.0", "7", "1", "2", "0", "75", "s"],
        ["2.13.0", "8", "0", "0", "2", "12", "s"],
    ]


def test_a_run_without_tests_is_seen():
    assert table([Result("2.11.0", 2, "")]).splitlines()[1].split()[-3:] == ["no", "tests", "ran"]


def test_the_releases_are_those_that_are_supported():
    makefile, project = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))
    releases = next(line for line in makefile.splitlines() if line.startswith("TORCH  :=")).split()[2:]
    assert [release.rpartition(".")[0] for release in releases] == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert '"torch>=2.11,<2.16"' in project
