"""`python -m gradwire` lists versions, engines and commands."""

import re

import gradwire
import pytest
import torch
from gradwire.__main__ import COMMANDS, describe, main
from gradwire.c10d import availability
from gradwire.c10d.availability import why_unavailable
from gradwire.c10d.backends import BUILTIN_ENGINES
from gradwire.errors import ProcessGroupError


def test_the_command_tells_versions_engines_and_commands(python):
    done = python.run("-m", "gradwire")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"gradwire {gradwire.__version__} in ")
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", done.stdout, re.M)
    for engine in BUILTIN_ENGINES:
        assert re.search(rf"^  {engine} +(available|not available: \S.*)$", done.stdout, re.M), done.stdout
    assert re.search("^  gloo +available$", done.stdout, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_exist(python, command):
    module = re.match(r"python -m (\S+)", command)[1]
    done = python.run("-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert module in done.stdout


def test_an_engine_that_cannot_run_here_says_why(monkeypatch):
    def fail() -> None:
        raise ProcessGroupError("it needs\n  a library: " + "x" * 1000)

    monkeypatch.setattr(availability, "_check_mpi", fail)
    assert why_unavailable("mpi").startswith("it needs a library: x")
    (line,) = re.findall("^  mpi .*$", describe(), re.M)
    assert "not available: it needs a library:" in line
    assert len(line) < 250


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="unknown engine 'ucc': the engines are gloo, mpi, nccl, shm"):
        why_unavailable("ucc")


def test_arguments_are_refused(capsys):
    with pytest.raises(SystemExit, match="takes no arguments, but was given --frobnicate"):
        main(["--frobnicate"])
    main(["--help"])
    assert "python -m gradwire" in capsys.readouterr().out
