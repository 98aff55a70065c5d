"""Errors at start: all workers raise them, at once and with the same text."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.rpc
from gradwire import c10d, compat, rpc
from gradwire.c10d import FileStore, PrefixStore, TCPStore, rendezvous
from gradwire.c10d.rendezvous import start_barrier
from gradwire.errors import RendezvousError, RpcError
from gradwire.net import waiting
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.grpc_backend import start_agent

from tests.remote_functions import add, wait_until
from tests.workers import Worker

ALL_RAISE_TIMEOUT_S = 30.0
"""Seconds in which all workers must have raised: less than one on an idle machine. Joining times out after 50."""

STORE_PREFIX = "gradwire/rendezvous/rpc"

Store = torch.distributed.Store


@dataclass
class Place:
    """A place where workers rendezvous: a URL, variables or a store."""

    look: Callable[[], Store]
    url: str = "env://"
    variables: dict[str, str] = field(default_factory=dict)
    connect: Callable[[], Store] | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Returns what workers need to find it."""
        return self.url, self.variables, self.connect

    def wait_for_record(self, *ranks: int) -> None:
        """Waits until these ranks wait for the others."""
        store = self.look()
        store.wait([f"{STORE_PREFIX}/0/record/{rank}" for rank in ranks])
        close(store)


def take_time() -> None:
    """Has this worker wait for others that take long, as they do on a busy machine."""
    start_barrier.HOST_LINGER_S = 40.0
    vars(sys.modules[rendezvous.__module__])["RANK_CONFLICT_TIMEOUT_S"] = 40.0


def close(store: Any) -> None:
    if hasattr(store, "close"):
        store.close()


PlaceArguments = tuple[str, dict[str, str], Callable[[], Store] | None]


def join(name: str, rank: int, size: int | None, place: PlaceArguments, **options: Any) -> None:
    url, variables, connect = place
    os.environ.update(variables)
    store = connect() if connect is not None else None
    settings = rpc.RpcBackendOptions(init_method=url, **{"init_timeout": 50, **options})
    try:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=settings, store=store)
    except RendezvousError:
        close(store)
        raise


def fail(*args: Any, **options: Any) -> tuple[str, float]:
    """Fails to join; returns the text of the error, and when it was raised (on the clock of the whole machine)."""
    with pytest.raises(RendezvousError) as caught:
        join(*args, **options)
    return str(caught.value), time.monotonic()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, free_port: int) -> Iterator[Place]:
    """Returns a place to rendezvous, of the kind that the test names."""
    kind, port = request.param, free_port
    if kind == "store":
        with TCPStore("127.0.0.1", port, is_master=True) as own:
            yield Place(own.clone, connect=lambda: TCPStore("127.0.0.1", port))
    elif kind == "file":
        yield Place(lambda: FileStore(str(tmp_path / "rendezvous")), f"file://{tmp_path}/rendezvous")
    elif kind == "tcp":
        yield Place(lambda: TCPStore("127.0.0.1", port), f"tcp://127.0.0.1:{port}")
    elif kind == "env":
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        yield Place(lambda: TCPStore("localhost", port), variables=variables)
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


JoinArguments = tuple[str, int, int | None]

CONTRADICTIONS: dict[str, tuple[list[JoinArguments], JoinArguments, str]] = {
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
        "started with world_size=3 and 'c' .* without a world_size",
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
def test_all_workers_raise_the_same_contradiction(place, kind, workers):
    first, contradicting, text = CONTRADICTIONS[kind]
    started = a, b, c, d = workers(4)
    workers.each(started, take_time)
    pending = [each.start(fail, *member, place.arguments()) for each, member in zip((a, b), first, strict=True)]
    place.wait_for_record(0, 1)
    began = time.monotonic()
    pending.append(c.start(fail, *contradicting, place.arguments()))
    raised = [each.result() for each in pending[1:]]
    size = first[0][2]
    raised.append(d.run(fail, "late", size - 1, size, place.arguments()))  # for whom rank 0 stays, if it hosts
    raised.append(pending[0].result())
    assert {error for error, _ in raised} == {raised[0][0]}
    print(f"all have raised after {(took := max(when for _, when in raised) - began):.3f} s")
    assert took < ALL_RAISE_TIMEOUT_S
    with pytest.raises(RendezvousError, match=text):
        raise RendezvousError(raised[0][0])


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_the_host_of_the_store_lingers_for_late_workers(place, workers):
    a, b, c = workers(3)

    def stay_long(*args: Any) -> tuple[str, float]:
        start_barrier.HOST_LINGER_S = 40
        return fail(*args)

    hosting = a.start(stay_long, "a", 0, 3, place.arguments())
    place.wait_for_record(0)
    first = b.run(fail, "a", 1, 3, place.arguments())
    assert not hosting.done()
    late = c.run(fail, "late", 2, 3, place.arguments())
    assert late[0] == first[0] == hosting.result()[0]


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_the_host_of_the_store_lingers_for_a_short_time_only(place, workers):
    a, b = workers(2)
    hosting = a.start(fail, "a", 0, 3, place.arguments())
    place.wait_for_record(0)
    began = time.monotonic()
    b.run(fail, "a", 1, 3, place.arguments())
    _, when = hosting.result()
    assert when - began < ALL_RAISE_TIMEOUT_S


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/rendezvous"


def warn_soon() -> None:
    waiting.FIRST_WARNING_S = 0.05


def test_a_long_wait_logs_the_missing_ranks(url, workers):
    a, b, c = workers(3)
    for worker in (a, b):
        worker.run(warn_soon)
    pending = [a.start(join, "a", 0, 3, (url, {}, None)), b.start(join, "b", 1, 3, (url, {}, None))]
    waits = (
        r"\(rank {}, process \d+ on .*\) waits for rank 2 of 3 at the file /.*/rendezvous; "
        r"waited \d+ s, timeout in"
    )
    for rank, (worker, name) in enumerate([(a, "a"), (b, "b")]):
        wait_for_text(worker, f"'{name}' {waits.format(rank)}")
    pending.append(c.start(join, "c", 2, 3, (url, {}, None)))
    for each in pending:
        each.result()


def wait_for_text(worker: Worker, pattern: str) -> None:
    """Waits until a worker has printed text that matches, on stderr or stdout."""
    wait_until(lambda: re.search(pattern, worker.log.read_text()))


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_a_missing_store_is_logged(place, workers):
    a, b = workers(2)
    b.run(warn_soon)
    pending = [b.start(join, "b", 1, 2, place.arguments())]
    wait_for_text(
        b, r"no store answers on 127.0.0.1:\d+, where rank 0 or another process should host it; waited \d+ s"
    )
    pending.append(a.start(join, "a", 0, 2, place.arguments()))
    for each in pending:
        each.result()


def test_intervals_of_warnings_double(caplog):
    slept: list[float] = []

    def wait(seconds: float) -> bool:
        slept.append(seconds)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: sum(slept)))  # from 0 on, so exactly
        assert not waiting.wait_with_warnings(wait, 300, lambda: "a waits for b")
    assert slept == pytest.approx([10, 20, 40, 80, 150])
    assert caplog.messages[:2] == [
        "a waits for b; waited 10 s, timeout in 290 s (next warning in 20 s)",
        "a waits for b; waited 30 s, timeout in 270 s (next warning in 40 s)",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4


def test_a_worker_that_times_out_tells_the_others_who_is_missing(url, workers):
    a, b = workers(2)
    waiting = b.start(fail, "b", 1, 4, (url, {}, None))
    with FileStore(url.removeprefix("file://")) as store:
        store.wait([f"{STORE_PREFIX}/0/record/1"])
    text, timed_out = a.run(fail, "a", 0, 4, (url, {}, None), init_timeout=2)
    same_text, when = waiting.result()
    assert same_text == text
    assert when - timed_out < ALL_RAISE_TIMEOUT_S
    there = rf"'a' \(rank 0, process {a.pid} on .*\), 'b' \(rank 1, process {b.pid} on .*\)"
    assert re.match(
        rf"ranks 2, 3 of 4 did not join within 2 s at the file /.*/rendezvous; these joined: {there}$", text
    )


def test_a_worker_that_has_registered_but_is_not_ready_is_named(url, workers):
    a, b = workers(2)

    def register() -> None:
        rendezvous(url, rank=1, world_size=2, name="b", kind=start_barrier.GroupKind("rpc"))

    b.run(register)
    text, _ = a.run(fail, "a", 0, 2, (url, {}, None), init_timeout=1)
    assert re.match(
        rf"rank 1 of 2 \('b' \(rank 1, process {b.pid} on .*\) has registered, but is not ready\)", text
    )


def test_all_workers_raise_for_an_invalid_device_map(url, workers):
    started = workers(2)
    options = {"device_maps": {"nobody": {"cpu": "cpu"}}}
    pending = [started[0].start(fail, "a", 0, 2, (url, {}, None), **options)]
    pending.append(started[1].start(fail, "b", 1, 2, (url, {}, None)))
    texts = {each.result()[0] for each in pending}
    assert len(texts) == 1
    assert "Node a has invalid target node names in its device maps: 'nobody' is not one of a, b" in texts.pop()


def test_all_workers_raise_if_one_cannot_start(url, workers):
    a, b = workers(2)
    pending = a.start(fail, "a", 0, 2, (url, {}, None))
    with pytest.raises(RpcError, match="host is '192.0.2.1', where this worker cannot listen"):
        b.run(join, "b", 1, 2, (url, {}, None), host="192.0.2.1", insecure=True)
    assert re.match(r"'b' \(rank 1, .*\) cannot start: host is '192.0.2.1'", pending.result()[0])


def test_an_interrupted_worker_is_not_waited_for(url, workers):
    a, b = workers(2)
    pending = [a.start(fail, "a", 0, 3, (url, {}, None)), b.start(interrupted, "b", 1, 3, (url, {}, None))]
    with FileStore(url.removeprefix("file://")) as store:
        store.wait([f"{STORE_PREFIX}/0/record/{rank}" for rank in range(2)])
    os.kill(b.pid, signal.SIGINT)
    text, _ = pending[0].result()
    assert re.match(r"'b' \(rank 1, .*\) stopped waiting: KeyboardInterrupt", text)
    pending[1].result()


def interrupted(*args: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        join(*args)


def test_after_a_contradiction_the_same_processes_may_try_again(workers):
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        port = store.port
        given = ("env://", {}, lambda: TCPStore("127.0.0.1", port))
        a, b = workers(2)
        pending = [a.start(fail, "a", 0, 2, given), b.start(fail, "a", 1, 2, given)]
        assert len({each.result()[0] for each in pending}) == 1
        (c,) = workers(1)
        count = store.num_keys()
        again = [a.start(join, "a", 0, 3, given), b.start(join, "b", 2, 3, given)]
        wait_until(lambda: store.num_keys() > count)  # before that, c would take the contradiction for its own
        again.append(c.start(join, "c", 1, 3, given))
        for each in again:
            each.result()


def test_a_worker_that_arrives_after_the_start_disturbs_nobody(url, workers):
    a, b, c = workers(3)
    for pending in [a.start(join, "a", 0, 2, (url, {}, None)), b.start(join, "b", 1, 2, (url, {}, None))]:
        pending.result()
    text, _ = c.run(fail, "c", 1, 2, (url, {}, None))
    assert "two workers have rank 1: 'b'" in text
    assert a.run(rpc.rpc_sync, "b", add, (1, 2)) == 3


def test_groups_of_both_kinds_may_rendezvous_at_one_store(workers):
    """A process group of all workers, and an RPC group of two of them."""
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        port = store.port

        def both(rank: int) -> None:
            c10d.init_process_group("gloo", store=TCPStore("127.0.0.1", port), rank=rank, world_size=3)
            if rank < 2:
                join(f"worker{rank}", rank, 2, ("env://", {}, lambda: TCPStore("127.0.0.1", port)))

        for each in [worker.start(both, rank) for rank, worker in enumerate(workers(3))]:
            each.result()


def test_ranks_of_a_process_group_raise_it_too(url, workers):
    def group(rank: int, size: int) -> tuple[str, float]:
        with pytest.raises(RendezvousError) as caught:
            c10d.init_process_group("gloo", url, rank=rank, world_size=size, timeout=50)
        return str(caught.value), time.monotonic()

    a, b, c = workers(3)
    pending = [a.start(group, 0, 3), b.start(group, 1, 3)]
    with FileStore(url.removeprefix("file://")) as store:
        store.wait([f"gradwire/rendezvous/group/0/record/{rank}" for rank in range(2)])
    began = time.monotonic()
    pending.append(c.start(group, 2, 4))
    raised = [each.result() for each in pending]
    assert len({text for text, _ in raised}) == 1
    assert re.match(r"rank [01] \(process .*\) was started with world_size=3 and rank 2 \(.*\) with", raised[0][0])
    assert max(when for _, when in raised) - began < ALL_RAISE_TIMEOUT_S


def fail_like_torch(name: str, rank: int, size: int, variables: dict[str, str]) -> tuple[str, float]:
    """Fails as a program for torch.distributed.rpc does, whose rank 0 would wait in torch's TCPStore."""
    os.environ.update(variables)
    take_time()
    compat.install()
    with pytest.raises(RuntimeError) as caught:
        torch.distributed.rpc.init_rpc(name, rank=rank, world_size=size)
    return str(caught.value), time.monotonic()


@pytest.mark.parametrize("kind", ["world sizes", "rank 0", "one name"])
def test_programs_for_torch_raise_it_too(kind, workers, free_port):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    first, contradicting, text = CONTRADICTIONS[kind]
    started = workers(4)
    pending = [each.start(fail_like_torch, *who, variables) for each, who in zip(started, first, strict=False)]
    seen = torch.distributed.TCPStore("127.0.0.1", free_port, wait_for_workers=False)
    seen.wait([f"rpc_prefix_0/{STORE_PREFIX}/0/record/{rank}" for rank in range(2)])
    del seen
    began = time.monotonic()
    pending.append(started[2].start(fail_like_torch, *contradicting, variables))
    raised = [each.result() for each in pending[1:]]
    size = first[0][2]
    raised.append(started[3].run(fail_like_torch, "late", size - 1, size, variables))  # for whom rank 0 stays
    raised.append(pending[0].result())
    assert {error for error, _ in raised} == {raised[0][0]}
    assert re.match(text, raised[0][0])
    assert max(when for _, when in raised) - began < ALL_RAISE_TIMEOUT_S


SLOW_S = 0.3
"""Seconds that one worker takes between knowing the others and serving their calls."""


def init_slowly(slow: bool, name: str, rank: int, url: str) -> tuple[float, float]:
    """Joins; returns when this worker could be called, and when `init_rpc` has returned, by the host's clock."""
    opened: list[float] = []
    open_agent = GrpcAgent.open

    def open_slowly(*args: Any) -> None:
        time.sleep(SLOW_S if slow else 0.0)  # what a busy machine does
        open_agent(*args)
        opened.append(time.monotonic())

    GrpcAgent.open = open_slowly  # type: ignore[method-assign]
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))
    return opened[0], time.monotonic()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_no_worker_goes_on_before_all_can(workers, tmp_path, free_port, scheme):
    url = f"file://{tmp_path / 'store'}" if scheme == "file" else f"tcp://127.0.0.1:{free_port}"
    pending = [each.start(init_slowly, i == 1, each.name, i, url) for i, each in enumerate(workers(3))]
    opened, returned = zip(*(each.result() for each in pending), strict=True)
    assert max(opened) < min(returned)


def test_a_worker_that_ends_while_it_starts_holds_up_the_others_for_a_moment_only(workers, tmp_path):
    url = f"file://{tmp_path / 'store'}"

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def init(ends: bool, rank: int) -> list[str]:
        vars(sys.modules[start_agent.__module__])["MAX_READY_WAIT_S"] = 0.5
        if ends:
            GrpcAgent.open = end  # type: ignore[method-assign]
        options = rpc.RpcBackendOptions(init_method=url)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        return [each.name for each in rpc.get_worker_infos()]

    pending = [each.start(init, i == 2, i) for i, each in enumerate(workers(3))]
    assert [each.result() for each in pending[:2]] == [["worker0", "worker1", "worker2"]] * 2
