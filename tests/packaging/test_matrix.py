"""`make matrix` runs the right commands, and its table has the right numbers."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.packaging.matrix import ROOT, THIS_PYTHON, Result, main, table

FAKE = """#!/bin/sh
echo "make $*"
case "$*" in *2.99.0*) echo "=== 1 failed, 7 passed, 2 errors in 75.31s (0:01:15) ==="; exit 2;; esac
echo "=== 8 passed, 2 skipped in 12.50s ==="
"""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> str:
    """A make that runs no tests, and a checkout without environments."""
    (tmp_path / "requirements-torch.txt").write_text((ROOT / "requirements-torch.txt").read_text())
    monkeypatch.setattr("tests.packaging.matrix.ROOT", tmp_path)
    path = tmp_path / "make"
    path.write_text(FAKE)
    path.chmod(0o755)
    return os.fspath(path)


def test_each_release_has_its_environment(fake, tmp_path, capsys):
    assert main(["--make", fake, "2.13.0", "2.98.0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [f"torch 2.13.0 on {THIS_PYTHON}, in .venv", "make --no-print-directory test"]
    assert printed[4] == (
        'make --no-print-directory test VENV=.venv/torch-2.98.0 TORCH_PINS="torch==2.98.0" "setuptools>=77"'
    )
    assert "8 passed" in Path(tmp_path / ".venv" / "torch-2.98.0" / "test.log").read_text()


def test_other_interpreters_run_the_pinned_torch(fake, tmp_path, capsys, monkeypatch):
    shims, versions = tmp_path / "shims", tmp_path / "versions" / "3.99.1" / "bin"
    other = versions / "python3.99"
    for folder, program in ((shims, "/bin/false"), (versions, "/bin/true")):
        folder.mkdir(parents=True)
        (folder / "python3.99").symlink_to(program)
    monkeypatch.setenv("PATH", str(shims))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    names = [THIS_PYTHON, "python3.98", "python3.99"]
    assert main(["--make", f"/bin/sh {fake}", *(f"--python={name}" for name in names), "2.98.0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert f"make --no-print-directory test VENV=.venv/python3.99 PYTHON={other}" in printed
    assert [line.split()[:3] for line in printed[-3:-1]] == [
        ["2.98.0", THIS_PYTHON, "8"],
        ["2.13.0", "python3.99", "8"],
    ]
    assert printed[-1] == "not found, so not tested: python3.98"


def test_one_release_that_fails_fails_the_run(fake, capsys):
    assert main(["--make", fake, "2.99.0", "2.13.0"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows == [
        ["torch", "python", "passed", "failed", "errors", "skipped", "time"],
        ["2.99.0", THIS_PYTHON, "7", "1", "2", "0", "75", "s"],
        ["2.13.0", THIS_PYTHON, "8", "0", "0", "2", "12", "s"],
    ]


def test_a_run_without_tests_is_seen():
    assert table([Result("2.11.0", "python3.11", 2, "")]).splitlines()[1].split()[-3:] == ["no", "tests", "ran"]


def test_the_releases_are_those_that_are_supported():
    makefile, project = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))
    releases = next(line for line in makefile.splitlines() if line.startswith("TORCH  :=")).split()[2:]
    assert [release.rpartition(".")[0] for release in releases] == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert '"torch>=2.11,<2.16"' in project
    pythons = next(line for line in makefile.splitlines() if line.startswith("PYTHONS :=")).split()[2:]
    settings = tomllib.loads(project)
    classifiers = re.findall(r"Python :: (3\.\d+)'", str(settings["project"]["classifiers"]))
    assert pythons == [f"python{release}" for release in classifiers]
    assert settings["project"]["requires-python"] == f">={classifiers[0]}"
    assert settings["tool"]["mypy"]["python_version"] == classifiers[0]
