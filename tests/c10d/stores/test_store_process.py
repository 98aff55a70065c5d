"""A store that is a process of its own: it is killed and started again, and nothing is lost or done twice."""

import errno
import os
import resource
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from gradwire.c10d import StoreLimits, TCPStore, rendezvous
from gradwire.c10d.stores import durable, remote
from gradwire.c10d.stores.durable import DurableState, serve
from gradwire.c10d.stores.log import OperationLog
from gradwire.c10d.stores.server import EXECUTE, listen_locally
from gradwire.c10d.stores.state import KeyValueState
from gradwire.cli.group import run_command
from gradwire.cli.store import command
from gradwire.errors import StoreError, StoreNetworkError, StoreTimeoutError
from gradwire.proto.v1 import store_pb2
from gradwire.proto.v1.store_pb2 import Operation, Outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ports import free_port
from tests.workers import Worker, Workers

ROUNDS = 60


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "log")


def opened(path: str) -> DurableState:
    return DurableState(path, StoreLimits())


def contents(state: KeyValueState) -> list[Operation]:
    return list(state.operations())


def add(number: int, client: int = 7, **fields: int) -> Operation:
    return Operation(kind=store_pb2.ADD, keys=["n"], amount=1, client=client, number=number, **fields)


def push(item: bytes) -> Operation:
    return Operation(kind=store_pb2.QUEUE_PUSH, keys=["q"], values=[item])


def pop(number: int = 1, client: int = 7) -> Operation:
    return Operation(kind=store_pb2.QUEUE_POP, keys=["q"], client=client, number=number)


KEYS, VALUES = st.sampled_from("ab"), st.binary(max_size=3)
OPERATIONS = st.one_of(
    st.builds(lambda k, v: Operation(kind=store_pb2.SET, keys=[k], values=[v]), KEYS, VALUES),
    st.builds(lambda k, v: Operation(kind=store_pb2.APPEND, keys=[k], values=[v]), KEYS, VALUES),
    st.builds(lambda k, n: Operation(kind=store_pb2.ADD, keys=[k], amount=n), KEYS, st.integers(-2, 2)),
    st.builds(
        lambda k, v, w: Operation(kind=store_pb2.COMPARE_SET, keys=[k], values=[v, w]), KEYS, VALUES, VALUES
    ),
    st.builds(lambda k: Operation(kind=store_pb2.DELETE, keys=[k]), KEYS),
    st.builds(lambda k, v: Operation(kind=store_pb2.QUEUE_PUSH, keys=[k], values=[v]), KEYS, VALUES),
    st.builds(lambda k: Operation(kind=store_pb2.QUEUE_POP, keys=[k]), KEYS),
    st.none(),  # the store is started again
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=30), growth=st.sampled_from([0, 1 << 20]))
def test_a_store_that_is_started_again_has_the_state_that_it_had(tmp_path_factory, operations, growth):
    path = str(tmp_path_factory.mktemp("store") / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "MIN_GROWTH_BYTES", growth)
        model, store = KeyValueState(), opened(path)
        for number, operation in enumerate(operations):
            if operation is None:
                store.close()
                store = opened(path)
                continue
            operation.client, operation.number = 7, number
            outcome = store.apply(operation)
            assert outcome == model.apply(operation)
            if operation.kind == store_pb2.QUEUE_POP and outcome.values:
                store.confirm(operation, outcome.values[0])
            assert contents(store) == contents(model)
            if outcome != Outcome() and operation.kind == store_pb2.ADD and not outcome.error:
                assert store.answer_of(operation) == outcome
        store.close()


def test_a_log_that_ends_anywhere_has_the_changes_before(path, tmp_path):
    store = opened(path)
    sizes, states = [os.path.getsize(path)], [contents(store)]
    for number, change in enumerate([add(1), push(b"one"), push(b"two"), add(2)]):
        store.apply(change)
        sizes.append(os.path.getsize(path))
        states.append(contents(store))
        assert states[number] != states[number + 1]
    store.close()
    cut = str(tmp_path / "cut")
    for size in range(sizes[0], sizes[-1] + 1):
        shutil.copy(path, cut)
        os.truncate(cut, size)
        store = opened(cut)
        whole = max(index for index, end in enumerate(sizes) if end <= size)
        assert contents(store) == states[whole]
        assert not store.apply(push(b"more")).error
        store.close()


def test_what_is_sent_again_is_done_once(path):
    store = opened(path)
    assert store.apply(add(1)).number == 1
    assert store.answer_of(add(1)) == Outcome(number=1)
    assert store.answer_of(add(2)) is None
    assert store.answer_of(add(1, client=8)) is None
    store.close()
    store = opened(path)
    assert store.answer_of(add(1)) == Outcome(number=1)
    assert store.apply(add(2, acknowledged_below=2)).number == 2
    assert store.answer_of(add(1)) is None  # its client has said that it has the outcome
    store.close()


def test_outcomes_are_remembered_within_bounds(path, monkeypatch):
    monkeypatch.setattr(durable, "MAX_CLIENTS", 3)
    monkeypatch.setattr(durable, "MAX_OUTCOMES", 2)
    store = opened(path)
    for client in range(1, 6):
        for number in range(4):
            store.apply(add(number, client))
    remembered = {client: sorted(answers) for client, answers in store._answers.items()}
    assert remembered == {client: [2, 3] for client in (3, 4, 5)}
    sizes = [answer.ByteSize() for answers in store._answers.values() for answer in answers.values()]
    assert store._answer_bytes == sum(sizes)
    store.close()


def test_an_item_is_taken_when_its_receipt_is_confirmed(path):
    store = opened(path)
    for item in (b"one", b"two"):
        store.apply(push(item))
    asked = pop()
    assert store.apply(asked).values == [b"one"]
    store.close()
    store = opened(path)  # nobody has confirmed it
    asked = pop()
    assert store.apply(asked).values == [b"one"]
    store.confirm(asked, b"one")
    assert store.answer_of(pop()).values == [b"one"]
    store.close()
    store = opened(path)
    assert store.answer_of(pop()).values == [b"one"]
    assert store.apply(pop(2)).values == [b"two"]
    store.close()


def test_of_two_connections_of_a_client_the_last_one_has_the_item(path):
    """The first one is broken, which the store has not noticed yet."""
    store = opened(path)
    for item in (b"one", b"two"):
        store.apply(push(item))
    first, second = pop(), pop()
    assert store.apply(first).values == [b"one"]
    assert store.apply(second).values == [b"two"]
    with pytest.raises(StoreError, match="sent this operation again"):
        store.confirm(first, b"one")
    store.put_back(first, b"one")
    store.confirm(second, b"two")
    assert [change.values[0] for change in contents(store)] == [b"one"]
    store.close()


def test_a_log_is_for_one_process(path):
    store = opened(path)
    with pytest.raises(StoreError, match="is used by another process"):
        opened(path)
    store.close()


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other"
    other.write_text("not a store")
    with pytest.raises(StoreError, match="is not a gradwire store"):
        opened(str(other))
    with pytest.raises(StoreError, match="cannot be opened"):
        opened(str(tmp_path / "no" / "log"))


def test_a_change_that_cannot_be_written_is_refused(workers, path):
    (worker,) = workers(1)
    worker.run(fill, path)


def fill(path: str) -> None:
    store = opened(path)
    store.apply(push(b"one"))
    store.apply(push(b"two"))
    asked = pop()
    store.apply(asked)
    before = contents(store)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 10, most))
    outcome = store.apply(Operation(kind=store_pb2.SET, keys=["key"], values=[bytes(100)]))
    assert "cannot be written: File too large; nothing has been changed" in outcome.error
    with pytest.raises(StoreError, match="cannot be written"):
        store.confirm(asked, b"one")
    assert contents(store) == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert store.apply(add(1)).number == 1
    store.confirm(asked, b"one")
    store.close()
    store = opened(path)
    assert [change.values[0] for change in contents(store)] == [b"1", b"two"]


def test_a_refused_change_reads_nothing_again(path, monkeypatch):
    """A full disk refuses every change, and the log may be large."""
    store = opened(path)
    store.apply(add(0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(OperationLog, "read", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 10, most))
    outcome = store.apply(Operation(kind=store_pb2.SET, keys=["key"], values=[bytes(100)]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert "cannot be written: File too large; nothing has been changed" in outcome.error
    assert [change.keys[0] for change in contents(store)] == ["n"]
    store.close()


def test_what_changes_nothing_is_not_in_the_log(path):
    store = opened(path)
    store.apply(Operation(kind=store_pb2.SET, keys=["key"], values=[b"old"]))
    size = os.path.getsize(path)
    store.apply(Operation(kind=store_pb2.COMPARE_SET, keys=["key"], values=[b"other", b"new"]))
    store.apply(Operation(kind=store_pb2.DELETE, keys=["none"]))
    assert os.path.getsize(path) == size
    store.close()


def test_a_change_that_does_not_reach_the_disk_is_refused(path, monkeypatch):
    state = DurableState(path, StoreLimits(), sync=True)
    state.apply(push(b"one"))

    def fail(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert "cannot be written: Input/output error" in state.apply(push(b"two")).error
    assert len(contents(state)) == 1
    state.close()
    state = opened(path)
    assert len(contents(state)) == 1
    state.close()


# In processes.


def serve_here(path: str, port: int) -> None:
    serve(path, "127.0.0.1", port, threading.Event())


class Restartable:
    """A store in a worker, which can be killed and started again."""

    def __init__(self, workers: Workers, path: str) -> None:
        self.port = free_port()
        self._workers, self._path = workers, path
        self.start()

    def start(self, path: str | None = None) -> None:
        (self.process,) = self._workers(1)
        self.process.start(serve_here, path or self._path, self.port)

    def kill(self) -> None:
        self.process.kill()


@pytest.fixture
def restartable(workers, path) -> Restartable:
    return Restartable(workers, path)


@pytest.fixture
def client(restartable):
    with TCPStore("127.0.0.1", restartable.port, timeout=60) as store:
        yield store


def work(port: int, me: int) -> list[bytes]:
    with TCPStore("127.0.0.1", port, timeout=60) as store:
        taken = []
        for number in range(ROUNDS):
            store.add("count", 1)
            store.append("text", b"x")
            store.queue_push("items", b"%d %d" % (me, number))
            taken.append(store.queue_pop("items"))
        return taken


def test_nothing_is_lost_or_doubled_when_it_is_killed(workers, restartable, client):
    clients = workers(3)
    pending = [worker.start(work, restartable.port, me) for me, worker in enumerate(clients)]
    for part in range(1, 4):
        while client.add("count", 0) < part * ROUNDS // 2:
            pass
        restartable.kill()
        restartable.start()
    taken = Counter(item for each in pending for item in each.result())
    assert taken == Counter(b"%d %d" % (me, number) for me in range(3) for number in range(ROUNDS))
    assert client.add("count", 0) == 3 * ROUNDS
    assert client.get("text") == b"x" * 3 * ROUNDS
    assert client.queue_len("items") == 0


def test_waits_go_on_when_it_is_started_again(workers, restartable, client):
    def wait_for(port: int, key: str) -> bytes:
        with TCPStore("127.0.0.1", port, timeout=60) as store:
            store.set(f"{key} waits", "")
            return store.get(key)

    readers: list[Worker] = workers(2)
    pending = [worker.start(wait_for, restartable.port, f"key{rank}") for rank, worker in enumerate(readers)]
    client.wait(["key0 waits", "key1 waits"])
    restartable.kill()
    restartable.start()
    client.set("key0", "0")
    client.set("key1", "1")
    assert [each.result() for each in pending] == [b"0", b"1"]
    with pytest.raises(StoreTimeoutError):
        client.wait(["never"], 0.01)


def test_a_clone_waits_for_it_too(restartable, client):
    with client.clone() as clone:
        assert clone.add("count", 1) == 1
        restartable.kill()
        restartable.start()
        assert clone.add("count", 1) == 2
        assert client.add("count", 1) == 3


def test_a_store_that_stays_away_is_an_error(restartable, client, monkeypatch):
    monkeypatch.setattr(remote, "RESTART_TIMEOUT_S", 0.3)
    restartable.kill()
    with pytest.raises(StoreNetworkError, match=f":{restartable.port} is gone, and was not started again"):
        client.set("key", "value")
    restartable.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "RESTART_TIMEOUT_S", 60)
        client.set("key", "value")


def test_an_operation_waits_no_longer_than_its_timeout(restartable, client):
    restartable.kill()
    with pytest.raises(StoreNetworkError, match="not started again within 0.2 s"):
        client.wait(["key"], 0.2)
    client.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(StoreNetworkError, match="not started again within 0.3 s"):
        client.set("key", "value")


@pytest.fixture
def answering(request) -> Iterator[int]:
    """The port of a server that answers the first operations with these statuses, and the others well."""
    left = list(request.param)

    def execute(_operation: bytes, context: grpc.ServicerContext) -> bytes:
        if left:
            context.abort(left.pop(0), "for a test")
        return Outcome().SerializeToString()

    server = grpc.server(ThreadPoolExecutor(1))
    _, service, method = EXECUTE.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(execute)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = free_port()
    listening = listen_locally(server.add_insecure_port, "127.0.0.1", port)
    server.start()
    yield port
    server.stop(None).wait()
    listening.remove()


@pytest.mark.parametrize("answering", [[grpc.StatusCode.UNAVAILABLE] * 2], indirect=True, ids=["unavailable"])
def test_a_store_that_ends_while_a_client_joins_is_joined_again(answering):
    TCPStore("127.0.0.1", answering, timeout=timedelta(seconds=30)).close()


REFUSALS = [[grpc.StatusCode.RESOURCE_EXHAUSTED], [grpc.StatusCode.UNAUTHENTICATED]]


@pytest.mark.parametrize("answering", REFUSALS, indirect=True, ids=["too much", "unknown"])
def test_a_refusal_is_no_timeout(answering):
    with pytest.raises(StoreError, match="refuses this process: .*: for a test"):
        TCPStore("127.0.0.1", answering)


def test_another_log_is_another_store(restartable, client, tmp_path):
    client.set("key", "value")
    restartable.kill()
    restartable.start(str(tmp_path / "other"))
    with pytest.raises(StoreError, match="another store has been started here"):
        client.get("key")


def test_closing_ends_operations_that_wait_for_it(restartable, client):
    restartable.kill()
    errors: list[StoreError] = []

    def wait() -> None:
        with pytest.raises(StoreError) as caught:
            client.get("key")
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(20)
    assert "closed" in str(errors[0])


@pytest.mark.parametrize("by", ["URL", "variable"])
def test_workers_meet_there(workers, restartable, by):
    def meet(port: int, rank: int, by: str) -> None:
        if by == "URL":
            group = rendezvous(f"store://127.0.0.1:{port}?rank={rank}&world_size=2")
        else:
            os.environ["GRADWIRE_STORE"] = f"127.0.0.1:{port}"
            group = rendezvous(rank=rank, world_size=2)
        assert not getattr(group.store, "audit_counts", dict)()  # it hosts nothing
        group.wait_for_all(60)
        group.close()

    started = workers(2)
    pending = [worker.start(meet, restartable.port, rank, by) for rank, worker in enumerate(started)]
    for each in pending:
        each.result()


def test_the_command(path, python):
    arguments = ["-m", "gradwire", "store", "--log", path, "--port", "0", "--sync"]
    reading, writing = os.pipe()
    with (
        open(reading) as printed,
        open(writing, "w") as output,
        python.start(*arguments, stdout=output, stderr=output) as program,
    ):
        output.close()
        line = printed.readline()
        port = int(line.removeprefix("store on 127.0.0.1:").partition(",")[0])
        with TCPStore("127.0.0.1", port) as store:
            store.set("key", "value")
        os.kill(program.pid, signal.SIGTERM)
        assert program.wait(60) == 0
    assert Path(path).stat().st_mode & 0o777 == 0o600
    store = opened(path)
    assert [list(change.keys) for change in contents(store)] == [["key"]]
    store.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "70000"], "70000 is not in the range 0<=x<=65535"),
        (["--host", "192.0.2.1"], "is refused: it is not a loopback address"),
        ([], "is used by another process"),
    ],
)
def test_what_it_refuses(path, arguments, problem, capsys):
    held = opened(path) if not arguments else None
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as ended:
        run_command(command, ["--log", path, *arguments], "gradwire store")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert problem in f"{ended.value.code} {capsys.readouterr().err}"
    if held is not None:
        held.close()
