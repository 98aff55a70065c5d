"""`gradwire bench` runs the benchmarks of a checkout. Nothing is measured here."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from gradwire.cli import bench
from gradwire.cli.group import gradwire

from benchmarks import __main__ as table


@pytest.mark.parametrize("options", [[], ["--full", "--json", "figures.json"], ["-k", "noop", "-k", "tiny"]])
def test_it_passes_on_arguments_that_the_benchmarks_take(monkeypatch, options):
    ran = []
    monkeypatch.setattr(
        bench.subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=3)
    )
    done = CliRunner().invoke(gradwire, ["bench", *options], standalone_mode=False)
    assert (done.return_value, done.exception) == (3, None)
    (command,) = ran
    arguments = table._arguments(command[3:])
    assert arguments.rounds == (bench.FULL_ROUNDS if "--full" in options else bench.SHORT_ROUNDS)
    for word in arguments.k or [""]:
        assert table._cases(None, [word])


def test_a_package_without_benchmarks_says_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    done = CliRunner().invoke(gradwire, ["bench"])
    assert (done.exit_code, "git" in done.output, "pip install -e ." in done.output) == (1, True, True)
