"""Uses gradwire where torch has no RPC: by the names of torch, then by its own with a file for the rendezvous."""

import importlib
import os
import runpy
import sys
from pathlib import Path

import torch
from gradwire import autograd, compat, nn, optim, rpc


def multiply(weight, x):
    return weight.local_value() * x


def make_weight():
    return torch.ones(2, requires_grad=True)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def use() -> None:
    assert not hasattr(torch._C, "_rpc_init")
    weight = rpc.remote("worker1", make_weight)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    with torch.profiler.profile() as profile, autograd.context() as context:
        loss = rpc.rpc_sync("worker1", multiply, (weight, torch.ones(2))).sum()
        autograd.backward(context, [loss])
        optimizer.step(context)
    assert any("multiply" in event.key for event in profile.key_averages())
    with torch.autograd.profiler_legacy.profile():
        assert rpc.rpc_sync("worker1", torch.add, (1, 2)) == 3
    assert rpc.rpc_sync("worker1", scripted, (torch.zeros(1),)) == 1
    assert weight.to_here().tolist() == [0.5, 0.5]
    assert nn.RemoteModule("worker1/cpu", torch.nn.Linear, (2, 3))(torch.ones(2)).shape == (3,)
    print("used")


def use_by_names_of_torch() -> None:
    compat.install()
    for name in ("rpc", "rpc.api", "autograd", "optim", "nn"):
        print(name, *dir(importlib.import_module(f"torch.distributed.{name}")))
    sys.argv = ["spawned.py", "fork", "train"]
    runpy.run_path(str(Path(__file__).parent / "spawned.py"), run_name="__main__")
    compat.uninstall()
    try:
        import torch.distributed.rpc as theirs
    except ModuleNotFoundError:
        print("it is gone")
    else:
        print("it is gone" if not theirs.is_available() and not hasattr(theirs, "rpc_sync") else dir(theirs))


if __name__ == "__main__":
    rendezvous = sys.argv[1]
    use_by_names_of_torch()
    sys.stdout.flush()
    rank = 0 if os.fork() else 1
    options = rpc.RpcBackendOptions(init_method=f"file://{rendezvous}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        use()
    rpc.shutdown()
    if rank == 0:
        assert os.wait()[1] == 0
