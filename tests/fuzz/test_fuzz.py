"""Parsers of bytes that others send take anything, and the fuzzer (`make fuzz`) notices one that does not."""

import os
import re

import pytest
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.messages import MessageType
from hypothesis import given, settings

from tests.fuzz import runner
from tests.fuzz.rpc_message_targets import ANSWER_TYPES, valid_messages
from tests.fuzz.target import run
from tests.fuzz.targets import TARGETS

NO_PROCESS = 2**22 + 1
"""Linux has no ids as large as this."""

CASES = [path for path in sorted(runner.CASES.glob("*/*")) if path.is_file()]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_random_inputs(target):
    @settings(max_examples=50)
    @given(target.inputs)
    def check(data: bytes) -> None:
        run(target, data)

    check()


def test_messages_of_all_types_are_among_the_inputs():
    types = {agent_pb2.Envelope.FromString(each).type for each in valid_messages()} | set(ANSWER_TYPES)
    missing = set(MessageType.values()) - {MessageType.MESSAGE_TYPE_UNSPECIFIED} - types
    assert not missing, f"{[*map(MessageType.Name, missing)]}: not in REQUESTS of rpc_message_targets.py"


def test_folders_of_killed_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.tempfile, "tempdir", str(tmp_path))
    kept = [tmp_path / f"{runner.FOLDER_PREFIX}{os.getpid()}-a", tmp_path / "other-1-a"]
    for folder in (*kept, tmp_path / f"{runner.FOLDER_PREFIX}{NO_PROCESS}-a"):
        folder.mkdir()
    runner.remove_leftovers()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_inputs_that_were_found(path):
    (target,) = (each for each in TARGETS if each.name == path.parent.name)
    run(target, path.read_bytes())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("memory", "bytes of input took 10[0-9]+ bytes of memory"),
        ("crash", "KeyError: 'a fault'"),
        ("exit", "its process ended with exit code 3"),
        ("hang", "the parser hangs"),
        ("none", ""),
    ],
)
def test_findings_are_reported_and_kept(tmp_path, fault, said):
    is_finding, report = runner.fuzz(fault, 200, 1, tmp_path, "tests.fuzz.faulty_targets")
    if not said:
        assert (is_finding, list(tmp_path.iterdir())) == (False, [])
        assert "200 inputs" in report
        return
    assert is_finding
    (case,) = (tmp_path / fault).iterdir()
    assert b"x" in case.read_bytes()
    assert str(case) in report
    assert re.search(said, report)
