"""Messages between two ranks, on all engines for tensors on the CPU."""

import threading
import time
import traceback
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GroupAbortedError, RankLostError

from tests.c10d.members import MIB, opened, receive, send

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

ENGINES = ["shm", "gloo", "mpi"]


@pytest.fixture(params=ENGINES)
def pair(request, group_on):
    """Two ranks on each engine for CPU tensors."""
    return group_on(f"gradwire_{request.param}", 2)


@pytest.fixture
def pair_on_shm(group_on):
    return group_on("gradwire_shm", 2)


def receive_in_reverse_order() -> list[float]:
    """The first receive gets its message only after the second has completed."""
    first, second = torch.zeros(1), torch.zeros(1)
    works = [dist.irecv(first, 0, tag=1), dist.irecv(second, 0, tag=2)]
    works[1].wait()
    send(0, tag=9)
    works[0].wait()
    return [first.item(), second.item()]


def send_in_reverse_order() -> None:
    dist.send(torch.full((1,), 2.0), 1, tag=2)
    receive(1, tag=9)
    dist.send(torch.full((1,), 1.0), 1, tag=1)


def test_receives_with_different_tags_complete_in_any_order(pair):
    asked = pair[1].start(receive_in_reverse_order)
    pair[0].run(send_in_reverse_order)
    assert asked.result() == [1.0, 2.0]


def time_out_then_wait_again() -> list[object]:
    """Waits for a message that has not been sent, until a timeout, and again after it has been sent."""
    tensor = torch.zeros(3)
    work = dist.irecv(tensor, 0)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        work.wait(timedelta(seconds=0.05))
    waited = time.monotonic() - begun
    came = work.is_completed()
    send(0, tag=5)
    work.wait()
    return [waited < 30, came, tensor.tolist()]  # the timeout of the group is 60 s


def send_on_request() -> None:
    receive(1, tag=5)
    dist.send(torch.ones(3), 1)


def test_a_receive_goes_on_after_a_wait_for_it_timed_out(pair):
    asked = pair[1].start(time_out_then_wait_again)
    pair[0].run(send_on_request)
    assert asked.result() == [True, False, [1.0, 1.0, 1.0]]


def time_out_then_wait_elsewhere(key: str) -> None:
    """Gives up a wait for a message, then waits until its sender says that it has been received."""
    tensor = torch.zeros(4 * MIB)
    work = dist.irecv(tensor, 0)
    with pytest.raises(TimeoutError):
        work.wait(timedelta(seconds=1))  # by then a progress thread has nothing to do any more
    opened[-1].set(f"{key} can come", "")
    opened[-1].wait([f"{key} is received"], timedelta(seconds=20))
    work.wait()
    assert tensor.sum().item() == 4 * MIB


def send_when_it_can_come(key: str) -> None:
    opened[-1].wait([f"{key} can come"])
    dist.send(torch.ones(4 * MIB), 1)  # more than fits into the buffers between the two ranks
    opened[-1].set(f"{key} is received", "")


def test_a_receive_goes_on_while_nobody_waits_after_a_timeout(pair):
    asked = pair[1].start(time_out_then_wait_elsewhere, "the message")
    pair[0].run(send_when_it_can_come, "the message")
    asked.result()


def receive_without_waiting() -> list[object]:
    """Receives with the callback of a future, and by polling `is_completed`."""
    tensors = [torch.zeros(2), torch.zeros(2)]
    works = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in enumerate(tensors)]
    arrived = threading.Event()
    works[0].get_future().add_done_callback(lambda _: arrived.set())
    send(0, tag=5)
    called = arrived.wait(50)
    while not works[1].is_completed():
        arrived.wait(0)
    return [called, works[1].is_success(), *(tensor.tolist() for tensor in tensors)]


def send_two_on_request() -> None:
    receive(1, tag=5)
    for tag in range(2):
        dist.send(torch.full((2,), float(tag)), 1, tag=tag)


def test_receives_complete_without_a_wait(pair):
    asked = pair[1].start(receive_without_waiting)
    pair[0].run(send_two_on_request)
    assert asked.result() == [True, True, [0.0, 0.0], [1.0, 1.0]]


COUNT, LARGE = 20, 300_000


def receive_large_later() -> list[bool]:
    """Receives more than fits into the buffers between the two ranks, after waiting for a later message."""
    tensors = [torch.zeros(LARGE) for _ in range(COUNT)]
    works = [dist.irecv(tensor, 0) for tensor in tensors]
    receive(0, tag=1)  # sent after all of them
    for work in works:
        work.wait()
    return [bool((tensor == number).all()) for number, tensor in enumerate(tensors)]


def send_large() -> None:
    for number in range(COUNT):
        dist.send(torch.full((LARGE,), float(number)), 1)
    send(1, tag=1)


def test_a_wait_for_one_message_receives_others(pair):
    asked = pair[1].start(receive_large_later)
    pair[0].run(send_large)
    assert asked.result() == [True] * COUNT


def receive_on_threads(count: int) -> list[float]:
    """Receives on several threads, each with a tag of its own."""
    tensors = [torch.zeros(1000) for _ in range(count)]
    threads = [
        threading.Thread(target=dist.recv, args=(tensor, 0), kwargs={"tag": tag})
        for tag, tensor in enumerate(tensors)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return [tensor.mean().item() for tensor in tensors]


def send_backwards(count: int) -> None:
    for tag in reversed(range(count)):
        dist.send(torch.full((1000,), float(tag)), 1, tag=tag)


def test_many_threads_receive_at_once(pair):
    asked = pair[1].start(receive_on_threads, 8)
    pair[0].run(send_backwards, 8)
    assert asked.result() == [float(tag) for tag in range(8)]


def send_and_leave() -> None:
    dist.send(torch.ones(2), 1)
    dist.destroy_process_group()


def receive_after_departure() -> list[object]:
    group, looked = dist.group.WORLD, threading.Event()
    while not group._core.departures:
        looked.wait(0.05)
    tensor = torch.zeros(2)
    dist.recv(tensor, 0)
    with pytest.raises(RankLostError, match="rank 0"):
        dist.recv(tensor, 0)
    with pytest.raises(RankLostError, match="rank 0"):
        dist.send(tensor, 0)
    return tensor.tolist()


def test_messages_sent_before_a_departure_are_received(pair_on_shm):
    asked = pair_on_shm[1].start(receive_after_departure)
    pair_on_shm[0].run(send_and_leave)
    assert asked.result() == [1.0, 1.0]


def fail_often() -> tuple[int, bool]:
    """Returns the depth of the error's traceback after many calls, and whether one of their tensors is alive."""
    dist.group.WORLD.abort()
    references = []
    for _ in range(50):
        tensor = torch.ones(3)
        references.append(weakref.ref(tensor))
        with pytest.raises(GroupAbortedError) as raised:
            dist.all_reduce(tensor)
    depth = len(traceback.extract_tb(raised.value.__traceback__))
    del raised, tensor
    return depth, any(reference() is not None for reference in references[:-1])


def test_the_error_of_a_failed_group_keeps_no_tensors(pair_on_shm):
    depth, kept = pair_on_shm[0].run(fail_often)
    assert depth < 20
    assert not kept
