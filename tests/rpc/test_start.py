"""What keeps a group from starting: all workers hear it, at once and in the same words."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.c10d import FileStore, PrefixStore, TCPStore, start_barrier
from gradwire.errors import RendezvousError

LIMIT = 10.0
"""Seconds in which everybody must have heard. It takes far less than one, unless the machine is very busy."""

WORKERS = "gradwire/rendezvous/rpc"

Store = torch.distributed.Store


@dataclass
class Place:
    """Where workers meet: a URL, variables or a store. lasting: it stays when rank 0 has ended."""

    look: Callable[[], Store]
    url: str = "env://"
    variables: dict[str, str] = field(default_factory=dict)
    connect: Callable[[], Store] | None = None
    lasting: bool = True

    def given(self) -> tuple[Any, ...]:
        """What workers are given of it."""
        return self.url, self.variables, self.connect

    def wait_for_record(self, *ranks: int) -> None:
        """Returns when these ranks wait for the others."""
        store = self.look()
        store.wait([f"{WORKERS}/0/record/{rank}" for rank in ranks])
        close(store)


def close(store: Any) -> None:
    if hasattr(store, "close"):
        store.close()


Given = tuple[str, dict[str, str], Callable[[], Store] | None]


def join(name: str, rank: int, size: int | None, given: Given, **options: Any) -> None:
    url, variables, connect = given
    os.environ.update(variables)
    store = connect() if connect is not None else None
    settings = rpc.RpcBackendOptions(init_method=url, **{"init_timeout": 50, **options})
    try:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=settings, store=store)
    except RendezvousError:
        close(store)
        raise


def fail(*args: Any, **options: Any) -> tuple[str, float]:
    """Tries to join: the error's text, and when it came (on the clock of the whole machine)."""
    with pytest.raises(RendezvousError) as caught:
        join(*args, **options)
    return str(caught.value), time.monotonic()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Any way to meet."""
    kind = request.param
    with TCPStore("127.0.0.1", 0, is_master=True) as own:
        port = own.port
        if kind == "store":
            yield Place(own.clone, connect=lambda: TCPStore("127.0.0.1", port))
            return
    if kind == "file":
        yield Place(lambda: FileStore(str(tmp_path / "meet")), f"file://{tmp_path}/meet")
    elif kind == "tcp":
        yield Place(lambda: TCPStore("127.0.0.1", port), f"tcp://127.0.0.1:{port}", lasting=False)
    elif kind == "env":
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        yield Place(lambda: TCPStore("localhost", port), variables=variables, lasting=False)
    else:
        hosted = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch_port = hosted.port

        def connect() -> Store:
            return torch.distributed.TCPStore("127.0.0.1", torch_port, wait_for_workers=False)

        if kind == "torch":
            yield Place(connect, connect=connect)
        else:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(torch_port)}
            variables = {**address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            yield Place(lambda: PrefixStore("gradwire/attempt/0", connect()), variables=variables)


Member = tuple[str, int, int | None]

CONTRADICTIONS: dict[str, tuple[list[Member], Member, str]] = {
    "world sizes": (
        [("a", 0, 4), ("b", 1, 4)],
        ("c", 2, 3),
        r"^'[ab]' \(rank [01], process \d+ on .*\) was started with world_size=4 and 'c' \(rank 2, process \d+ "
        r"on .*\) with world_size=3: give all workers of a group the same",
    ),
    "one rank": (
        [("a", 0, 3), ("b", 1, 3)],
        ("c", 1, 3),
        r"^two workers have rank 1: 'b' \(process \d+ on .*\) and 'c' \(process \d+ on .*\); give each its own",
    ),
    "rank 0": (
        [("a", 0, 3), ("b", 1, 3)],
        ("c", 0, 3),
        r"^two workers have rank 0: 'a' \(process \d+ on .*\) and 'c' \(process \d+ on .*\); give each its own",
    ),
    "one name": (
        [("a", 0, 4), ("b", 1, 4)],
        ("a", 2, 4),
        r"^worker name 'a' is not unique: ranks 0 and 2 have it \(process \d+ on .*, process \d+ on .*\); give",
    ),
    "static and dynamic": (
        [("a", 0, 3), ("b", 1, 3)],
        ("c", -1, None),
        "^RPC group mixes statically and dynamically initialized members which is not supported: '[ab]' .* was "
        "started with world_size=3, 'c' .* without a world_size",
    ),
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *(("tcp", kind) for kind in CONTRADICTIONS),
        *(("file", kind) for kind in CONTRADICTIONS),
        *((other, "rank 0") for other in ("env", "store", "torch", "torchrun")),
    ],
    indirect=["place"],
)
def test_a_contradiction_reaches_everybody(place, kind, workers):
    first, contradicting, text = CONTRADICTIONS[kind]
    a, b, c, d = workers(4)
    pending = [each.start(fail, *member, place.given()) for each, member in zip((a, b), first, strict=True)]
    place.wait_for_record(0, 1)
    began = time.monotonic()
    pending.append(c.start(fail, *contradicting, place.given()))
    heard = [each.result() for each in pending]
    if place.lasting:
        heard.append(d.run(fail, "late", 2, 3, place.given()))
    assert {error for error, _ in heard} == {heard[0][0]}
    print(f"all have heard after {(took := max(when for _, when in heard) - began):.3f} s")
    assert took < LIMIT
    with pytest.raises(RendezvousError, match=text):
        raise RendezvousError(heard[0][0])


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_who_hosts_the_store_stays_until_the_late_have_heard(place, workers):
    a, b, c = workers(3)

    def stay_long(*args: Any) -> tuple[str, float]:
        start_barrier.LINGER_SECONDS = 40
        return fail(*args)

    hosting = a.start(stay_long, "a", 0, 3, place.given())
    place.wait_for_record(0)
    first = b.run(fail, "a", 1, 3, place.given())
    assert not hosting.done()
    late = c.run(fail, "late", 2, 3, place.given())
    assert late[0] == first[0] == hosting.result()[0]


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_who_hosts_the_store_does_not_wait_long_for_those_who_may_never_come(place, workers):
    a, b = workers(2)
    hosting = a.start(fail, "a", 0, 3, place.given())
    place.wait_for_record(0)
    began = time.monotonic()
    b.run(fail, "a", 1, 3, place.given())
    _, when = hosting.result()
    assert when - began < LIMIT
