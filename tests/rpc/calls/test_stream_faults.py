"""Streams that fail, are closed early, or lose a worker."""

import asyncio
import gc
import threading
from typing import Any

import pytest
from gradwire import Outcome, rpc
from gradwire.errors import (
    LimitReachedError,
    NotInitializedError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    WorkerLostError,
    WorkerSuspectError,
)
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.calls.streams import Streams
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rref import forks

from tests import remote_functions
from tests.remote_functions import add, assert_clean, event, set_event, wait_until
from tests.rpc.calls.generators import (
    after_event,
    count_to,
    fail_after,
    opens_late,
    references,
    wait_for_event,
    waits,
    waits_between,
    watched,
    yields_an_item_that_does_not_pickle,
    yields_an_item_that_does_not_unpickle,
)
from tests.rpc.peers import links
from tests.rpc.requests.test_flow_control import figures, limits
from tests.stopped import stopped

MIB = 1 << 20


def test_an_error_comes_after_the_items_before_it(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        stream = rpc.rpc_stream("worker1", fail_after, (3,))
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(LookupError, match="no more of these") as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert caught.value.__cause__.worker == "worker1"
        assert "in fail_after" in caught.value.__cause__.remote_traceback
        assert next(stream, "over") == "over"
        del caught
        assert_clean()

    a.run(check)
    b.run(assert_clean)


async def return_soon() -> int:
    return 1


def test_functions_that_cannot_be_streamed(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        with pytest.raises(
            TypeError, match="add returned 'int', which cannot be streamed: rpc_stream needs a gen"
        ):
            next(rpc.rpc_stream("worker1", add, (1, 2)))
        with pytest.raises(TypeError, match="return_soon returned 'coroutine', which cannot be streamed"):
            next(rpc.rpc_stream("worker1", return_soon))
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            next(rpc.rpc_stream("worker1", count_to))
        with pytest.raises(RuntimeError, match="the function to stream raised StopIteration"):
            next(rpc.rpc_stream("worker1", next, (iter(()),)))
        with pytest.raises(ValueError, match="window is 0"):
            rpc.rpc_stream("worker1", count_to, (1,), window=0)
        with pytest.raises(ValueError, match="window_items is 1.5"):
            rpc.rpc_stream("worker1", count_to, (1,), window_items=1.5)
        with pytest.raises(SerializationError, match="args"):
            rpc.rpc_stream("worker1", count_to, (threading.Lock(),))
        assert_clean()

    a.run(check)
    b.run(assert_clean)
    assert "never awaited" not in b.describe()


def test_items_that_cannot_be_sent_or_unpickled(workers):
    a, b = workers.rpc(2, channels=rpc.ChannelOptions(max_payload_bytes=MIB))

    def check() -> None:
        unreadable = rpc.rpc_stream("worker1", yields_an_item_that_does_not_unpickle)
        assert next(unreadable) == 1
        with pytest.raises(ValueError, match="cannot be made again"):
            next(unreadable)
        assert next(unreadable, None) is None
        unsendable = rpc.rpc_stream("worker1", yields_an_item_that_does_not_pickle)
        assert next(unsendable) == 1
        with pytest.raises(SerializationError, match=r"the item\['lock'\] cannot be sent"):
            next(unsendable)
        with pytest.raises(ValueError, match="max_payload_bytes is 1048576"):
            next(rpc.rpc_stream("worker1", watched, ("refused", 2, 2 * MIB)))
        assert rpc.rpc_sync("worker1", wait_for_event, ("refused",))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def watched_stream() -> rpc.RpcStream[int]:
    """A stream from worker1, on which the event "closed" is set when its generator is closed."""
    return rpc.rpc_stream("worker1", watched, ("closed",))


def close_twice() -> None:
    stream = watched_stream()
    next(stream)
    stream.close()
    stream.close()
    assert next(stream, None) is None


def raise_within() -> None:
    with pytest.raises(KeyError), watched_stream() as stream:
        next(stream)
        raise KeyError


def break_off() -> None:
    for _ in watched_stream():
        break


def drop() -> None:
    stream = watched_stream()
    next(stream)
    del stream


def close_before_the_first_item() -> None:
    for _ in range(100):
        watched_stream().close()
    rpc.rpc_sync("worker1", set_event, ("closed",))  # perhaps none of them began


def drop_in_a_cycle() -> None:
    cycle: list[Any] = [watched_stream()]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


@pytest.mark.parametrize(
    "end",
    [close_twice, raise_within, break_off, drop, close_before_the_first_item, drop_in_a_cycle],
    ids=lambda end: end.__name__,
)
def test_closing_runs_finally_at_the_producer(two_workers, end):
    def check() -> None:
        end()
        assert rpc.rpc_sync("worker1", wait_for_event, ("closed",))

    two_workers[0].run(check)


def test_references_in_items_that_were_not_taken(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        with rpc.rpc_stream("worker1", references, (1000,), window_items=50) as stream:
            assert next(stream).to_here() == 0
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_messages_about_unknown_streams(agents):
    a, b = agents(2)
    a.control.send(b.info, "call.cancelled", (1 << 50,))
    for kind in ("ITEM", "CREDIT"):
        a.post(b.info, MessageType.Value(f"STREAM_{kind}"), None, header=lambda e: _name_stream(e, 1 << 50))
    a.peers.of(b.info).send(agent_pb2.Envelope(id=1 << 50, type=MessageType.CANCEL).SerializeToString())
    assert a.request(b.info, Request(MessageType.CALL, (add, (1, 2), {}))).wait() == 3
    wait_until(lambda: not b.debug_info()["agent.server_active_calls"])
    assert b.debug_info()["num_consumed_streams"] == b.debug_info()["num_produced_streams"] == 0


def _name_stream(envelope: agent_pb2.Envelope, stream_id: int) -> None:
    envelope.stream.stream_id = stream_id


def test_the_consumer_dies(workers):
    a, b = workers.rpc(2)

    def start() -> None:
        stream = rpc.rpc_stream("worker1", watched, ("consumer died",), window_items=3)
        next(stream)
        remote_functions.keep(stream)

    a.run(start)
    a.kill()
    assert b.run(wait_for_event, "consumer died")
    b.run(assert_clean)


def test_the_producer_dies(workers):
    a, b = workers.rpc(2, rpc_timeout=0)

    def start() -> None:
        stream = rpc.rpc_stream("worker1", waits_between, ("never",))
        remote_functions.keep(stream)
        assert next(stream) == "first"

    def check() -> None:
        with pytest.raises(WorkerLostError, match="'worker1' is lost"):
            next(remote_functions.kept[-1])
        with pytest.raises(WorkerLostError, match="'worker1' is lost"):
            next(rpc.rpc_stream("worker1", count_to, (1,)))
        assert_clean()

    a.run(start)
    waiting = a.start(check)
    b.kill()
    waiting.result()


def test_the_producer_is_suspect(workers):
    """The credit for what is taken then cannot be sent, but the stream has run."""
    a, b = workers.rpc(2, rpc_timeout=0)

    def start() -> None:
        stream = rpc.rpc_stream("worker1", count_to, (100,), window_items=8)
        remote_functions.keep(stream)
        wait_until(lambda: len(stream._consumer._buffer) == 8)
        links.call_for_ever("worker1")

    def check() -> None:
        links.cut(1)
        links.assert_suspect(links.futures.pop())
        taken = []
        with pytest.raises(WorkerSuspectError) as caught:
            for item in remote_functions.kept[-1]:
                taken.append(item)
        assert taken == list(range(8))
        assert caught.value.outcome is Outcome.UNKNOWN

    a.run(start)
    with stopped(b):
        a.run(check)
    b.run(lambda: wait_until(lambda: not rpc.debug_info()["num_produced_streams"]))


def test_the_generator_is_closed_if_its_consumer_alone_has_suspected_it(agents):
    """The producer may begin the stream after it has noticed, itself, that the connection broke."""
    a, b = agents(2)
    with holder.using(a):
        stream = rpc.rpc_stream(b.info, count_to, (100,), timeout=0, window_items=8)
        assert next(stream) == 0
        a._caller.note_suspect(b.info, "it does not answer")()
        with pytest.raises(WorkerSuspectError):
            list(stream)
    wait_until(lambda: not b.debug_info()["num_produced_streams"])


async def collect(stream: rpc.RpcStream) -> list[Any]:
    return [item async for item in stream]


def test_a_stream_is_not_complete_if_its_producer_alone_has_suspected_the_consumer(agents):
    """As when the connection breaks, and the consumer has connected again before it has noticed."""
    a, b = agents(2)
    with holder.using(a):
        stream = rpc.rpc_stream(b.info, count_to, (100,), window_items=2)
        assert next(stream) == 0
        b.extension(Streams).on_worker_suspect(a.info, "it has connected again")
        why = "'agent1' has ended the stream before its last item: it has connected again"
        with pytest.raises(RpcError, match=why) as caught:
            list(stream)
        assert caught.value.outcome is Outcome.RAN


def test_an_item_that_takes_too_long(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        stream = rpc.rpc_stream("worker1", waits, ("too late",), timeout=0.2)
        with pytest.raises(
            RpcTimeoutError, match=r"0\.2 s: waiting for the next item of a stream from worker 'worker1'"
        ):
            next(stream)
        assert next(stream, None) is None
        again = rpc.rpc_stream("worker1", waits, ("too late",), timeout=0.2)
        with pytest.raises(RpcTimeoutError):
            asyncio.run(collect(again))
        rpc.rpc_sync("worker1", set_event, ("too late",))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def is_postponed(found: dict[str, int], bound: int) -> bool:
    """Returns whether a generator waits; until the sockets are full, it does so for a moment again and again."""
    return found["postponed_requests"] == 1 and found["send_queue_bytes"] > bound // 2


@pytest.mark.parametrize(("items", "nbytes"), [(200, MIB), (1 << 20, 256)], ids=["large", "small"])
def test_a_window_of_any_size_does_not_queue_items_without_end(workers, items, nbytes):
    """A consumer that reads nothing may ask for any window: the producer pauses when too much is queued for it."""
    bound = 2 * MIB
    a, b = workers.rpc(
        2,
        rpc_timeout=0,
        transports=("tcp", "grpc"),
        channels=rpc.ChannelOptions(max_shared_bytes=1),
        flow_control=limits(max_unsent_bytes=bound),
    )

    def start() -> None:
        stream = rpc.rpc_stream(
            "worker1", after_event, ("go", items, nbytes), window=1 << 60, window_items=1 << 60
        )
        assert len(next(stream)) == 0
        remote_functions.kept.append(stream)

    def drain() -> int:
        with remote_functions.kept.pop() as stream:
            return sum(len(next(stream)) for _ in range(100))

    a.run(start)
    with stopped(a):
        b.run(set_event, "go")
        b.run(wait_until, lambda: is_postponed(figures("worker0"), bound))
        assert b.run(figures, "worker0")["send_queue_bytes"] <= bound + 32 * MIB
    assert a.run(drain) == 100 * nbytes
    b.run(wait_until, lambda: not rpc.debug_info()["num_produced_streams"])
    b.run(assert_clean)


def test_streams_to_one_worker_are_bounded(workers):
    a, _ = workers.rpc(2, flow_control=limits(max_in_flight=8, max_received=8))

    def ask_for_more() -> None:
        streams = [rpc.rpc_stream("worker1", count_to, (10,), window_items=1) for _ in range(8)]
        agent: Any = current_agent()
        agent._flow_control.close()  # it has no bound of its own any more
        streams += [rpc.rpc_stream("worker1", count_to, (10,), window_items=1) for _ in range(8)]
        assert [next(each) for each in streams] == [0] * 16
        with pytest.raises(LimitReachedError, match="worker 'worker0' has 16 streams open, of 16 at most"):
            next(rpc.rpc_stream("worker1", count_to, (10,)))
        assert list(streams.pop()) == list(range(1, 10))
        assert list(rpc.rpc_stream("worker1", count_to, (10,))) == list(range(10))

    a.run(ask_for_more)


def test_a_stream_that_is_closed_while_its_function_runs(agents):
    """The function has not returned its generator yet, so that there is nothing to be closed."""
    a, b = agents(2)
    with holder.using(a):
        event("begin").clear()
        stream = rpc.rpc_stream(b.info, opens_late, ("begin",))
        wait_until(lambda: b.debug_info()["agent.server_active_calls"])
        stream.close()
    wait_until(lambda: not a.control.pending())
    set_event("begin")
    wait_until(lambda: not b.debug_info()["agent.server_active_calls"])
    wait_until(lambda: not b.debug_info()["num_produced_streams"])


def test_the_outcome_of_a_stream_that_a_shutdown_ends_is_unknown(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        stream = rpc.rpc_stream("worker1", waits_between, ("late",))
        assert next(stream) == "first"
        ends = []

        def wait_for_next() -> None:
            with pytest.raises(NotInitializedError) as caught:
                next(stream)
            ends.append(caught.value.outcome)

        waiting = threading.Thread(target=wait_for_next)
        waiting.start()
        changed: Any = stream._consumer._changed
        wait_until(lambda: changed._waiters)
        rpc.shutdown(graceful=False)
        waiting.join(20)
        assert ends == [Outcome.UNKNOWN]

    a.run(check)
    b.run(set_event, "late")


def test_an_item_whose_references_are_refused_is_replaced_by_the_error(workers):
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forks, "MAX_ACCEPTING", 0)
            with pytest.raises(LimitReachedError, match="one too many"):
                next(rpc.rpc_stream("worker1", references, (2,), timeout=5))

    a, _ = workers.rpc(2)
    a.run(check)


def test_an_item_fails_whose_payload_does_not_come_although_the_end_of_the_stream_has(agents):
    a, b = agents(2, transports=("grpc",))
    with holder.using(a):
        assert rpc.rpc_sync(b.info, add, (1, 1)) == 2
        a.peers.of(b.info).channels.chunked.is_served = True  # as if the stream of chunks had come before
        stream = rpc.rpc_stream(b.info, watched, ("end", 1, MIB))
        with pytest.raises(WorkerSuspectError):
            next(stream)
        wait_until(lambda: a.peers.of(b.info).absence is None)
