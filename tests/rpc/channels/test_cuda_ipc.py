"""Tensors on CUDA devices between workers of one host, by device memory: on fake GPUs, with real processes."""

import os
import threading
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.base import PayloadLostError
from gradwire.rpc.channels.cuda.channel import MappedDeviceSegments
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.contracts.options import KIB, MIB

from tests.event_loop import run_on_loop
from tests.remote_functions import wait_until
from tests.rpc.channels import fake_cuda
from tests.rpc.channels.cuda_functions import describe, describe_all, echo, keep, kept_sums, overwrite

A, B = "GPU-a", "GPU-b"
SAME = [{"worker1": {0: 0}}, {}]
"""Device maps by which cuda:0 of worker0 becomes cuda:0 of worker1."""

pytestmark = pytest.mark.skipif("unix" not in fake_cuda.TRANSPORTS, reason="device memory needs a unix socket")


def elements(count: int = 256 * KIB) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def use_ipc(count: int = 256 * KIB, function=describe, device: str = "cuda:0") -> torch.Tensor:
    """Sends a tensor of this size until one goes by device memory; returns it."""
    tensor = fake_cuda.gpus.put(elements(count), device)
    before = rpc.rpc_sync("worker1", copied_bytes)
    while rpc.rpc_sync("worker1", copied_bytes) == before:
        rpc.rpc_sync("worker1", function, args=(tensor,))
    return tensor


def copied_bytes() -> int:
    return fake_cuda.gpus.copied_bytes


def staged_bytes() -> int:
    return fake_cuda.gpus.staged_bytes


def segments() -> tuple[int, int]:
    return len(fake_cuda.gpus.exported), len(fake_cuda.gpus.mapped)


def test_the_first_tensor_goes_by_the_host_and_later_ones_by_device_memory(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)

    def check():
        tensor = fake_cuda.gpus.put(elements(), "cuda:0")
        wanted = describe(tensor)
        assert wanted[0] == "cuda:0"
        assert rpc.rpc_sync("worker1", describe, args=(tensor,)) == wanted
        assert fake_cuda.gpus.staged_bytes == tensor.nbytes
        use_ipc()
        assert fake_cuda.channel_to("worker1") == "cuda_ipc"
        staged, copied = fake_cuda.gpus.staged_bytes, rpc.rpc_sync("worker1", copied_bytes)
        for _ in range(5):
            assert rpc.rpc_sync("worker1", describe, args=(tensor,)) == wanted
        assert fake_cuda.gpus.staged_bytes == staged
        return rpc.rpc_sync("worker1", copied_bytes) - copied

    assert a.run(check) == 5 * MIB
    assert b.run(segments) == (0, 1)


def test_devices_are_found_by_uuid_and_not_by_index(workers):
    # The processes see the two GPUs in opposite orders, and the device map crosses them again.
    a, b = fake_cuda.join(workers, [[A, B], [B, A]], [{"worker1": {0: 1, 1: 0}}, {}])

    def check():
        for here, there in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
            tensor = use_ipc(device=here)
            assert rpc.rpc_sync("worker1", describe, args=(tensor,))[:2] == (there, describe(tensor)[1])
        return rpc.debug_info()["cuda"]

    assert a.run(check)["channels"] == {"worker1": "cuda_ipc"}
    assert b.run(segments) == (0, 2)


def test_answers_take_the_device_map_the_other_way_round(workers):
    a, _ = fake_cuda.join(workers, [[A, B], [A, B]], [{"worker1": {0: 1}}, {}])

    def check():
        tensor = use_ipc(function=echo)
        before = fake_cuda.gpus.copied_bytes
        while fake_cuda.gpus.copied_bytes == before:  # the other worker makes a segment as well
            assert torch.equal(rpc.rpc_sync("worker1", echo, args=(tensor,)).cpu(), tensor.cpu())
        result = rpc.rpc_sync("worker1", overwrite, args=(tensor,))
        assert result.device == torch.device("cuda:0")
        assert (result.cpu() == -1).all()
        assert torch.equal(tensor.cpu(), elements())  # the caller's is another one
        assert rpc.rpc_sync("worker1", describe, args=(tensor,))[0] == "cuda:1"

    a.run(check)


def test_a_tensor_is_sent_as_it_is_at_the_call_and_the_caller_does_not_wait(workers):
    a, _ = fake_cuda.join(workers, [[A], [A]], SAME)

    def check():
        tensor = use_ipc()
        wanted = describe(tensor)
        fake_cuda.gpus.stall()
        answer = rpc.rpc_async("worker1", describe, args=(tensor,))
        rpc.rpc_sync("worker1", os.getpid)  # the envelope has arrived
        assert not answer.done()
        fake_cuda.gpus.enqueue(lambda: tensor.zero_())  # as a kernel that is queued after the call
        fake_cuda.gpus.release()
        assert answer.wait() == wanted
        assert describe(tensor)[1] == 0

    a.run(check)


def test_a_thread_that_waits_for_a_device_is_replaced(workers):
    a, _ = fake_cuda.join(workers, [[A], [A]], SAME, num_worker_threads=1)

    def check():
        tensor = use_ipc()
        fake_cuda.gpus.stall()
        answer = rpc.rpc_async("worker1", describe, args=(tensor,))
        for _ in range(3):
            assert rpc.rpc_sync("worker1", os.getpid) != os.getpid()
        assert not answer.done()
        fake_cuda.gpus.release()
        answer.wait()

    a.run(check)


def test_what_arrives_outlives_the_segment_and_the_sender(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)

    def send():
        use_ipc()
        for value in range(3):
            tensor = fake_cuda.gpus.put(torch.full((256 * KIB,), float(value)), "cuda:0")
            rpc.rpc_sync("worker1", keep, args=(tensor,))
        return segments()

    assert a.run(send) == (1, 0)  # all in one segment
    a.kill()
    wait_until_unmapped(b)
    assert b.run(kept_sums) == [0.0, 256.0 * KIB, 512.0 * KIB]
    assert b.run(segments) == (0, 0)


def wait_until_unmapped(worker):
    assert worker.run(lambda: fake_cuda.gpus.unmapped.acquire(timeout=60))


def test_a_dead_receiver_releases_what_it_holds(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)

    def send():
        tensor = use_ipc()
        fake_cuda.gpus.stall()  # so that the receiver still has it
        return rpc.rpc_async("worker1", describe, args=(tensor,)) and rpc.debug_info()["cuda"]["ipc_bytes"]

    assert a.run(send) == 2 * MIB
    b.kill()

    def check():
        fake_cuda.gpus.release()
        assert fake_cuda.gpus.freed.acquire(timeout=60)
        wait_until(lambda: rpc.debug_info()["cuda"]["ipc_bytes"] == 0)
        return segments()

    assert a.run(check) == (0, 0)


def test_the_tensors_of_a_message_share_a_segment(workers):
    a, b = fake_cuda.join(workers, [[A, B], [A, B]], [{"worker1": {0: 0, 1: 1}}, {}])

    def check():
        put = fake_cuda.gpus.put
        use_ipc(128 * KIB)
        use_ipc(128 * KIB, device="cuda:1")
        tensors = [put(torch.full((each,), float(each)), f"cuda:{each % 2}") for each in range(1, 300)]
        staged = fake_cuda.gpus.staged_bytes
        wanted = [describe(tensor) for tensor in tensors]
        for _ in range(3):
            assert rpc.rpc_sync("worker1", describe_all, args=(tensors,)) == wanted
        return fake_cuda.gpus.staged_bytes - staged

    assert a.run(check) == 0
    assert a.run(segments) == (2, 0)
    assert b.run(segments) == (0, 2)


def test_a_message_may_have_tensors_that_arrive_later(workers):
    # There is no shared memory for the tensor on the host, so it goes by a connection that the envelope waits for.
    small = rpc.ChannelOptions(max_shared_bytes=1)
    a, _ = fake_cuda.join(workers, [[A], [A]], SAME, channels=small)

    def check():
        tensor = use_ipc()
        wanted = [describe(tensor), describe(torch.ones(MIB)), describe(tensor)]
        for _ in range(4):  # at first in chunks by gRPC, then by bulk connections
            assert rpc.rpc_sync("worker1", describe_all, args=([tensor, torch.ones(MIB), tensor],)) == wanted

    a.run(check)


def test_segments_are_bounded_and_beyond_that_tensors_go_by_the_host(workers):
    options = rpc.CudaOptions(max_ipc_bytes=4 * MIB)
    a, b = fake_cuda.join(workers, [[A], [A]], SAME, cuda=options)

    def check():
        tensor = use_ipc()
        wanted = describe(tensor)
        fake_cuda.gpus.stall()
        # More than there is memory for; those by the host would wait for the stream here.
        first = rpc.rpc_async("worker1", describe, args=(tensor,))
        fake_cuda.gpus.release()
        answers = [rpc.rpc_async("worker1", describe, args=(tensor,)) for _ in range(20)]
        assert [answer.wait() for answer in [first, *answers]] == [wanted] * 21
        large = fake_cuda.gpus.put(elements(3 * MIB), "cuda:0")  # 12 MiB: its segment would be too large
        for _ in range(3):
            assert rpc.rpc_sync("worker1", describe, args=(large,)) == describe(large)
        return rpc.debug_info()["cuda"]["ipc_bytes"]

    assert a.run(check) in (2 * MIB, 4 * MIB)
    assert b.run(segments)[1] <= 2


@pytest.mark.parametrize("failure", ["can_export", "can_open", "no_peer"])
def test_what_cannot_be_shared_goes_by_the_host(workers, failure):
    visible = [[A], [B]] if failure == "no_peer" else [[A], [A]]
    options = {} if failure == "no_peer" else {failure: False}
    maps = [{"worker1": {0: 0}}, {"worker0": {0: 0}}]
    a, b = fake_cuda.join(workers, visible, maps, options)
    sender, receiver = (b, a) if failure == "can_export" else (a, b)
    other = receiver.name

    def check():
        tensor = fake_cuda.gpus.put(elements(), "cuda:0")
        while "failed" not in fake_cuda.channel_to(other):
            rpc.rpc_sync(other, describe, args=(tensor,))
        for _ in range(3):
            assert rpc.rpc_sync(other, describe, args=(tensor,)) == describe(tensor)
        wait_until(lambda: rpc.debug_info()["cuda"]["ipc_bytes"] == 0)
        return fake_cuda.channel_to(other), segments()

    described, left = sender.run(check)
    name = "cuIpcGetMemHandle" if failure == "can_export" else "cuIpcOpenMemHandle_v2"
    assert described.startswith(f"host (cuda:0 to cuda:0: {name} failed")
    assert left == (0, 0)
    assert receiver.run(copied_bytes) == 0


def test_a_hidden_gpu_is_read_by_a_peer(workers):
    a, b = fake_cuda.join(workers, [[A], [B]], SAME)
    b.run(lambda: fake_cuda.gpus.peers.add(A))

    def check():
        tensor = use_ipc()
        return rpc.rpc_sync("worker1", describe, args=(tensor,)) == describe(tensor)

    assert a.run(check)


def test_a_device_that_fails_while_sending_is_not_used(workers):
    a, _ = fake_cuda.join(workers, [[A], [A]], SAME)

    def check():
        tensor = use_ipc()
        pool = current_agent().peers.by_id[1].channels.cuda_ipc._pool  # type: ignore[attr-defined]
        wait_until(lambda: not pool._lent)  # else there would be a second segment
        fake_cuda.gpus.is_broken = True
        assert rpc.rpc_sync("worker1", describe, args=(tensor,)) == describe(tensor)
        return fake_cuda.channel_to("worker1"), rpc.debug_info()["cuda"]["ipc_bytes"]

    described, nbytes = a.run(check)
    assert described == "cuda_ipc"  # its segment is there, and will be used when the device works again
    assert nbytes == 2 * MIB


class Unpicklable:
    def __reduce__(self):
        return fail_to_unpickle, ()


def fail_to_unpickle():
    raise ValueError("nobody unpickles this")


def test_tensors_of_a_message_that_is_refused_go_back(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)

    def check():
        tensor = use_ipc()
        for _ in range(5):
            with pytest.raises(ValueError, match="nobody unpickles this"):
                rpc.rpc_sync("worker1", keep, args=(tensor, Unpicklable()))
        use_ipc()
        return segments()

    assert a.run(check) == (1, 0)
    assert b.run(segments) == (0, 1)


def wait_for_go() -> bool:
    return may_go_on.wait(60)


def go() -> None:
    may_go_on.set()


may_go_on = threading.Event()


def test_a_cancelled_call_gives_its_segment_back(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME, num_worker_threads=1)

    def cancel():
        tensor = use_ipc()
        rpc.rpc_async("worker1", wait_for_go)  # takes the only thread
        waiting = rpc.rpc_async("worker1", keep, args=(tensor,))
        assert waiting.cancel()

    def check():
        use_ipc()
        return segments()

    a.run(cancel)
    b.run(go)
    assert a.run(check) == (1, 0)


def test_a_worker_refuses_segments_that_contradict_themselves():
    given_back, unused = [], []
    mapped = MappedDeviceSegments(given_back.append, lambda number, memory: unused.append((number, memory)))
    mapped.add(7, 100, "memory")
    assert given_back == [7]
    with pytest.raises(ValueError, match="there already"):
        mapped.check_new(7)
    for number, offset, nbytes in ((8, 0, 10), (7, 0, 101), (7, 90, 11), (7, 0, 0)):
        with pytest.raises(ValueError, match=f"malformed payload: {nbytes} bytes at {offset} in segment {number}"):
            mapped.use(number, offset, nbytes)
    parts = [mapped.use(7, 0, 60), mapped.use(7, 60, 40)]
    assert list(map(len, parts)) == [60, 40]
    mapped.drop(7)  # in use, so that it goes back with the last part, and once
    parts.pop()
    assert given_back == [7]
    parts.pop()
    assert given_back == [7, 7]
    mapped.drop(7)
    assert given_back == [7, 7, 7]
    part = mapped.use(7, 0, 5)
    mapped.close()
    assert unused == []  # a copy may be in flight
    del part
    assert unused == [(7, "memory")]
    mapped.add(9, 100, "late")
    assert unused[1:] == [(9, "late")]


WELL_FORMED = {"number": 1 << 62 | 99, "size": 4096, "handle": b"{}", "uuid": A, "target": "cuda:0"}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"number": 5}, "malformed segment 5 of 4096 bytes"),
    ({"size": 0}, "of 0 bytes"),
    ({"size": 1 << 50}, f"of {1 << 50} bytes"),
    ({"handle": bytes(5000)}, "a handle of 5000 bytes"),
    ({"target": "cuda:7"}, "this worker has no cuda:7"),
    ({"target": "nonsense"}, "nonsense"),
    ({"handle": b"{}"}, "cuIpcOpenMemHandle_v2 failed"),
]


def test_malformed_segments_are_refused(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)

    def check():
        use_ipc()
        channel = current_agent().peers.by_id[1].channels.cuda_ipc  # type: ignore[attr-defined]
        refused = []
        channel._pool.on_refused = lambda numbers, reason: refused.append((list(numbers), reason))
        for wrong, reason in MALFORMED:
            fields = {**WELL_FORMED, **wrong}
            channel._send_frame(agent_pb2.DeviceFrame(segments=[agent_pb2.DeviceSegment(**fields)]))
            wait_until(lambda: refused)
            numbers, text = refused.pop()
            assert numbers == [fields["number"]]
            assert reason in text
        use_ipc()

    a.run(check)
    assert b.run(segments) == (0, 1)


def receive_after_a_break() -> list[type[Exception]]:
    """Returns what payloads of worker0 in an old and in an unknown segment are refused with after a break."""
    agent = current_agent()
    channel = agent.peers.by_id[0].channels.cuda_ipc  # type: ignore[attr-defined]
    highest = channel._mapped.highest

    async def drop() -> None:
        channel.drop(PayloadLostError("its connection broke"))

    run_on_loop(drop())
    refusals = []
    for number in (highest, highest + 1):
        with pytest.raises(ValueError, match="connection broke|malformed") as caught:
            channel.receive(agent_pb2.Payload(cuda_ipc={"number": number, "nbytes": 4}))
        refusals.append(caught.type)
    return refusals


def test_a_segment_of_a_connection_that_broke_is_lost_and_no_attack(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)
    a.run(lambda: use_ipc() is None)
    assert b.run(receive_after_a_break) == [PayloadLostError, ValueError]


def test_idle_segments_are_freed_when_the_receiver_has_unmapped_them(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)

    def check():
        use_ipc()
        network = current_agent()._network  # type: ignore[attr-defined]
        for _ in range(2):  # used since the last check; then not
            network.call_soon(network.channels._remove_idle)
        assert fake_cuda.gpus.freed.acquire(timeout=60)
        wait_until(lambda: rpc.debug_info()["cuda"]["ipc_bytes"] == 0)
        tensor = use_ipc()  # and made again
        assert rpc.rpc_sync("worker1", describe, args=(tensor,)) == describe(tensor)

    a.run(check)
    assert b.run(lambda: fake_cuda.gpus.unmapped.acquire(timeout=60))
    assert b.run(segments) == (0, 1)


def test_shutdown_frees_everything(workers):
    a, b = fake_cuda.join(workers, [[A], [A]], SAME)
    a.run(lambda: use_ipc() is None)
    ends = [worker.start(rpc.shutdown) for worker in (a, b)]
    for end in ends:
        end.result()
    assert a.run(lambda: fake_cuda.gpus.freed.acquire(timeout=60))
    assert b.run(lambda: fake_cuda.gpus.unmapped.acquire(timeout=60))
    assert [worker.run(segments) for worker in (a, b)] == [(0, 0)] * 2
