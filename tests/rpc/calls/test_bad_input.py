"""Mistakes of users get a clear error at the right place, and the workers go on."""

import threading

import numpy as np
import pytest
import torch
from gradwire import rpc
from gradwire.errors import (
    NotInitializedError,
    RemoteError,
    RemoteUnpicklableError,
    RendezvousError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    UnknownWorkerError,
)
from gradwire.rpc.contracts.messages import Handler, MessageType
from gradwire.rpc.peers import peer

from tests.remote_functions import add, identity, set_event, wait_for


class Formats(Exception):
    """Its constructor takes other arguments than it passes on."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}")
        self.detail = detail


def refuse_to_rebuild() -> None:
    raise LookupError("cannot be rebuilt")


class Unrebuildable(Exception):
    def __reduce__(self):
        return refuse_to_rebuild, ()


class Holder:
    def __init__(self) -> None:
        self.inner = {"lock": threading.Lock()}


def raise_value_error() -> None:
    raise ValueError("three is right out")


def raise_with_cause() -> None:
    try:
        raise_value_error()
    except ValueError as error:
        raise LookupError("no grail") from error


def raise_unrebuildable() -> None:
    raise Unrebuildable("shrubbery and herring")


def raise_formatted() -> None:
    raise Formats(7, "of nine")


def raise_missing_file() -> None:
    open("/no/such/file")  # noqa: SIM115


def raise_with_a_lock() -> None:
    raise ValueError(threading.Lock())


def leave() -> None:
    raise SystemExit(3)


def make_lock() -> object:
    return [threading.Lock()]


class Defused:
    """Pickles here and fails to unpickle there."""

    def __reduce__(self):
        return (raise_value_error, ())


@pytest.fixture
def two_workers(two_workers):
    """Two workers in an RPC group; after the test both still serve calls."""
    a, b = two_workers
    yield two_workers
    assert a.run(rpc.rpc_sync, "worker1", add, (1, 1)) == 2
    assert b.run(rpc.rpc_sync, "worker0", add, (1, 1)) == 2


def test_unknown_destinations(two_workers):
    def check() -> None:
        for to in ("nobody", 7, -1, rpc.WorkerInfo("worker1", 0)):
            with pytest.raises(
                UnknownWorkerError,
                match="destination .*: the workers of this group are worker0, worker1",
            ):
                rpc.rpc_async(to, add, (1, 2))
        with pytest.raises(UnknownWorkerError):
            rpc.remote("nobody", add, (1, 2))
        with pytest.raises(ValueError, match="name, id or WorkerInfo"):
            rpc.rpc_sync(1.5, add, (1, 2))

    two_workers[0].run(check)


def test_unsendable_functions_and_arguments(two_workers):
    def check() -> None:
        with pytest.raises(SerializationError, match=r"the function cannot be sent: .*<lambda> .* top level"):
            rpc.rpc_async("worker1", lambda: 1)
        lock = threading.Lock()  # with its code, the lock would be the reason
        with pytest.raises(SerializationError, match=r"args\[0\] .*<lambda> has no importable name"):
            rpc.rpc_async("worker1", identity, (lambda: lock,))
        with pytest.raises(SerializationError, match="args") as caught:
            rpc.rpc_async("worker1", identity, ([{"x": (1, threading.Lock())}],))
        assert caught.value.path == "args[0][0]['x'][1]"
        with pytest.raises(SerializationError) as caught:
            rpc.rpc_async("worker1", identity, (Holder(),))
        assert caught.value.path == "args[0].inner['lock']"
        with pytest.raises(SerializationError) as caught:
            rpc.remote("worker1", identity, kwargs={"value": open("/dev/null")})  # noqa: SIM115
        assert caught.value.path == "kwargs['value']"
        with pytest.raises(SerializationError, match=r"args\[0\] cannot be sent: it is a tensor of layout"):
            rpc.rpc_async("worker1", identity, (torch.ones(3, 3).to_mkldnn(),))
        for bad in (
            {"func": 3},
            {"func": add, "args": 3},
            {"func": add, "args": "ab"},
            {"func": add, "kwargs": {1: 2}},
        ):
            with pytest.raises(TypeError):
                rpc.rpc_async("worker1", **bad)

    two_workers[0].run(check)


def test_bad_timeouts(two_workers):
    def check() -> None:
        for timeout in (-2, float("nan"), float("inf"), "soon", None):
            with pytest.raises(ValueError, match="timeout is"):
                rpc.rpc_async("worker1", add, (1, 2), timeout=timeout)

    two_workers[0].run(check)


def test_a_result_that_cannot_be_pickled(two_workers):
    def check() -> None:
        with pytest.raises(SerializationError, match=r"the result\[0\] cannot be sent: .*lock") as caught:
            rpc.rpc_sync("worker1", make_lock)
        assert caught.value.path == "the result[0]"

    two_workers[0].run(check)


def test_remote_exceptions_keep_type_and_traceback(two_workers):
    def check() -> None:
        with pytest.raises(ValueError, match="^three is right out$") as caught:
            rpc.rpc_sync("worker1", raise_value_error)
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteError)
        assert cause.worker == "worker1"
        assert "in raise_value_error" in cause.remote_traceback
        with pytest.raises(LookupError) as caught_lookup:
            rpc.rpc_sync("worker1", raise_with_cause)
        assert "three is right out" in caught_lookup.value.__cause__.remote_traceback

    two_workers[0].run(check)


def test_exceptions_arrive_as_they_were(two_workers):
    def check() -> None:
        with pytest.raises(Formats, match=r"^code 7$") as caught:
            rpc.rpc_sync("worker1", raise_formatted)
        assert caught.value.detail == "of nine"
        with pytest.raises(FileNotFoundError) as missing:
            rpc.rpc_sync("worker1", raise_missing_file)
        assert missing.value.filename == "/no/such/file"

    two_workers[0].run(check)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raise_unrebuildable, "Unrebuildable: shrubbery and herring"),
        (raise_with_a_lock, "ValueError: <unlocked"),
        (leave, "SystemExit: 3"),
    ],
)
def test_exceptions_that_cannot_be_rebuilt(two_workers, function, text):
    def check() -> None:
        with pytest.raises(RemoteUnpicklableError) as caught:
            rpc.rpc_sync("worker1", function)
        assert text in str(caught.value)
        assert "'worker1'" in str(caught.value)
        assert function.__name__ in caught.value.remote_traceback

    two_workers[0].run(check)


def test_arguments_that_fail_to_unpickle(two_workers):
    def check() -> None:
        with pytest.raises(ValueError, match="three is right out"):
            rpc.rpc_sync("worker1", identity, (Defused(),))
        with pytest.raises(ValueError, match="three is right out"):
            rpc.remote("worker1", identity, (Defused(),)).to_here()

    two_workers[0].run(check)


def test_errors_through_futures(two_workers):
    def check() -> None:
        future = rpc.rpc_async("worker1", raise_value_error)
        for _ in range(2):
            with pytest.raises(ValueError, match="three"):
                future.wait()
        with pytest.raises(ValueError, match="three"):
            future.value()
        gathered = torch.futures.collect_all([rpc.rpc_async("worker1", raise_value_error)])
        with pytest.raises(ValueError, match="three"):
            gathered.wait()

    two_workers[0].run(check)


def test_a_timeout(two_workers):
    def check() -> None:
        with pytest.raises(
            RpcTimeoutError, match=r"more than its timeout of 0\.05 s: a call to worker 'worker1'"
        ) as caught:
            rpc.rpc_sync("worker1", wait_for, ("late",), timeout=0.05)
        assert (caught.value.worker, caught.value.seconds) == ("worker1", 0.05)
        rpc.rpc_sync("worker1", set_event, ("late",))

    two_workers[0].run(check)


def test_before_init_and_after_shutdown(workers):
    (a,) = workers(1)
    (b,) = workers.rpc(1)
    b.run(rpc.shutdown)

    def check() -> None:
        calls = [
            lambda: rpc.rpc_sync("worker0", add, (1, 2)),
            lambda: rpc.rpc_async("worker0", add, (1, 2)),
            lambda: rpc.remote("worker0", add, (1, 2)),
            lambda: rpc.RRef(1),
            rpc.get_worker_info,
            rpc.debug_info,
        ]
        for call in calls:
            with pytest.raises(NotInitializedError, match="RPC has not been initialized.*init_rpc"):
                call()

    a.run(check)
    b.run(check)
    with pytest.raises(NotInitializedError, match="RPC has not been initialized.*init_rpc"):
        a.run(rpc.shutdown)
    b.run(rpc.shutdown)
    b.run(rpc.shutdown, graceful=False)


def test_using_a_reference_after_shutdown(workers):
    a, b = workers.rpc(2)

    def use_after_shutdown() -> None:
        mine, theirs = rpc.RRef(1), rpc.remote("worker1", add, (1, 2))
        assert theirs.to_here() == 3
        rpc.shutdown()
        with pytest.raises(NotInitializedError, match="has shut down"):
            theirs.to_here()
        assert mine.to_here() == 1

    pending = b.start(rpc.shutdown)
    a.run(use_after_shutdown)
    pending.result()


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "naïve", None, 3])
def test_bad_worker_names(name):
    with pytest.raises(ValueError, match="[Ww]orker name"):
        rpc.init_rpc(name, rank=0, world_size=1)


@pytest.mark.parametrize(
    "options",
    [
        {"rpc_timeout": -1},
        {"rpc_timeout": float("nan")},
        {"rpc_timeout": float("inf")},
        {"num_worker_threads": 0},
        {"init_timeout": 0},
        {"channels": 3},
    ],
)
def test_bad_options(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        rpc.RpcBackendOptions(**options)


def test_unknown_options_and_backends():
    with pytest.raises(TypeError, match="num_threads"):
        rpc.RpcBackendOptions(num_threads=3)
    with pytest.raises(ValueError, match="chunk_bytes"):
        rpc.ChannelOptions(chunk_bytes=0)
    with pytest.raises(ValueError, match="backend is 'TCP'"):
        rpc.init_rpc("a", backend="TCP", rank=0, world_size=1)
    with pytest.raises(TypeError, match="rpc_backend_options"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options={"rpc_timeout": 3})


def test_init_twice(workers):
    (a,) = workers.rpc(1)
    with pytest.raises(RpcError, match="RPC is already initialized: this process is worker 'worker0'"):
        a.run(rpc.init_rpc, "again", rank=0, world_size=1)


def test_a_public_address_needs_consent(workers):
    (a,) = workers(1)

    def listen_everywhere() -> None:
        options = rpc.RpcBackendOptions(host="0.0.0.0")
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options, store=torch.distributed.HashStore())

    with pytest.raises(RpcError, match="insecure=True"):
        a.run(listen_everywhere)


def test_duplicate_names(workers, tmp_path):
    started = workers(3)

    def join(rank: int, name: str) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", init_timeout=20)
        rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)

    pending = [w.start(join, rank, name) for rank, (w, name) in enumerate(zip(started, "aba", strict=True))]
    for p in pending:
        with pytest.raises(RendezvousError, match="worker name 'a' is not unique: ranks [02] and [02] have it"):
            p.result()


def test_a_worker_that_does_not_come(workers, tmp_path):
    (a,) = workers(1)

    def join() -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", init_timeout=0.2)
        rpc.init_rpc("a", rank=0, world_size=3, rpc_backend_options=options)

    with pytest.raises(RendezvousError, match="ranks 1, 2 of 3 did not join within"):
        a.run(join)


def test_world_sizes_that_differ(workers, tmp_path):
    started = workers(2)

    def join(rank: int, world_size: int) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", init_timeout=60)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)

    pending = [w.start(join, rank, 2 + rank) for rank, w in enumerate(started)]
    with pytest.raises(RendezvousError, match="world_size"):
        for p in pending:
            p.result()


def test_a_message_with_too_many_parts(two_workers):
    def check() -> None:
        # Of each stride, however little it means, six bytes are sent.
        shape, strides = (2, *[1] * 60, 2), (0, *[1 << 40] * 60, 1)
        small = [torch.zeros(2).as_strided(shape, strides) for _ in range(2_500)]
        assert len(rpc.rpc_sync("worker1", identity, (small,))) == 2_500
        limit, peer.MAX_ENVELOPE_BYTES = peer.MAX_ENVELOPE_BYTES, 1 << 20
        with pytest.raises(SerializationError, match="too many tensors"):
            rpc.rpc_async("worker1", identity, (small,))
        peer.MAX_ENVELOPE_BYTES = limit
        assert torch.equal(rpc.rpc_sync("worker1", identity, (torch.ones(1 << 20),)), torch.ones(1 << 20))

    two_workers[0].run(check)


def test_numpy_travels_in_the_pickle(two_workers):
    def check() -> None:
        array = np.arange(500_000)
        assert np.array_equal(rpc.rpc_sync("worker1", identity, (array,)), array)

    two_workers[0].run(check)


def test_errors_call_no_request_by_the_name_of_its_message_type(agents):
    (agent,) = agents(1)
    one_way = {"GRADIENTS", "STREAM_ITEM", "STREAM_CREDIT"}
    names = [MessageType.Name(number) for number in MessageType.values()]
    for kind, handler in agent._extensions.handlers.items():
        assert not any(name in handler.description for name in names)
        if MessageType.Name(kind) not in one_way:
            assert handler.description != Handler(print).description, (
                f"{MessageType.Name(kind)} has no description"
            )
