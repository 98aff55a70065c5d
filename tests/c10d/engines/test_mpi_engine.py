"""The MPI engine on MPICH, with real processes: in worlds that form by themselves, and under mpiexec."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    ProcessGroupError,
    RankLostError,
    UnsupportedOperationError,
)

from tests.c10d.members import (
    MIB,
    collect_in_place,
    everywhere,
    future_of_a_sum,
    join,
    join_all,
    leave,
    opened,
    receive,
    reduce_until_it_fails,
    reduce_within,
    send,
    sum_in_group_of,
    total,
    wrong_cells,
)
from tests.certificates import TOKEN, make_authority, write
from tests.interpreters import Python

pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")

from gradwire.c10d.engines.mpi import engine as mpi_engine
from gradwire.c10d.engines.mpi import pmi as pmi_module

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

BACKEND = "gradwire_mpi"
"""The backend of the groups that the fixture `group` makes."""


@pytest.mark.timeout(300)
def test_every_operation_on_dtypes_of_each_kind(group):
    assert everywhere(group(2), wrong_cells, seconds=280) == [[], []]


@pytest.mark.parametrize("dies", [0, 2])
def test_a_killed_rank_fails_the_others_in_the_middle(group, tmp_path, dies):
    started = group(3)
    pending = [member.start(reduce_until_it_fails, dies) for member in started]
    left = [member for rank, member in enumerate(started) if rank != dies]
    for rank, each in enumerate(pending):
        if rank != dies:
            with pytest.raises(RankLostError, match=f"rank {dies} is lost") as caught:
                each.result()
            assert caught.value.rank == dies
    everywhere(left, leave)
    with pytest.raises(ProcessGroupError, match="MPI cannot be used any more"):
        join_all(left, tmp_path / "again", "gradwire_mpi")


@pytest.mark.parametrize("source", [1, None])
def test_a_death_wakes_ranks_that_wait_for_others(group, source):
    first, second, third = group(3)
    waiting = first.start(receive, source)
    assert everywhere([second, third], dist.get_rank) == [1, 2]
    third.kill()
    with pytest.raises(RankLostError, match="rank 2"):
        waiting.result()


def test_a_departed_rank_is_not_waited_for(group):
    first, second = group(2)
    waiting = first.start(total)
    second.run(leave)
    with pytest.raises(RankLostError, match="left the group"):
        waiting.result()


def test_a_timeout_fails_the_group_until_it_is_created_again(group, tmp_path):
    started = group(2)
    with pytest.raises(CollectiveTimeoutError, match="all_reduce timed out after 0.2 s"):
        started[0].run(reduce_within, 0.2)
    with pytest.raises(CollectiveTimeoutError):
        started[0].run(total)
    everywhere(started, leave)
    join_all(started, tmp_path / "again", "gradwire_mpi")
    assert everywhere(started, total) == [1.0, 1.0]


def abort_while_waiting() -> None:
    work = dist.irecv(torch.zeros(1), 1)
    assert not work.is_completed()
    dist.group.WORLD.abort()
    work.wait()


def test_abort_wakes_waiting_threads(group):
    first, _ = group(2)
    with pytest.raises(GroupAbortedError):
        first.run(abort_while_waiting)


def test_subgroups_and_later_groups(group, tmp_path):
    started = group(3)
    assert everywhere(started, sum_in_group_of, 0, 2) == [2.0, None, 2.0]
    assert everywhere(started, sum_in_group_of, 1, 2) == [None, 3.0, 3.0]
    everywhere(started, leave)
    others = [started[2], started[0]]  # in another order than in the world
    join_all(others, tmp_path / "again", "gradwire_mpi")
    assert everywhere(others, total) == [1.0, 1.0]


def test_a_process_is_in_one_world_only(group, workers, tmp_path):
    started = group(2)
    everywhere(started, leave)
    mixed = [started[0], *workers(1)]
    with pytest.raises(ProcessGroupError, match="not in one MPI world"):
        join_all(mixed, tmp_path / "again", "gradwire_mpi")


def test_inputs_and_outputs_may_share_memory(group):
    assert everywhere(group(2), collect_in_place) == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]]


def test_a_future_is_resolved_without_a_wait(group):
    assert everywhere(group(2), future_of_a_sum) == [6.0, 6.0]


def send_and_wait_for_key(key: str) -> None:
    """A message must be sent although no thread of this rank waits in MPI."""
    work = dist.isend(torch.ones(4 * MIB), 1)
    opened[-1].wait([key])
    work.wait()


def receive_and_set(key: str) -> float:
    tensor = torch.zeros(4 * MIB)
    dist.recv(tensor, 0)
    opened[-1].set(key, "here")
    return tensor.sum().item()


def test_operations_that_nobody_waits_for_make_progress(group):
    first, second = group(2)
    sending = first.start(send_and_wait_for_key, "received")
    assert second.run(receive_and_set, "received") == 4 * MIB
    sending.result()


def processor_seconds_of_a_wait() -> float:
    began, tensor = time.process_time(), torch.zeros(1)
    with pytest.raises(CollectiveTimeoutError):
        reduce_within(3.0)
    assert tensor.item() == 0
    return time.process_time() - began


def test_an_idle_wait_uses_little_processor_time(group):
    first, _ = group(2)
    assert first.run(processor_seconds_of_a_wait) < 0.3


def receive_into_less() -> None:
    dist.recv(torch.zeros(2), 1)


def send_more(count: int) -> None:
    dist.send(torch.zeros(count), 0)


@pytest.mark.parametrize("count", [1, 3])
def test_messages_of_another_size_are_refused(group, count):
    first, second = group(2)
    receiving = first.start(receive_into_less)
    second.run(send_more, count)
    with pytest.raises(ProcessGroupError, match="recv"):
        receiving.result()


def test_tags_that_mpi_does_not_have_are_refused(group):
    first, _ = group(2)
    with pytest.raises(UnsupportedOperationError, match="tags from 0 to"):
        first.run(send, 1, 2**31 - 1)


def limit_counts() -> None:
    """Limits counts as an MPI before version 4 does, but to 1000."""
    dist.group.WORLD.engine("cpu")._has_large_counts = False
    mpi_engine.MAX_COUNT, mpi_engine.PIECE_BYTES = 1000, 512


def exchange_in_pieces() -> list[bool]:
    rank = dist.get_rank()
    numbers = torch.arange(999, dtype=torch.float32).view(27, 37)
    reduced, sent, averaged = numbers + rank, numbers * rank, (numbers + rank).bfloat16()
    dist.all_reduce(reduced)
    dist.broadcast(sent, 1)
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    gathered = torch.empty_like(numbers)
    sending = dist.isend(numbers + 5 * rank, 1 - rank)
    source = dist.recv(gathered, 1 - rank)
    sending.wait()
    whole = torch.empty(200)  # larger than the limit, but the part of each rank is not
    dist.all_gather_into_tensor(whole, numbers.view(-1)[:100].contiguous())
    return [
        torch.equal(reduced, 2 * numbers + 1),
        torch.equal(sent, numbers),
        torch.allclose(averaged.float(), numbers + 0.5, rtol=0.01),
        torch.equal(gathered, numbers + 5 * (1 - rank)),
        source == 1 - rank,
        torch.equal(whole, numbers.view(-1)[:100].repeat(2)),
    ]


def gather_too_much() -> None:
    part = torch.ones(200)
    dist.all_gather([torch.empty(200), torch.empty(200)], part)


def receive_too_much() -> None:
    dist.recv(torch.empty(300))


def test_large_tensors_are_divided_before_mpi_4(group):
    started = group(2)
    everywhere(started, limit_counts)
    assert everywhere(started, exchange_in_pieces) == [[True] * 6] * 2
    for each in started:
        with pytest.raises(UnsupportedOperationError, match="counts to 1000 only, and this takes 1600"):
            each.run(gather_too_much)
        with pytest.raises(UnsupportedOperationError, match="recv from any rank"):
            each.run(receive_too_much)
    assert everywhere(started, total) == [1.0, 1.0]


def under_mpiexec(folder: str) -> None:
    """Joins a group whose ranks are not those of MPI's world."""
    rank = 1 - int(os.environ["PMI_RANK"])
    join(Path(folder) / "store", rank, 2, "gradwire_mpi", 60)
    Path(folder, f"result{rank}").write_text(json.dumps([total(), sum_in_group_of(0, 1)]))
    leave()


def run_under_mpiexec(python: Python, program: str) -> None:
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    ran = subprocess.run(
        [mpiexec, "-n", "2", python.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_it_uses_the_world_of_mpiexec(python, tmp_path):
    program = f"from tests.c10d.engines.test_mpi_engine import under_mpiexec; under_mpiexec({str(tmp_path)!r})"
    run_under_mpiexec(python, program)
    assert [json.loads((tmp_path / f"result{rank}").read_text()) for rank in range(2)] == [[1.0, 1.0]] * 2


def init_without_address(folder: str) -> None:
    c10d.init_process_group("shm")
    mpi = c10d.new_group(backend="mpi")
    ranks = torch.tensor([c10d.get_rank()])
    c10d.all_reduce(ranks)
    c10d.all_reduce(ranks, group=mpi)
    Path(folder, f"result{c10d.get_rank()}").write_text(f"{c10d.get_world_size()} {ranks.item()}")
    c10d.destroy_process_group()


@pytest.mark.parametrize("credentials", ["none", "token", "certificates"])
def test_no_address_is_needed_under_mpiexec(python, tmp_path, monkeypatch, credentials):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if credentials == "token":
        monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    elif credentials == "certificates":
        certified = write(tmp_path / "of-job", make_authority(), None)
        for name in ("ca", "certificate", "key"):
            monkeypatch.setenv(f"GRADWIRE_{name.upper()}", str(getattr(certified, name)))
    run_under_mpiexec(
        python,
        f"from tests.c10d.engines import test_mpi_engine; test_mpi_engine.init_without_address({str(tmp_path)!r})",
    )
    assert [(tmp_path / f"result{rank}").read_text() for rank in range(2)] == ["2 2"] * 2


def test_workers_exit_cleanly(group):
    started = group(2)
    for member in started:
        member._connection.send_bytes(b"")  # it returns from its main function
    for member in started:
        member.process.join()
        assert member.process.exitcode == 0
        assert "abort" not in member.describe().lower()


SCRIPT = """
import sys, torch
from gradwire import c10d
c10d.init_process_group("mpi", sys.argv[1], rank=int(sys.argv[2]), world_size=2)
number = torch.ones(1)
c10d.all_reduce(number)
assert number == 2
"""


def test_scripts_exit_cleanly(tmp_path, python):
    # Unlike the workers of these tests, scripts run the exit handlers of C libraries.
    url = f"file://{tmp_path}/store"
    with contextlib.ExitStack() as stack:
        said = stack.enter_context((tmp_path / "said").open("w"))
        ranks = [
            stack.enter_context(python.start("-c", SCRIPT, url, rank, stdout=said, stderr=said))
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.wait(60) == 0, (tmp_path / "said").read_text()


@pytest.fixture
def pmi() -> Iterator[tuple[pmi_module.PmiServer, str]]:
    """Starts a PMI server for a world of two ranks."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    server = pmi_module.PmiServer(listener, [0, 0])
    yield server, f"{host}:{port}"
    for each in server.ids:  # the server ends with its clients
        with contextlib.suppress(ConnectionError):
            ask(f"{host}:{port}", f"cmd=initack pmiid={each}\n")
    server.finish(30)
    server._thread.join(30)


class FailingListener:
    """A listening socket whose next calls of `accept` fail."""

    def __init__(self, listener: socket.socket, failures: Iterator[OSError]) -> None:
        self._listener = listener
        self._failures = failures

    def accept(self) -> Any:
        for failure in self._failures:
            raise failure
        return self._listener.accept()

    def close(self) -> None:
        self._listener.close()


def ask(address: str, text: str) -> str:
    """Sends a text on a new connection and returns the answers; empty if the server closes it."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        received = b""
        try:
            connection.sendall(text.encode())
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(4096):
                received += data
        except OSError:  # the server has closed it
            return ""
        return received.decode()


def test_the_server_knows_a_rank_by_its_pmi_id(pmi):
    server, address = pmi
    answers = ask(address, f"cmd=initack pmiid={server.ids[1]}\ncmd=get kvsname=world key=nothing\n")
    assert answers.splitlines()[:3] == ["cmd=initack rc=0", "cmd=set size=2", "cmd=set rank=1"]
    assert "key_not_found" in answers


@pytest.mark.parametrize(
    "text",
    [
        "cmd=initack pmiid=5\n",
        "cmd=initack pmiid=none\n",
        "cmd=get key=PMI_process_mapping\n",
        "cmd=unknown\n",
        "no command\n",
        "\n",
        "cmd=initack" + "x" * 20000,
        "cmd=leave pmiid=5\n",
        "cmd=\u00e9\n",
    ],
)
def test_the_server_drops_invalid_clients(pmi, text):
    assert ask(pmi[1], text) == ""


@pytest.mark.parametrize(
    ("puts", "kept"),
    [
        ([("k" * 64, "v" * 1024)], 1),
        ([("k" * 65, "v")], 0),
        ([("k", "v" * 1025)], 0),
        ([(str(number), "v") for number in range(1000)], 2 * pmi_module.MAX_VALUES_PER_RANK),
    ],
)
def test_what_a_rank_puts_is_bounded(pmi, puts, kept):
    server, address = pmi
    lines = [f"cmd=initack pmiid={server.ids[0]}", *(f"cmd=put key={key} value={value}" for key, value in puts)]
    ask(address, "".join(f"{line}\n" for line in lines))
    assert len(server._values) == 1 + kept  # one is the server's own


def test_clients_that_say_nothing_are_dropped(pmi):
    host, port = pmi[1].split(":")
    with socket.create_connection((host, int(port)), 20) as idle:
        assert idle.recv(1) == b""


def test_clients_that_say_nothing_do_not_delay_the_end(pmi, monkeypatch):
    monkeypatch.setattr(pmi_module, "GREETING_TIMEOUT_S", 60.0)
    server, address = pmi
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 20):
        for each in server.ids:
            assert ask(address, f"cmd=initack pmiid={each}\n")
        assert server._others_gone.wait(20)
        assert ask(address, "no command\n") == "", "it still serves"


def test_a_connection_that_cannot_be_accepted_does_not_end_the_server(pmi, monkeypatch):
    server, address = pmi
    failures = iter([OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "aborted")])
    monkeypatch.setattr(server, "_listener", FailingListener(server._listener, failures))
    answers = ask(address, f"cmd=initack pmiid={server.ids[1]}\n")
    assert answers.startswith("cmd=initack rc=0")
    assert next(failures, None) is None


def test_leave_times_out_if_not_all_ranks_leave(pmi):
    server, address = pmi
    assert not pmi_module.leave(address, server.ids[0], 0.1)
    assert not pmi_module.leave("127.0.0.1:1", 0, 0.1)
