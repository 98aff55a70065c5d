"""Events of workers that join and leave."""

import asyncio
import queue
import threading

import pytest
from gradwire import rpc
from gradwire.errors import NotInitializedError, UnknownWorkerError
from gradwire.rpc import aio
from gradwire.rpc.contracts.worker import SHUT_DOWN
from gradwire.rpc.contracts.worker_events import WorkerEvents

from tests.remote_functions import process_id

seen: "queue.Queue[tuple]" = queue.Queue()
"""The events that the worker on which this runs has noted."""
handles: list[rpc.WorkerEventHandle] = []


def note(*event) -> None:
    seen.put(event)


def register() -> list[str]:
    """Notes the events from now on; returns the names of the workers that are present."""
    handles[:] = [
        rpc.on_worker_joined(lambda worker: note("joined", worker.name)),
        rpc.on_worker_left(lambda worker, reason: note("left", worker.name, reason)),
    ]
    assert handles[0].workers == handles[1].workers
    return [worker.name for worker in handles[0].workers]


def next_event() -> tuple:
    return seen.get(timeout=30)


def nothing_more() -> bool:
    return seen.empty()


def join(name: str, url: str) -> None:
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))


@pytest.fixture
def join_one(workers, tmp_path):
    def start(name):
        (worker,) = workers(1)
        worker.name = name
        worker.run(join, name, f"file://{tmp_path / 'dynamic'}")
        return worker

    return start


def names() -> list[str]:
    return [worker.name for worker in rpc.get_worker_infos()]


def test_the_workers_of_a_static_group_can_be_listed(workers):
    a, _ = workers.rpc(2)
    infos = a.run(rpc.get_worker_infos)
    assert infos == [rpc.WorkerInfo("worker0", 0), rpc.WorkerInfo("worker1", 1)]


def test_the_current_members_of_a_dynamic_group_can_be_listed(join_one):
    a, b = join_one("a"), join_one("b")
    a.run(register)
    assert a.run(names) == ["a", "b"]
    b.run(rpc.shutdown)
    assert a.run(next_event)[:2] == ("left", "b")
    assert a.run(names) == ["a"]


def test_joins_and_leaves_of_a_dynamic_group_arrive_in_order(join_one):
    a = join_one("a")
    b = join_one("b")
    assert a.run(register) == ["a", "b"]
    with pytest.raises(UnknownWorkerError, match=r"'c': .* are a, b; if it has yet to join, .*on_worker_joined"):
        a.run(rpc.rpc_sync, "c", process_id)
    c = join_one("c")
    c.run(rpc.shutdown)
    b.kill()
    again = join_one("b")
    events = [a.run(next_event) for _ in range(4)]
    assert events[:2] == [("joined", "c"), ("left", "c", "it has shut down")]
    assert events[2] == ("left", "b", "its process has ended without a goodbye")
    assert events[3] == ("joined", "b")
    again.run(rpc.shutdown)
    assert a.run(next_event)[:2] == ("left", "b")
    assert a.run(nothing_more)


def test_the_loss_of_a_worker_that_was_never_called_is_an_event(workers):
    a, b, c = workers.rpc(3)
    assert a.run(register) == ["worker0", "worker1", "worker2"]
    b.kill()
    kind, name, reason = a.run(next_event)
    assert (kind, name) == ("left", "worker1")
    assert reason  # its text depends on whether the workers were connected by then
    c.run(rpc.shutdown, graceful=False)
    assert a.run(next_event)[:2] == ("left", "worker2")
    assert a.run(names) == ["worker0", "worker1", "worker2"]
    assert a.run(lambda: [worker.name for worker in rpc.on_worker_left(note).workers]) == ["worker0"]


def test_a_callback_may_make_calls(workers):
    a, b, c = workers.rpc(3)

    def ask(worker, reason):
        note(rpc.rpc_sync("worker2", process_id), threading.current_thread().name)

    def subscribe():
        handles.append(rpc.on_worker_left(ask))

    a.run(subscribe)
    b.kill()
    pid, thread = a.run(next_event)
    assert pid == c.pid
    assert thread.startswith("gradwire-worker0-")


def test_an_error_of_a_callback_is_logged_and_the_next_one_runs(workers):
    a, b = workers.rpc(2)

    def fail(worker, reason):
        raise SystemExit("no")

    def subscribe():
        handles.append(rpc.on_worker_left(fail))
        register()

    a.run(subscribe)
    b.kill()
    assert a.run(next_event)[:2] == ("left", "worker1")
    assert "a callback failed on WorkerLeft" in a.log.read_text()


def test_a_removed_callback_is_not_called(workers):
    a, b, c = workers.rpc(3)

    def subscribe():
        removed = rpc.on_worker_left(lambda worker, _: note("removed", worker.name))
        with rpc.on_worker_left(lambda worker, _: note("block", worker.name)):
            removed.remove()
            removed.remove()
        register()

    a.run(subscribe)
    for other in (b, c):
        other.kill()
        assert a.run(next_event)[0] == "left"


def test_a_callback_must_be_callable(workers):
    (a,) = workers.rpc(1)

    def check():
        for register_on in (rpc.on_worker_joined, rpc.on_worker_left):
            with pytest.raises(TypeError, match="callback is 'x', which cannot be called"):
                register_on("x")

    a.run(check)


@pytest.mark.parametrize("ask", [rpc.get_worker_infos, aio.worker_events, lambda: rpc.on_worker_left(note)])
def test_events_need_init_rpc(ask):
    with pytest.raises(NotInitializedError):
        ask()


def test_an_asyncio_program_gets_the_events_until_shutdown(join_one):
    a, b = join_one("a"), join_one("b")

    async def follow():
        stream = aio.worker_events()
        assert [worker.name for worker in stream.workers] == ["a", "b"]
        note("ready")
        async for event in stream:
            note(event)
        note("end")

    async def follow_and_stop():
        stream = aio.worker_events()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    def begin():
        asyncio.run(follow_and_stop())
        threading.Thread(target=asyncio.run, args=(follow(),), name="follower", daemon=True).start()

    a.run(begin)
    assert a.run(next_event) == ("ready",)
    b.run(rpc.shutdown)
    join_one("c")
    (left,), (joined,) = a.run(next_event), a.run(next_event)
    assert (left.worker.name, left.reason) == ("b", "it has shut down")
    assert isinstance(joined, rpc.WorkerJoined)
    assert joined.worker.name == "c"
    a.run(rpc.shutdown)
    assert a.run(next_event) == ("end",)


def test_every_change_is_either_before_or_after_a_subscription():
    """At whatever moment: the workers present at a subscription and the events after it make up the group."""
    events = WorkerEvents(lambda task: threading.Thread(target=task).start(), lambda _worker: None)
    events.open([rpc.WorkerInfo("first", 0)])
    halfway = threading.Event()

    def change():
        for number in range(1, 2000):
            events.note_joined(rpc.WorkerInfo(f"w{number}", number))
            if number % 2:
                events.note_lost(rpc.WorkerInfo(f"w{number}", number), SHUT_DOWN)
            if number == 200:
                halfway.set()

    changing = threading.Thread(target=change)
    changing.start()
    assert halfway.wait(30)
    streams = [events.stream() for _ in range(20)]
    changing.join()
    for stream in streams:
        present = {worker.id for worker in stream.workers}
        while (event := take(stream)) is not None:
            if isinstance(event, rpc.WorkerJoined):
                assert event.worker.id not in present
                present.add(event.worker.id)
            else:
                present.remove(event.worker.id)
        assert present == {0, *range(2, 2000, 2)}


def take(stream):
    return stream.take(lambda: None)
