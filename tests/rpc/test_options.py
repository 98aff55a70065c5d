"""Options, backends and device maps."""

from unittest.mock import Mock

import pytest
import torch
from gradwire import rpc
from gradwire.errors import DeviceMapError, RpcError, SerializationError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc import backend_registry
from gradwire.rpc.contracts.devices import device_map_of_answer, device_map_to_proto
from gradwire.rpc.contracts.worker import Member
from gradwire.rpc.membership.members import check_device_maps, device_maps_as_text
from gradwire.rpc.wire import pickling as serialization
from gradwire.rpc.wire.tensors import UnmappedDeviceError, check_sendable, decode_tensors

from tests.remote_functions import add, identity

CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")


def test_options_are_checked_when_they_are_set():
    options = rpc.RpcBackendOptions(rpc_timeout=5)
    options.rpc_timeout = 7
    assert options.rpc_timeout == 7
    for name, value in {"rpc_timeout": -1, "init_timeout": 0, "num_worker_threads": 0}.items():
        with pytest.raises(ValueError, match=name):
            setattr(options, name, value)
    with pytest.raises(TypeError, match="channels"):
        options.channels = {}
    with pytest.raises(AttributeError):
        options.no_such_option = 1


def test_device_maps():
    options = rpc.RpcBackendOptions(device_maps={"worker1": {0: "cuda:1"}})
    options.set_device_map("worker1", {"cuda:1": 0})
    options.set_device_map("worker2", {"cpu": torch.device("cuda")})
    assert options.device_maps == {
        "worker1": {CUDA0: CUDA1, CUDA1: CUDA0},
        "worker2": {torch.device("cpu"): CUDA0},
    }
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping, trying to map cuda:0"):
        options.set_device_map("worker1", {0: 0})
    with pytest.raises(
        ValueError, match="`device_map` only supports 1-to-1 mapping, trying to map cuda:1 and cuda:0"
    ):
        rpc.RpcBackendOptions(device_maps={"worker1": {0: 1, 1: 1}})


def test_devices():
    options = rpc.RpcBackendOptions(devices=[0])
    options.set_devices(["cuda:1", 0])
    assert options.devices == [CUDA1, CUDA0]
    with pytest.raises(ValueError, match="expect a list of CUDA devices, but got device type cpu"):
        options.set_devices(["cpu"])


def test_device_maps_are_checked_against_the_group():
    def group(device_maps):
        maps = device_maps_as_text(rpc.RpcBackendOptions(device_maps=device_maps).device_maps)
        return [Member(rpc.WorkerInfo("a", 0), "", 2, device_maps=maps), Member(rpc.WorkerInfo("b", 1), "", 1)]

    good = group({"b": {1: 0}})
    check_device_maps(good, good)
    for device_maps, problem in (
        ({"c": {0: 0}}, "invalid target node names in its device maps: 'c' is not one of a, b"),
        ({"b": {2: 0}}, "source devices with invalid indices in its device map for b: a has no cuda:2"),
        ({"b": {0: 1}}, "target devices with invalid indices in its device map for b: b has no cuda:1, it has 1 "),
    ):
        bad = group(device_maps)
        with pytest.raises(DeviceMapError, match=problem):
            check_device_maps(bad, bad)


def test_all_workers_learn_of_a_wrong_device_map(workers, tmp_path):
    def join(name, rank):
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path / 'rendezvous'}")
        if rank == 0:
            options.set_device_map("worker1", {"cpu": "cuda:99"})
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

    for joined in [worker.start(join, worker.name, rank) for rank, worker in enumerate(workers(2))]:
        with pytest.raises(ValueError, match="Node worker0 has target devices .*worker1 has no cuda:99"):
            joined.result()


def test_tensors_without_a_device_map(workers):
    a, b = workers.rpc(2)

    def send():
        with pytest.raises(
            SerializationError, match=r"args\[0\] cannot be sent: it is a tensor on cuda:0.*`RpcBackendOptions`"
        ):
            rpc.rpc_sync("worker1", identity, (torch.zeros(20_000),))

    def ask():
        with pytest.raises(SerializationError, match="Response device mapping is not available.*'worker0'"):
            rpc.rpc_sync("worker1", torch.zeros, (20_000,))

    def as_if_on_a_gpu():
        serialization.check_all_sendable = Mock(side_effect=UnmappedDeviceError(CUDA0))

    b.run(as_if_on_a_gpu)
    a.run(ask)
    a.run(as_if_on_a_gpu)
    a.run(send)


def test_where_tensors_go():
    there = rpc.RpcBackendOptions(device_maps={"b": {0: 1, "cpu": 0}}).device_maps["b"]
    back = device_map_of_answer(device_map_to_proto(there))
    assert back == {CUDA1: CUDA0, CUDA0: torch.device("cpu")}
    on_cuda = Mock(
        is_cpu=False, dim=lambda: 1, device=CUDA0, layout=torch.strided, is_nested=False, dtype=torch.float32
    )
    check_sendable(on_cuda, there)
    with pytest.raises(ValueError, match="no device map says where it goes"):
        check_sendable(on_cuda, {})


@pytest.mark.parametrize("device", ["cuda:99", "xpu", "nonsense", "cuda:-7"])
def test_devices_that_a_worker_does_not_have(device):
    message = agent_pb2.Tensor(dtype=agent_pb2.FLOAT32, sizes=[0], device=device)
    with pytest.raises(ValueError, match=r"no device is called|a device map sends a tensor to"):
        decode_tensors([message], lambda _payload: b"")


def test_a_backend_of_ones_own(workers, tmp_path):
    def run():
        seen = {}

        class Options(rpc.RpcBackendOptions):
            pass

        def make_options(rpc_timeout, init_method, **others):
            return Options(rpc_timeout=rpc_timeout, init_method=init_method, **others)

        def start(store, name, rank, world_size, rpc_backend_options):
            seen.update(rank=rank, world_size=world_size, options=type(rpc_backend_options))
            return rpc.grpc_backend.start_agent(store, name, rank, world_size, rpc_backend_options)

        mine = backend_registry.register_backend("MINE", make_options, start)
        assert mine is rpc.BackendType.MINE is rpc.BackendType["MINE"]
        assert mine in rpc.BackendType
        assert repr(mine) == "BackendType.MINE"
        with pytest.raises(RpcError, match="RPC backend MINE: already registered"):
            backend_registry.register_backend("MINE", make_options, start)
        url = f"file://{tmp_path / 'meet'}"
        options = backend_registry.construct_rpc_backend_options(mine, init_method=url, num_worker_threads=3)
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)  # the options tell the backend
        assert seen == {"rank": 0, "world_size": 1, "options": Options}
        assert rpc.rpc_sync("only", add, (1, 2)) == 3
        assert rpc.debug_info()["agent.thread_pool_size"] == 3
        rpc.shutdown()

    workers(1)[0].run(run)


def test_options_of_another_backend():
    options = rpc.fault_injection.FaultyRpcBackendOptions()
    with pytest.raises(
        TypeError, match=r"backend is BackendType.GRADWIRE, but the options, .* of BackendType.FAULTY"
    ):
        rpc.init_rpc("a", "GRADWIRE", rank=0, world_size=1, rpc_backend_options=options)


def test_backends_that_are_none():
    with pytest.raises(ValueError, match="backend is 'TCP': the registered ones are 'GRADWIRE'"):
        rpc.init_rpc("a", "TCP", rank=0, world_size=1)
    with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
        rpc.init_rpc("a", 3, rank=0, world_size=1)
    with pytest.raises(AttributeError, match=r"no RPC backend 'TCP' is registered"):
        _ = rpc.BackendType.TCP

    class Unregistered(rpc.RpcBackendOptions):
        pass

    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=Unregistered())
