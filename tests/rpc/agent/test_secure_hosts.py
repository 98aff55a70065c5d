"""Workers on several hosts with credentials: no option but these, and nobody else gets in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from gradwire import rpc
from gradwire.c10d import Credentials, TCPStore
from gradwire.c10d.groups.failure_detector import FailureDetector
from gradwire.c10d.stores.views import is_insecure_store
from gradwire.errors import RendezvousError, StoreError
from gradwire.rpc.contracts.agent import current_agent

from tests.certificates import OTHER_TOKEN, TOKEN, make_authority, write
from tests.remote_functions import add, set_event, wait_for
from tests.rpc.agent.test_several_hosts import PORT, call_all, join, listening, master, train
from tests.workers import Pending, Worker


def join_all(
    members: Sequence[Worker], variables: dict[str, str], credentials: Sequence[Credentials | None], **options: Any
) -> list[Pending[None]]:
    return [
        member.start(join, rank, len(members), variables, credentials=credentials[rank], **options)
        for rank, member in enumerate(members)
    ]


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
def test_a_token_is_enough(hosts, counts):
    net = hosts(*counts)
    variables = {**master(net.address(0)), "GRADWIRE_TOKEN": TOKEN}
    for each in join_all(net.workers, variables, [None] * sum(counts)):
        each.result()
    call_all(net.workers, train)
    assert net.hosts[1][0].run(listening) == {net.address(1)}


def test_each_worker_has_a_certificate(hosts, tmp_path):
    net, ca = hosts(1, 1), make_authority()
    own = [write(tmp_path / f"of-{rank}", ca, f"worker{rank}") for rank in range(2)]
    for each in join_all(net.workers, master(net.address(0)), own, transports=("grpc",)):
        each.result()
    call_all(net.workers, train)


def test_a_stranger_gets_nowhere(hosts):
    net = hosts(1, 1, 1)
    *members, stranger = net.workers
    token = Credentials(token=TOKEN)
    for each in join_all(members, master(net.address(0)), [token, token]):
        each.result()

    address = net.address(0)

    def read_store(credentials: Credentials | None) -> None:
        TCPStore(address, int(PORT), credentials=credentials, insecure=True, timeout=20)

    with pytest.raises(StoreError, match="demands credentials"):
        stranger.run(read_store, None)
    with pytest.raises(StoreError, match="certificate is not of this job"):
        stranger.run(read_store, Credentials(token=OTHER_TOKEN))
    call_all(members)


@pytest.mark.parametrize(
    ("token", "text"), [("", "demands credentials"), (OTHER_TOKEN, "certificate is not of this job")]
)
def test_a_worker_with_other_credentials_is_told(hosts, token, text):
    net = hosts(1, 1)
    a, b = net.workers
    variables = master(net.address(0))
    waiting = a.start(join, 0, 2, variables, credentials=Credentials(token=TOKEN))
    with pytest.raises(RendezvousError, match=text):
        b.run(join, 1, 2, {**variables, "GRADWIRE_TOKEN": token}, insecure=not token)
    b.run(join, 1, 2, {**variables, "GRADWIRE_TOKEN": TOKEN})
    waiting.result()
    call_all(net.workers)


def test_without_credentials_the_error_names_them(hosts):
    net = hosts(1, 1)
    for each in join_all(net.workers, master(net.address(0)), [None, None]):
        with pytest.raises(RendezvousError, match=r"Set GRADWIRE_TOKEN .*gradwire certs token"):
            each.result()


def test_torchruns_store_is_used_with_a_token(hosts):
    """Its server lets everybody in, and so would not be used between hosts."""
    net = hosts(1, 1)
    launcher, member = net.workers
    variables = {**master(net.address(0)), "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1"}
    launcher.run(host_torch_store, int(PORT))
    with pytest.raises(RendezvousError, match="'10.91.0.1' is refused"):
        member.run(join, 0, 1, variables)
    member.run(join, 0, 1, {**variables, "GRADWIRE_TOKEN": TOKEN})
    assert member.run(rpc.rpc_sync, "worker0", add, (1, 2)) == 3


launched: object
"""The store that this worker hosts."""


def host_torch_store(port: int) -> None:
    global launched
    launched = torch.distributed.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)


def collect(others: Sequence[str]) -> None:
    """Calls collectives and broadcasts, which a process group would carry."""
    rpc.barrier()
    data = torch.ones(2**20)
    for future in rpc.broadcast_call(others, torch.sum, (data,)) + rpc.broadcast_call(others, torch.sum, (data,)):
        assert future.wait() == 2**20


def groups_tried() -> int:
    """Returns how many process groups this worker has tried to form, whatever came of it."""
    agent: Any = current_agent()
    return next(agent._network.channels.broadcasts._numbers)


@pytest.mark.parametrize("insecure", [False, True])
def test_collectives_ask_for_no_consent_with_credentials(hosts, insecure):
    """Process groups would need it, as credentials do not protect Gloo; connections of the agents do not."""
    net = hosts(1, 1, 1)
    variables = {**master(net.address(0)), "GRADWIRE_TOKEN": TOKEN}
    for each in join_all(net.workers, variables, [None] * 3, insecure=insecure):
        each.result()
    others = [f"worker{rank}" for rank in range(3)]
    pending = [
        each.start(collect, [name for name in others if name != f"worker{rank}"])
        for rank, each in enumerate(net.workers)
    ]
    for each in pending:
        each.result()
    assert all((each.run(groups_tried) > 0) is insecure for each in net.workers)
    assert not any("cannot form a process group" in Path(each.log).read_text() for each in net.workers)


def watch(rank: int, address: str, token: str) -> None:
    """Starts a failure detector with two ranks, at a store of rank 0, and nothing that allows other hosts."""
    credentials = Credentials(token=token)
    store = TCPStore(address, int(PORT), is_master=rank == 0, wait_for_workers=False, credentials=credentials)
    found = FailureDetector(
        store,
        rank,
        2,
        60,
        insecure=is_insecure_store(store),
        identity=credentials.identity(),
        on_lost=lambda *_: None,
        on_left=lambda other, _reason: set_event(f"rank {other} has left"),
    )
    if rank == 0:
        wait_for("rank 1 has left")
    found.close()


def test_the_failure_detector_and_the_store_ask_for_no_consent_with_credentials(hosts):
    net = hosts(1, 1)
    address = net.address(0)
    for each in [member.start(watch, rank, address, TOKEN) for rank, member in enumerate(net.workers)]:
        each.result()
