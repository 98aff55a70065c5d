"""Remote tracebacks show the frames of users' functions, and none of gradwire's."""

import logging
import re
from collections.abc import AsyncIterator, Iterator

import pytest
from gradwire import rpc
from gradwire.errors import RemoteError
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.wire.failures import decode_failure, encode_failure, format_error

from tests.remote_functions import add


class Bakery:
    def bread(self) -> str:
        return {}["bread"]


def fail() -> str:
    return Bakery().bread()


def fail_in_nested_call() -> str:
    return rpc.rpc_sync("worker0", fail)


def fail_in_a_stream() -> Iterator[str]:
    yield fail()


async def fail_in_an_asynchronous_stream() -> AsyncIterator[str]:
    yield fail()


def frames(error: BaseException) -> list[str]:
    """Returns the functions in the remote traceback of an error."""
    assert isinstance(error.__cause__, RemoteError)
    assert error.__cause__.remote_traceback.splitlines()[-1].startswith(type(error).__name__)
    return re.findall(r"^  File .*, in (\w+)$", error.__cause__.remote_traceback, re.M)


FAILURES = {
    "a call": (lambda: rpc.rpc_sync("worker1", fail), ["fail", "bread"]),
    "a reference": (lambda: rpc.remote("worker1", fail).to_here(), ["fail", "bread"]),
    "a method": (lambda: rpc.remote("worker1", Bakery).rpc_sync().bread(), ["bread"]),
    "a stream": (lambda: list(rpc.rpc_stream("worker1", fail_in_a_stream)), ["fail_in_a_stream", "fail", "bread"]),
    "an asynchronous stream": (
        lambda: list(rpc.rpc_stream("worker1", fail_in_an_asynchronous_stream)),
        ["fail_in_an_asynchronous_stream", "fail", "bread"],
    ),
    "a function in C": (lambda: rpc.rpc_sync("worker1", int, ("bread",)), []),
    "wrong arguments": (lambda: rpc.rpc_sync("worker1", add, (1, 2, 3)), []),
    "an attribute that is not there": (lambda: rpc.remote("worker1", Bakery).rpc_sync().cake(), []),
}


@pytest.mark.parametrize("case", FAILURES)
def test_remote_tracebacks_begin_with_the_users_function(workers, case):
    a, _ = workers.rpc(2)
    call, expected = FAILURES[case]

    def check() -> None:
        with pytest.raises((AttributeError, KeyError, TypeError, ValueError)) as caught:
            call()
        assert frames(caught.value) == expected

    a.run(check)


def test_a_nested_call_shows_the_users_functions_of_both_workers(workers):
    a, _ = workers.rpc(2)

    def check() -> None:
        with pytest.raises(KeyError) as caught:
            rpc.rpc_sync("worker1", fail_in_nested_call)
        found = frames(caught.value)
        assert found[:2] == ["fail", "bread"]
        assert found[2] == "fail_in_nested_call"

    a.run(check)


def test_the_log_shows_the_users_frames(agents, caplog):
    (only,) = agents(1)
    caplog.set_level(logging.INFO, "gradwire.rpc.calls")
    with holder.using(only), pytest.raises(KeyError):
        rpc.rpc_sync("agent0", fail)
    assert re.findall(r"^  File .*, in (\w+)$", caplog.text, re.M) == ["fail", "bread"]


def test_errors_of_gradwire_itself_keep_their_frames(agents):
    (only,) = agents(1)
    with pytest.raises(ValueError, match="destination") as caught:
        only.worker(3.5)
    assert "in worker" in format_error(caught.value)
    assert "in worker" in decode_failure(encode_failure(caught.value), "a").__cause__.remote_traceback
