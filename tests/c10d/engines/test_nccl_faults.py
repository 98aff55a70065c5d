"""Failures of the NCCL engine on fakes: timeouts, asynchronous errors, aborts and missing ranks."""

import itertools
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from gradwire.c10d import HashStore
from gradwire.c10d.engines import Setup
from gradwire.c10d.engines.nccl import NcclEngine
from gradwire.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    ProcessGroupError,
    UnsupportedOperationError,
)
from gradwire.net.host_identity import HostIdentity

from tests.c10d.engines.fake_nccl import CpuGpus
from tests.c10d.engines.nccl_ranks import (
    SUM,
    Rank,
    all_reduce,
    everywhere,
    running_ranks,
    stall_streams,
    start_stalled,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11


@pytest.fixture
def ranks():
    """Creates ranks; `ranks(2, interval=0.01)` passes options to the engines."""
    with running_ranks() as make:
        yield make


def test_an_operation_that_takes_too_long_fails_the_group(ranks):
    (member,) = ranks(1, interval=0.005)
    pending = start_stalled(member, timeout=0.02)
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce timed out after 0\.02 s"):
        pending.wait(30)
    with pytest.raises(CollectiveTimeoutError):
        all_reduce(member)
    member.engine.close()  # joins the watchdog, which reports the error last
    assert isinstance(member.failures[0], CollectiveTimeoutError)
    assert [communicator.released_by for communicator in member.library.communicators] == [["abort"]]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled"), "NCCL_ERROR_SYSTEM_ERROR: unhandled"),
        (KeyError(6), "error 6: a process exited or the network failed"),  # cupy lacks its name
    ],
)
def test_an_asynchronous_error_fails_the_group(ranks, error, text):
    (member,) = ranks(1, interval=0.005)
    all_reduce(member)
    stall_streams(member)
    pending = member.engine.all_reduce(torch.ones(2), SUM, 30)
    member.library.communicators[0].error = error
    with pytest.raises(ProcessGroupError, match=text):
        pending.wait(30)
    with pytest.raises(ProcessGroupError, match=text):
        member.engine.barrier(30)


def test_an_abort_wakes_waiting_threads(ranks):
    (member,) = ranks(1)
    pending = start_stalled(member)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            pending.wait(60)
        except GroupAbortedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    error = GroupAbortedError("rank 0 aborted the group")
    member.engine.fail(error)
    waiting.join()
    assert raised == [error]
    assert not member.failures  # the group has aborted itself


def test_communicators_are_aborted_in_one_group(ranks):
    def use_two_communicators(member: Rank) -> None:
        all_reduce(member)
        tensor = torch.ones(1)
        call = member.engine.recv if member.rank else member.engine.send
        call(tensor, 1 - member.rank, 0, 30).wait(None)

    members = ranks(2)
    everywhere(members, use_two_communicators)
    members[0].calls()
    members[0].engine.fail(GroupAbortedError("rank 0 aborted the group"))
    assert members[0].calls() == [("groupStart",), ("groupEnd",)]
    assert [communicator.released_by for communicator in members[0].library.communicators] == [["abort"]] * 2


def test_an_orderly_end_destroys_communicators(ranks):
    (member,) = ranks(1)
    all_reduce(member)
    member.engine.close()
    assert [communicator.released_by for communicator in member.library.communicators] == [["destroy"]]


def test_an_abort_ends_the_creation_of_a_communicator(ranks):
    members = ranks(2)
    pending = members[0].engine.send(torch.ones(2), 1, 0, 60)
    members[0].engine.fail(GroupAbortedError("rank 0 aborted the group"))
    with pytest.raises(GroupAbortedError):
        pending.wait(None)


def test_a_missing_rank_is_named(ranks):
    members = ranks(3)
    with pytest.raises(CollectiveTimeoutError, match="waiting for ranks 1, 2"):
        members[0].engine.all_reduce(torch.ones(2), SUM, 0.02)
    assert members[0].failures
    with pytest.raises(CollectiveTimeoutError):
        all_reduce(members[0])


def test_two_ranks_on_one_gpu_are_refused_by_all(ranks):
    members = ranks(2)
    members[1].gpus.name = members[0].gpus.name
    errors = []

    def refused(member: Rank) -> None:
        with pytest.raises(ProcessGroupError, match=r"ranks 0 and 1 both use GPU process 0/0.*set_device") as info:
            all_reduce(member)
        errors.append(info.value)

    everywhere(members, refused)
    assert len(errors) == 2


@pytest.mark.parametrize("insecure", [False, True])
def test_several_hosts_need_the_consent_of_all_ranks(ranks, monkeypatch, insecure):
    networks = itertools.count()
    monkeypatch.setattr(
        HostIdentity, "here", lambda *, insecure: HostIdentity("", f"network {next(networks)}", insecure)
    )
    members = ranks(2, insecure=insecure)
    if insecure:
        everywhere(members, all_reduce)
        return

    def refused(member: Rank) -> None:
        with pytest.raises(ProcessGroupError, match="NCCL connects them without .* not allowed by: rank 0, 1$"):
            all_reduce(member)

    everywhere(members, refused)


def test_an_error_of_nccl_ends_its_group_of_calls_and_fails_the_process_group(ranks):
    (member,) = ranks(1)
    all_reduce(member)
    member.calls()

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")

    member.library.communicators[0].allReduce = refuse
    steps = [lambda: member.engine.all_reduce(torch.ones(1), SUM, 30)] * 2
    with pytest.raises(ProcessGroupError, match=r"NCCL failed in all_reduce: NCCL_ERROR_INVALID_ARGUMENT"):
        member.engine.start(steps, None)
    assert member.calls() == [("groupStart",), ("groupEnd",)]
    assert len(member.failures) == 1


def test_without_a_gpu_or_cupy_it_says_what_is_missing(ranks, monkeypatch):
    setup = Setup(
        store=HashStore(),
        rank=0,
        size=1,
        timeout=1,
        device_type="cuda",
        global_ranks=(0,),
        group_name="",
        on_failure=print,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOperationError, match="torch finds no GPU here"):
        NcclEngine(setup)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedOperationError, match=r"it needs cupy: pip install 'cupy-cuda13x>=14'"):
        NcclEngine(setup, gpus=CpuGpus("here"))
    old, old_cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    old.__version__, old_cuda.nccl = "13.6.0", ModuleType("nccl")
    monkeypatch.setitem(sys.modules, "cupy", old)
    monkeypatch.setitem(sys.modules, "cupy.cuda", old_cuda)
    with pytest.raises(UnsupportedOperationError, match=r"it needs cupy 14 or newer, and finds 13\.6\.0"):
        NcclEngine(setup, gpus=CpuGpus("here"))
    setup.store.close()
