"""`gradwire certs`: tokens, CAs, certificates, and what it refuses."""

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradwire.cli.certs import command
from gradwire.cli.group import gradwire, run_command
from gradwire.errors import CredentialsError
from gradwire.net.security import Credentials, issuing, worker_host_name
from gradwire.net.security.identity import host_names

from tests.certificates import make_authority, write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run_here(*arguments: object) -> str:
        run_command(command, [str(each) for each in arguments], "gradwire certs")
        return capsys.readouterr().out

    return run_here


@pytest.fixture
def refused(run: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run_here(*arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        return f"{caught.value}: {capsys.readouterr().err}"

    return run_here


def variables(output: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.splitlines())


def test_a_token_is_accepted_and_new_each_time(run):
    tokens = [run("token").strip() for _ in range(2)]
    assert [Credentials(token=token).token for token in tokens] == tokens
    assert tokens[0] != tokens[1]


def test_the_certificate_of_a_worker(run, tmp_path):
    run("ca", tmp_path / "job")
    made = variables(run("worker", "trainer:1", "--ca", tmp_path / "job", "--days", 3, "--out", tmp_path / "new"))
    credentials = Credentials.from_environment(made)
    credentials.identity("trainer:1")
    with pytest.raises(CredentialsError, match="not for worker 'trainer:2'"):
        credentials.identity("trainer:2")
    for path in [*(tmp_path / "job").iterdir(), *(tmp_path / "new").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"trainer:1.pem", "trainer:1-key.pem"}
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700


def test_nothing_is_overwritten_unless_asked(run, refused, tmp_path):
    run("ca", tmp_path)
    made = variables(run("worker", "a", "--ca", tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "ca-key.pem' exists" in refused("ca", tmp_path)
    assert "a-key.pem' exists" in refused("worker", "a", "--ca", tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    run("worker", "a", "--ca", tmp_path, "--replace")
    changed = {path.name for path in tmp_path.iterdir() if path.read_bytes() != before[path]}
    assert changed == {"a.pem", "a-key.pem"}
    Credentials.from_environment(made).identity("a")


def test_what_cannot_be_made_is_said(run, refused, tmp_path):
    assert "ca.pem" in refused("worker", "a", "--ca", tmp_path)
    run("ca", tmp_path, "--days", 2)
    assert "too long" in refused("worker", "a", "--ca", tmp_path, "--days", 3)
    assert refused("ca", tmp_path / "new", "--days", 0).startswith("2: Usage")
    assert "must match" in refused("worker", "a/b", "--ca", tmp_path)
    assert "must match" in refused("names", "a b")
    run("ca", tmp_path / "other")
    os.replace(tmp_path / "other" / "ca.pem", tmp_path / "ca.pem")
    assert "not the key of ca.pem" in refused("worker", "a", "--ca", tmp_path)
    (tmp_path / "ca.pem").write_text("nothing")
    assert "in PEM" in refused("worker", "a", "--ca", tmp_path)
    (tmp_path / "file").touch()
    assert "cannot be written" in refused("ca", tmp_path / "file")


def test_the_names_for_another_ca(run):
    assert run("names", "worker0").split() == ["gradwire.invalid", worker_host_name("worker0")]


def test_as_a_program(python, tmp_path: Path):
    done = python.run("-m", "gradwire", "certs", "ca", tmp_path / "x")
    assert (done.returncode, done.stderr) == (0, "")
    again = python.run("-m", "gradwire", "certs", "ca", tmp_path / "x")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("Error: ")


def test_the_command_that_is_named_for_a_certificate_of_another_ca_prints_the_names(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(issuing, "host_names", lambda _worker: ["www.example.org"])
        credentials = write(tmp_path, make_authority(), None)
    with pytest.raises(CredentialsError) as caught:
        credentials.identity("worker0")
    (named,) = re.findall("`gradwire (.*) WORKER` prints those that it needs", str(caught.value))
    done = CliRunner().invoke(gradwire, [*named.split(), "worker0"])
    assert done.output.splitlines() == list(host_names("worker0"))
