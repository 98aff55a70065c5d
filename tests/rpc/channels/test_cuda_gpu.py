"""Tensors on a GPU between workers of this machine. Skipped where there is none; one GPU is enough."""

import pytest
import torch
from gradwire import rpc
from gradwire.rpc.channels.cuda.torch_runtime import TorchDevices
from gradwire.rpc.contracts.options import MIB

from tests.remote_functions import wait_until
from tests.rpc.channels.cuda_functions import (
    describe,
    describe_all,
    echo,
    keep,
    kept_sums,
    overwrite,
    set_environment,
)
from tests.workers import TRANSPORTS

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no GPU here"),
    pytest.mark.skipif("unix" not in TRANSPORTS, reason="device memory needs a unix socket"),
    pytest.mark.timeout(300),
]
several = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

SAME = {"worker1": {0: 0}}
LONG = 500_000_000
"""Cycles for which a kernel keeps a stream busy: some tenths of a second."""


@pytest.fixture
def gpu_workers(workers):
    """Starts two workers, of which worker0 has device maps: `gpu_workers(device_maps, **options)`."""

    def start(device_maps=SAME, environment=(), **options):
        a, b = workers(2)
        for worker in (a, b):
            worker.run(set_environment, dict(environment))
        url = f"file://{workers.folder / 'rendezvous'}"
        joining = [
            worker.start(join, worker.name, rank, url, {**options, "device_maps": maps})
            for rank, (worker, maps) in enumerate([(a, device_maps), (b, {})])
        ]
        for each in joining:
            each.result(240)
        return a, b

    return start


def join(name, rank, url, options):
    options = {"transports": TRANSPORTS, **options}
    chosen = rpc.RpcBackendOptions(init_method=url, **options)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=chosen)


def use_ipc(count: int = MIB, device: str = "cuda:0", function=describe) -> torch.Tensor:
    """Sends a tensor until one of its size has gone by device memory; returns it."""
    tensor = torch.arange(count, device=device, dtype=torch.float32)
    wait_until(lambda: rpc.rpc_sync("worker1", function, args=(tensor,)) is not None and has_ipc(), seconds=60)
    return tensor


def has_ipc() -> bool:
    described = rpc.debug_info()["cuda"]["channels"].get("worker1", "")
    assert "failed" not in described, described
    return described == "cuda_ipc"


def test_a_tensor_goes_by_device_memory_and_back(gpu_workers):
    a, b = gpu_workers()

    def check():
        tensor = use_ipc(function=echo)
        for _ in range(20):
            result = rpc.rpc_sync("worker1", echo, args=(tensor,))
            assert result.device == tensor.device
            assert torch.equal(result, tensor)
        assert (rpc.rpc_sync("worker1", overwrite, args=(tensor,)) == -1).all()
        assert torch.equal(tensor, torch.arange(MIB, device="cuda:0", dtype=torch.float32))
        return rpc.debug_info()["cuda"]["channels"]

    assert a.run(check) == {"worker1": "cuda_ipc"}
    assert b.run(lambda: rpc.debug_info()["cuda"]["channels"]) == {"worker0": "cuda_ipc"}


def test_a_tensor_is_sent_as_it_is_at_the_call_on_any_stream(gpu_workers):
    a, _ = gpu_workers()

    def check():
        tensor = use_ipc()
        side = torch.cuda.Stream()
        waited = []
        for value in range(6):
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONG)
                tensor.fill_(float(value))
                answer = rpc.rpc_async("worker1", describe, args=(tensor,))
                waited.append(side.query())  # for the kernel
                tensor.fill_(-1.0)
            assert answer.wait()[1] == value * MIB
        # The first calls may come before the one segment is given back, and so make another one.
        assert waited[3:] == [False] * 3

    a.run(check)


def test_an_answer_is_ready_on_every_stream(gpu_workers):
    a, _ = gpu_workers()

    def check():
        tensor = use_ipc(function=echo)
        side = torch.cuda.Stream()
        for _ in range(20):
            result = rpc.rpc_sync("worker1", echo, args=(tensor,))
            with torch.cuda.stream(side):
                assert torch.equal(result, tensor)

    a.run(check)


def test_segments_are_used_again_without_mixing_up_tensors(gpu_workers):
    a, _ = gpu_workers()

    def check():
        use_ipc(function=echo)
        sent = [torch.full((MIB,), float(value), device="cuda:0") for value in range(40)]
        answers = [rpc.rpc_async("worker1", echo, args=(tensor,)) for tensor in sent]
        for answer, tensor in zip(answers, sent, strict=True):
            assert torch.equal(answer.wait(), tensor)

    a.run(check)


def test_what_has_arrived_outlives_its_sender(gpu_workers):
    a, b = gpu_workers()

    def send():
        use_ipc()
        for value in range(3):
            rpc.rpc_sync("worker1", keep, args=(torch.full((MIB,), float(value), device="cuda:0"),))

    a.run(send)
    a.kill()
    b.run(lambda: wait_until(lambda: rpc.debug_info()["lost_workers"]))
    assert b.run(kept_sums) == [0.0, float(MIB), 2.0 * MIB]


def test_a_dead_receiver_releases_device_memory(gpu_workers):
    a, b = gpu_workers()
    a.run(lambda: use_ipc() is None)
    b.kill()
    a.run(lambda: wait_until(lambda: rpc.debug_info()["cuda"]["ipc_bytes"] == 0))


def test_expandable_segments_of_torchs_allocator_do_not_matter(gpu_workers):
    setting = "expandable_segments:True"
    a, _ = gpu_workers(environment={"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting})

    def check():
        tensor = use_ipc()
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        return rpc.rpc_sync("worker1", describe, args=(tensor,)) == describe(tensor)

    assert a.run(check)


def send_all_kinds() -> None:
    base = torch.arange(24, dtype=torch.float64, device="cuda:0").view(4, 6)
    large = torch.arange(1 << 20, device="cuda:0", dtype=torch.float32).view(1024, 1024)
    sent = [
        base,
        base.t(),
        base[1:3, 2:4],
        base[0, 0],
        large.t(),
        large[:, ::2],
        torch.tensor([True, False], device="cuda:0"),
        torch.arange(70_000, device="cuda:0", dtype=torch.bfloat16).requires_grad_(),
        torch.empty(0, 3, device="cuda:0"),
        torch.ones(3),
    ]
    assert rpc.rpc_sync("worker1", describe_all, args=(sent,)) == [describe(tensor) for tensor in sent]
    for kind in (torch.float8_e4m3fn, torch.complex64, torch.int16):
        tensor = torch.arange(100_000, device="cuda:0").to(kind)
        result = rpc.rpc_sync("worker1", echo, args=(tensor,))
        assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))
    coo = torch.eye(300, device="cuda:0").to_sparse()
    assert torch.equal(rpc.rpc_sync("worker1", echo, args=(coo,)).to_dense(), coo.to_dense())


@pytest.mark.parametrize("ipc", [True, False])
def test_tensors_of_all_kinds(gpu_workers, ipc):
    a, _ = gpu_workers(cuda=rpc.CudaOptions(ipc=ipc))
    for _ in range(3):
        a.run(send_all_kinds)


def test_staging_orders_streams_as_well(gpu_workers):
    a, _ = gpu_workers(cuda=rpc.CudaOptions(ipc=False))

    def check():
        tensor = torch.zeros(MIB, device="cuda:0")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            tensor.fill_(3.0)
            assert rpc.rpc_sync("worker1", describe, args=(tensor,))[1] == 3.0 * MIB

    a.run(check)


def export_and_fill() -> tuple[bytes, str]:
    devices = TorchDevices()
    here = torch.device("cuda", 0)
    exported.append(devices.export(here, 2 * MIB))
    exported[0].fill([(512, torch.full((MIB,), 5, dtype=torch.uint8, device=here))])
    return exported[0].handle, devices.uuid(here)


exported = []


def free_exported() -> None:
    exported.pop().free()


def open_and_copy(handle: bytes, uuid: str) -> tuple[int, int]:
    devices = TorchDevices()
    device = devices.find(uuid)
    mapped = devices.open(device, handle, 2 * MIB)
    target = devices.empty(device, MIB)
    mapped.copy_to(target, 512).wait()
    mapped.close()
    return int(target.min()), int(target.max())


def test_the_runtime_shares_memory_between_two_processes(workers):
    a, b = workers(2)
    assert b.run(open_and_copy, *a.run(export_and_fill)) == (5, 5)
    a.run(free_exported)


@several
def test_devices_are_found_by_uuid(workers):
    a, b = workers(2)
    b.run(set_environment, {"CUDA_VISIBLE_DEVICES": "1,0"})
    url = f"file://{workers.folder / 'rendezvous'}"
    maps = [{"worker1": {0: 1, 1: 0}}, {}]
    joining = [w.start(join, w.name, rank, url, {"device_maps": maps[rank]}) for rank, w in enumerate((a, b))]
    for each in joining:
        each.result(240)

    def check():
        for here, there in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
            tensor = use_ipc(device=here)
            assert rpc.rpc_sync("worker1", describe, args=(tensor,))[:2] == (there, describe(tensor)[1])

    a.run(check)
