"""A program that turns warnings into errors runs: gradwire does not do what torch deprecates."""

import subprocess
import sys

PROGRAM = """
import sys, uuid, warnings

import torch
from gradwire import autograd, c10d, nn, optim, rpc

def meeting():
    return f"file://{sys.argv[1]}/{uuid.uuid4().hex}"

def deprecated(function, *args):
    with warnings.catch_warnings():  # those are for who calls torch.jit
        warnings.simplefilter("ignore")
        return function(*args)

# Calls
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting()))
layer = torch.nn.Linear(2, 1)
with autograd.context() as context:
    loss = rpc.rpc_sync("alone", torch.sum, (layer(torch.ones(2)),))
    autograd.backward(context, [loss])
    assert set(autograd.get_gradients(context)) == set(layer.parameters())
    references = [rpc.RRef(parameter) for parameter in layer.parameters()]
    optim.DistributedOptimizer(torch.optim.SGD, references, lr=0.1).step(context)
assert rpc.remote("alone", torch.add, (torch.ones(1), 1)).to_here() == 2
rpc.shutdown()

# Groups
for backend in "shm", "gloo", None:
    c10d.init_process_group(backend, meeting(), rank=0, world_size=1)
    tensor = torch.ones(2)
    c10d.all_reduce(tensor)
    part = c10d.new_group([0])
    c10d.barrier(part)
    c10d.destroy_process_group()

# TorchScript
def double(x: torch.Tensor):
    return x * 2

class Interface:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass

class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

Interface = deprecated(torch.jit.interface, Interface)
function, module = deprecated(torch.jit.script, double), deprecated(torch.jit.script, Double())
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting()))
assert rpc.rpc_sync("alone", function, (torch.ones(1),)) == 2
assert rpc.rpc_sync("alone", torch.nn.Module.__call__, (module, torch.ones(1))) == 2
there = nn.RemoteModule("alone", Double, _module_interface_cls=Interface)
assert there(torch.ones(1)) == 2
rpc.shutdown()

# gradwire.compat
from gradwire import compat

compat.install()
import torch.distributed.rpc as torch_rpc

options = torch_rpc.TensorPipeRpcBackendOptions(init_method=meeting())
torch_rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert torch_rpc.rpc_sync("alone", torch.add, (torch.ones(1), 1)) == 2
torch_rpc.shutdown()
"""


def test_a_program_without_warnings(tmp_path):
    path = tmp_path / "program.py"  # torch.jit compiles what it can read in a file
    path.write_text(PROGRAM)
    command = [sys.executable, "-W", "error", str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
