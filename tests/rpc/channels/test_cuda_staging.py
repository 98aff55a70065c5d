"""Tensors on CUDA devices by way of the host: on fake GPUs, with real processes."""

import math
import threading
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.cuda.devices import DeviceStaging
from gradwire.rpc.contracts.options import KIB, MIB
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors

from tests.rpc.channels import fake_cuda
from tests.rpc.channels.cuda_functions import describe, describe_all, echo, overwrite

UUIDS = [["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]]
CROSSED = [{"worker1": {0: 1, 1: 0}}, {}]
BETWEEN_HOSTS = [name for name in fake_cuda.TRANSPORTS if name != "unix"]


@pytest.fixture(params=["no_unix_socket", "no_ipc"])
def staging_workers(workers, request):
    """Two workers with two GPUs each, whose device map crosses them, and that share no device memory."""
    options: dict[str, Any] = {"transports": BETWEEN_HOSTS}
    if request.param == "no_ipc":
        options = {"cuda": rpc.CudaOptions(ipc=False)}
    return fake_cuda.join(workers, UUIDS, CROSSED, **options)


def test_both_directions_follow_the_device_map(staging_workers):
    a, b = staging_workers

    def check():
        tensor = fake_cuda.gpus.put(torch.arange(512 * KIB, dtype=torch.float32), "cuda:0")
        for _ in range(3):
            assert rpc.rpc_sync("worker1", describe, args=(tensor,)) == ("cuda:1", *describe(tensor)[1:])
        result = rpc.rpc_sync("worker1", overwrite, args=(tensor,))
        assert result.device == torch.device("cuda:0")
        assert (result.cpu() == -1).all()
        assert torch.equal(tensor.cpu(), torch.arange(512 * KIB, dtype=torch.float32))
        return rpc.debug_info()["cuda"]

    assert a.run(check) == {"channels": {}, "ipc_bytes": 0, "pinned_bytes": 0}
    assert b.run(lambda: fake_cuda.gpus.staged_bytes) == 5 * 2 * MIB
    assert b.run(lambda: rpc.debug_info()["cuda"]["pinned_bytes"]) == 0


def test_tensors_of_all_kinds_in_one_message(staging_workers):
    a, _ = staging_workers

    def check():
        put = fake_cuda.gpus.put
        base = put(torch.arange(24, dtype=torch.float64).view(4, 6), "cuda:1")
        gaps = torch.arange(24, dtype=torch.float64).view(4, 6)[:, ::2]
        sent = [
            base,
            base.t(),
            base[1:3, 2:4],
            base[0, 0],
            put(torch.tensor([True, False, True]), "cuda:0"),
            put(torch.arange(5, dtype=torch.bfloat16), "cuda:0").requires_grad_(),
            put(torch.arange(300 * KIB, dtype=torch.int32), "cuda:0"),
            torch.ones(3),
            gaps,
        ]
        there = {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "cpu"}
        wanted = [(there[device], *rest) for device, *rest in map(describe, sent)]
        arrived = rpc.rpc_sync("worker1", describe_all, args=(sent,))
        assert arrived == wanted
        grown = rpc.rpc_sync("worker1", echo, args=(sent[5],))
        assert grown.requires_grad
        assert grown.device == torch.device("cuda:0")

    a.run(check)


def test_maps_from_and_to_the_cpu(workers):
    a, _ = fake_cuda.join(workers, UUIDS, [{"worker1": {"cpu": "cuda:1", "cuda:0": "cpu"}}, {}])

    def check():
        on_host = torch.arange(100 * KIB, dtype=torch.float32)
        on_device = fake_cuda.gpus.put(on_host, "cuda:0")
        total = describe(on_host)[1]
        assert rpc.rpc_sync("worker1", describe, args=(on_host,))[:2] == ("cuda:1", total)
        assert rpc.rpc_sync("worker1", describe, args=(on_device,))[:2] == ("cpu", total)
        assert rpc.rpc_sync("worker1", echo, args=(on_host,)).device == torch.device("cpu")
        assert rpc.rpc_sync("worker1", echo, args=(on_device,)).device == torch.device("cuda:0")

    a.run(check)


class Recorder:
    """A runtime that records what is started and waited for, on CPU tensors."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pinned_fails = False
        self.is_busy = True
        self.looks = 0
        """How often it has been asked whether a copy is complete."""
        self.needed_looks: float = math.inf

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        if self.pinned_fails:
            raise RuntimeError("CUDA error: out of memory")
        self.events.append("pinned")
        return torch.empty(nbytes, dtype=torch.uint8)

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> fake_cuda.FakeCopy:
        target.copy_(source)
        self.events.append("start")
        return fake_cuda.FakeCopy(lambda: self.events.append("wait"), self.look)

    def is_idle(self, device: torch.device) -> bool:
        return not self.is_busy

    def look(self) -> bool:
        self.looks += 1
        return self.looks >= self.needed_looks


def staging(runtime: Recorder, max_pinned_bytes: int = MIB) -> DeviceStaging:
    class Blocking:
        def __enter__(self) -> None:
            runtime.events.append("blocking")

        def __exit__(self, *_: object) -> None:
            runtime.events.append("not blocking")

    return DeviceStaging(lambda: runtime, Blocking, max_pinned_bytes)


def test_all_copies_start_before_the_first_one_is_waited_for():
    runtime = Recorder()
    copied = staging(runtime).to_host([torch.full((each,), each, dtype=torch.uint8) for each in (3, 4)])
    assert [each.tolist() for each in copied] == [[3] * 3, [4] * 4]
    assert runtime.events == [*["pinned", "start"] * 2, "blocking", "wait", "wait", "not blocking"]


def test_no_other_thread_takes_the_place_of_one_that_waits_for_a_moment(monkeypatch):
    monkeypatch.setattr("gradwire.rpc.channels.cuda.devices.LOOK_S", 60.0)
    runtime = Recorder()
    runtime.needed_looks = 5
    assert staging(runtime).to_host([torch.ones(2, dtype=torch.uint8)])[0].tolist() == [1, 1]
    assert runtime.events == ["pinned", "start"]
    assert runtime.looks == 5


@pytest.mark.parametrize("is_small", [True, False])
def test_small_tensors_of_an_idle_device_need_no_page_locked_memory(is_small):
    runtime = Recorder()
    runtime.is_busy = False
    nbytes = 64 * KIB if is_small else 64 * KIB + 1
    copied = staging(runtime).to_host([torch.ones(nbytes, dtype=torch.uint8)])
    assert copied[0].sum() == nbytes
    assert ("pinned" in runtime.events) is not is_small


def test_page_locked_memory_is_bounded_and_returns_when_its_bytes_are_sent():
    runtime = Recorder()
    stage = staging(runtime, 1000)
    source = torch.ones(500, dtype=torch.uint8)
    data = stage.to_host([source])[0].numpy().data  # as a channel keeps it
    assert stage.pinned_bytes == 512
    assert stage.to_host([source])[0].tolist() == [1] * 500  # by ordinary memory
    assert runtime.events.count("pinned") == 1
    target, _ = stage.to_device(source, torch.device("cuda:0"))
    assert target.tolist() == [1] * 500
    assert runtime.events.count("pinned") == 1
    del data
    assert stage.pinned_bytes == 0
    runtime.pinned_fails = True  # the system has a limit, too
    assert stage.to_host([source])[0].tolist() == [1] * 500
    assert stage.pinned_bytes == 0


def test_copies_of_a_malformed_message_are_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    runtime = Recorder()
    tensors = [torch.ones(4), torch.ones(4)]
    messages = encode_tensors(tensors, lambda data: agent_pb2.Payload(inline=bytes(data)))
    for message in messages:
        message.device = "cuda:0"
    messages[1].sizes[0] = 5
    with pytest.raises(ValueError, match="malformed tensor: 16 bytes for shape"):
        decode_tensors(messages, lambda payload: payload.inline, staging(runtime))
    assert runtime.events == ["pinned", "start", "blocking", "wait", "not blocking"]


def test_what_torch_refuses_on_a_device_is_malformed_and_what_the_device_raises_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    runtime = Recorder()
    data = agent_pb2.Payload(inline=bytes(4))
    message = agent_pb2.Tensor(dtype=agent_pb2.FLOAT32, sizes=[1], strides=[-(2**63)], data=data, device="cuda:0")
    with pytest.raises(ValueError, match="malformed tensor: strides"):
        decode_tensors([message], lambda payload: payload.inline, staging(runtime))

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(runtime, "empty", fail)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        decode_tensors([message], lambda payload: payload.inline, staging(runtime))
    monkeypatch.setattr(torch.Tensor, "to", fail)  # of a tensor that is made on the host
    empty = agent_pb2.Tensor(dtype=agent_pb2.FLOAT32, sizes=[0], device="cuda:0")
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        decode_tensors([empty], lambda payload: payload.inline, staging(runtime))


def test_a_runtime_is_loaded_once_and_when_it_is_needed():
    loaded = []

    def load():
        loaded.append(threading.get_ident())
        return Recorder()

    stage = DeviceStaging(load, threading.Lock, MIB)
    stage.wait([])
    assert stage.pinned_bytes == 0
    assert loaded == []
    assert stage.runtime is stage.runtime
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"ipc": 1}, "ipc is 1: give True or False"),
        ({"ipc_threshold": 0}, "ipc_threshold is 0: give a whole number"),
    ],
)
def test_options_are_checked(wrong, text):
    with pytest.raises((TypeError, ValueError), match=text):
        rpc.CudaOptions(**wrong)
    with pytest.raises(TypeError, match="cuda is True: give a CudaOptions"):
        rpc.RpcBackendOptions(cuda=True)
