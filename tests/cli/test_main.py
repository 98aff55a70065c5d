"""`python -m gradwire` lists versions and engines."""

import re
import tomllib
from pathlib import Path

import gradwire
import pytest
import torch
from gradwire.__main__ import describe, main
from gradwire.c10d.groups import backends
from gradwire.c10d.groups.backends import BUILTIN_ENGINES, why_unavailable
from gradwire.errors import ProcessGroupError


def test_the_command_tells_versions_and_engines(python):
    done = python.run("-m", "gradwire")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"gradwire {gradwire.__version__} in ")
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", done.stdout, re.M)
    for engine in BUILTIN_ENGINES:
        assert re.search(rf"^  {engine} +(available|not available: \S.*)$", done.stdout, re.M), done.stdout
    assert re.search("^  gloo +available$", done.stdout, re.M)


def test_an_engine_that_cannot_run_here_says_why(monkeypatch):
    def fail() -> None:
        raise ProcessGroupError("it needs\n  a library: " + "x" * 1000)

    monkeypatch.setattr(backends, "_check_mpi", fail)
    assert why_unavailable("mpi").startswith("it needs a library: x")
    (line,) = re.findall("^  mpi .*$", describe(), re.M)
    assert "not available: it needs a library:" in line
    assert len(line) < 250


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="unknown engine 'ucc': the engines are gloo, mpi, nccl, shm"):
        why_unavailable("ucc")


def test_arguments_are_those_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["frobnicate"])
    assert "no command 'frobnicate'" in capsys.readouterr().err


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((Path(gradwire.__file__).parent / "pyproject.toml").read_text())
    assert gradwire.__version__ == project["project"]["version"]
