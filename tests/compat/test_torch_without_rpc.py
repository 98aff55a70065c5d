"""gradwire works with a torch that has no RPC, and `gradwire run` provides it there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc

PROGRAMS = Path(__file__).parent / "programs"
ON_GRADWIRE = (
    "gradwire.rpc.calls.sending gradwire.rref.rref gradwire.optim.distributed_optimizer True; stepped to 0.0"
)

ACCIDENTAL = {"method_factory", "new_method"}
"""Names of loop variables in `__all__` of torch.distributed.rpc."""


@pytest.mark.timeout(420)  # importing torch takes long on a busy machine
@pytest.mark.parametrize("removed", ["python", "c++"])
def test_a_torch_without_rpc(removed, tmp_path, free_port):
    """New interpreters: torch must be imported without it."""
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAMS / "torch_without_rpc.py"),
            removed,
            str(PROGRAMS / "on_gradwire_alone.py"),
            str(tmp_path / "rendezvous"),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "MASTER_PORT": str(free_port)},
    )
    assert done.returncode == 0, done.stderr
    *names, last = done.stdout.splitlines()
    assert last == "used"
    for worker in range(2):
        assert f"worker{worker}: {ON_GRADWIRE}" in names
    assert "it is gone" in names
    provided = {line.split()[0]: set(line.split()[1:]) for line in names}
    assert provided["rpc"] >= set(torch.distributed.rpc.__all__) - ACCIDENTAL
    assert provided["rpc.api"] >= set(torch.distributed.rpc.api.__all__) - ACCIDENTAL
    assert provided["autograd"] >= set(torch.distributed.autograd.__all__) | {"backward", "get_gradients"}
    assert {"DistributedOptimizer", "ZeroRedundancyOptimizer"} <= provided["optim"]
    assert "RemoteModule" in provided["nn"]
