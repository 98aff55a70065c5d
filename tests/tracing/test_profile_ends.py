"""However a profile ends, no worker goes on recording for it, and no other profile ends with it."""

import threading

import gradwire
import pytest
from gradwire import rpc
from gradwire.errors import RpcError, RpcTimeoutError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.tracing import group_profile
from gradwire.tracing.group_profile import GroupProfile, Recorder
from gradwire.tracing.profile import _Session
from gradwire.tracing.recording import ProfileRequest

from tests.remote_functions import set_event, wait_for, wait_until


def is_recording():
    return current_agent().extension(GroupProfile).is_on


def start(profile_id, worker="worker1"):
    agent = current_agent()
    request = ProfileRequest(profile=profile_id).encode()
    return agent.request(agent.worker(worker), Request(MessageType.PROFILE_START, request, timeout=60))


def stop(profile_id, worker="worker1"):
    agent = current_agent()
    return agent.request(agent.worker(worker), Request(MessageType.PROFILE_STOP, profile_id, timeout=60))


def hold_back_beginnings(name):
    """Has the beginnings of profiles on this worker wait for an event. Others are not held up."""
    begin = Recorder.__init__

    def wait_first(self, *args):
        wait_for(name)
        begin(self, *args)

    group_profile.Recorder.__init__ = wait_first


def test_a_worker_that_begins_too_late_does_not_go_on(workers, tmp_path):
    a, b = workers.rpc(2)
    b.run(hold_back_beginnings, "begin")

    def profile_in_vain():
        with pytest.raises(RpcTimeoutError), gradwire.profile(tmp_path / "trace.json", ["worker1"], timeout=0.5):
            raise AssertionError("it has begun")
        rpc.rpc_sync("worker1", set_event, ("begin",))

    a.run(profile_in_vain)
    b.run(until_nothing_is_recorded)


def until_nothing_is_recorded():
    """Waits until this worker can be profiled, which is so when all earlier profiles have ended."""
    name = current_agent().info.name

    def can_begin():
        try:
            start("the next", name).wait()
        except RpcError:
            return False
        return True

    wait_until(can_begin)
    stop("the next", name).wait()


def test_a_beginning_that_arrives_after_its_end_is_refused(workers):
    a, _ = workers.rpc(2)

    def end_and_begin():
        with pytest.raises(RpcError, match="not being profiled by 'worker0'"):
            stop("first").wait()
        with pytest.raises(RpcError, match="has ended before it began"):
            start("first").wait()
        start("second").wait()
        with pytest.raises(RpcError, match="not being profiled by 'worker0'"):  # of the first one
            stop("first").wait()
        assert rpc.rpc_sync("worker1", is_recording)
        stop("second").wait()

    a.run(end_and_begin)


def interrupt_profile(path, where):
    """Profiles two workers until Ctrl-C, as it were, in one of the steps. Returns whether the block has run."""
    kinds = {"starts": MessageType.PROFILE_START, "collects": MessageType.PROFILE_STOP}
    ask, read = _Session._ask, _Session._read_clock
    begun = []

    def interrupted_ask(self, worker, kind, value):
        if kind != kinds.get(where):
            return ask(self, worker, kind, value)
        if worker.name == "worker2":
            raise KeyboardInterrupt
        answer = ask(self, worker, kind, value)
        answer.wait()
        return answer

    def interrupted_read(self, worker):
        if where.endswith("clocks") and bool(begun) == ("last" in where):
            raise KeyboardInterrupt
        return read(self, worker)

    _Session._ask, _Session._read_clock = interrupted_ask, interrupted_read
    try:
        with gradwire.profile(path, ["worker1", "worker2"]):
            begun.append(True)
    except KeyboardInterrupt:
        return bool(begun)
    finally:
        _Session._ask, _Session._read_clock = ask, read
    raise AssertionError("it was not interrupted")


@pytest.mark.parametrize("where", ["starts", "reads the first clocks", "reads the last clocks", "collects"])
def test_a_profile_that_is_interrupted_leaves_nobody_recording(workers, tmp_path, where):
    a, b, c = workers.rpc(3)
    has_run = a.run(interrupt_profile, tmp_path / "trace.json", where)
    assert has_run == (where in ("reads the last clocks", "collects"))
    for each in b, c:
        each.run(until_nothing_is_recorded)


def test_a_profile_begins_while_the_last_one_ends(workers, tmp_path):
    a, b = workers.rpc(2)

    def hold_back_stops():
        stop = Recorder.stop

        def wait_first(self):
            group_profile.Recorder.stop = stop
            set_event("stopping")
            wait_for("stop")
            return stop(self)

        group_profile.Recorder.stop = wait_first

    def begin_meanwhile():
        start("first").wait()
        first = stop("first")
        rpc.rpc_sync("worker1", wait_for, ("stopping",))
        second = start("second")
        rpc.rpc_sync("worker1", threading.active_count)  # the request has arrived before this one
        rpc.rpc_sync("worker1", set_event, ("stop",))
        second.wait()
        assert isinstance(first.wait(), bytes)
        stop("second").wait()

    b.run(hold_back_stops)
    a.run(begin_meanwhile)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "3",
        "{}",
        '{"profile": "", "settings": [], "max_bytes": 100000}',
        '{"profile": "p", "settings": [[]], "max_bytes": 100000}',
        '{"profile": "p", "settings": ["use_cuda"], "max_bytes": 100000}',
        '{"profile": "p", "settings": [], "max_bytes": 1}',
        '{"profile": "p", "settings": [], "max_bytes": true}',
    ],
)
def test_what_is_no_beginning_is_refused(value):
    with pytest.raises(ValueError, match="malformed message"):
        ProfileRequest.decode(value)


def test_a_request_travels():
    request = ProfileRequest(profile="p", settings=("with_stack",), max_bytes=1 << 20)
    assert ProfileRequest.decode(request.encode()) == request
