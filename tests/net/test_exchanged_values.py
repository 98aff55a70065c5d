"""Values that other processes have put into the store are checked before they are used."""

import json

import pytest
from gradwire.c10d.engines.mpi import world
from gradwire.c10d.groups import failure_detector
from gradwire.c10d.rendezvous.start_barrier import Outcome, Registration
from gradwire.errors import ProcessGroupError, RendezvousError
from gradwire.net.exchanged_values import MAX_JSON_BYTES, parse_dict, parse_list
from gradwire.net.host_identity import HostIdentity

NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "text", ["[1]", "[1, 2, 3]", '["1", 2]', "[true, 2]", "{}", "null", "[1, ", NESTED, b"\xff"]
)
def test_lists_have_one_value_of_each_type(text):
    assert parse_list("[1, 2]", int, int) == [1, 2]
    with pytest.raises(ValueError, match="this is no list of int, int"):
        parse_list(text, int, int)


@pytest.mark.parametrize("text", ['{"a": "1"}', "{}", '{"a": 1, "b": 2}', "[1]", NESTED])
def test_objects_have_these_names_and_types(text):
    assert parse_dict('{"a": 1}', {"a": int}) == {"a": 1}
    with pytest.raises(ValueError, match="this is no object with a"):
        parse_dict(text, {"a": int})


def test_long_texts_are_not_parsed():
    longest = json.dumps(["x" * (MAX_JSON_BYTES - 4)])
    assert parse_list(longest, str) == ["x" * (MAX_JSON_BYTES - 4)]
    with pytest.raises(ValueError, match="this is no list of str"):
        parse_list(longest + " ", str)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"\xff\xfe", b'["a", 1, "b", 2, 3, 4]', NESTED])
@pytest.mark.parametrize(
    ("parse", "error", "what"),
    [
        (Registration.from_json, RendezvousError, "a worker's registration"),
        (Outcome.from_json, RendezvousError, "the outcome of a rendezvous"),
        (HostIdentity.from_json, ProcessGroupError, "the identity of a rank's host"),
        (failure_detector._parse_address, ProcessGroupError, "the address of rank 0's failure detector"),
        (lambda text: world._parse(text, str, int), ProcessGroupError, "what a rank knows of its MPI world"),
    ],
)
def test_other_values_are_reported(parse, error, what, text):
    with pytest.raises(error, match=f"the store has .* where {what} should be: install the same version"):
        parse(text)


def test_a_port_is_a_port():
    assert failure_detector._parse_address(b'["10.0.0.1", 29500, "token"]') == ("10.0.0.1", 29500, "token")
    with pytest.raises(ProcessGroupError):
        failure_detector._parse_address(b'["10.0.0.1", 65536, "token"]')
