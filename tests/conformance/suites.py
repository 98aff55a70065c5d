"""The suites of torch that run, and the fixtures of torch that they run on.

The suites come from `torch.testing._internal.distributed`, inside the torch wheel. A module is loaded in a process
of its own: torch registers the fault-injecting backend globally, and with it loaded two other tests fail.

Of the suites for CUDA, the tests for which one GPU is enough are here. Without a GPU, torch skips them.

To run more suites, add their names here.
"""

import inspect
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MODULES", "Module", "gpus_needed", "load"]

RPC = "torch.testing._internal.distributed.rpc"


@dataclass(frozen=True, slots=True)
class Module:
    """Suites that are loaded together.

    name: the module's name on the command line.
    fixture: the module and the class of torch's fixture, which sets the backend and its options.
    suites: names of classes in `torch.testing._internal.distributed.rpc_utils`.
    max_gpus: tests that need more GPUs are left out.
    max_parallel: the highest number of tests that run at the same time.
    """

    name: str
    fixture: tuple[str, str]
    suites: tuple[str, ...]
    max_gpus: int | None = None
    max_parallel: int | None = None


MODULES = (
    Module(
        "tensorpipe",
        (f"{RPC}.tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
        (
            "RpcTest",
            "TensorPipeAgentRpcTest",
            "RemoteModuleTest",
            "ThreeWorkersRemoteModuleTest",
            "ParameterServerTest",
            "ReinforcementLearningRpcTest",
            "DistAutogradTest",
            "TensorPipeAgentDistAutogradTest",
            "DistOptimizerTest",
            "DdpUnderDistAutogradTest",
            "DdpComparisonTest",
        ),
    ),
    Module(
        "cuda",
        (f"{RPC}.tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
        (
            "CudaRpcTest",
            "TensorPipeAgentCudaRpcTest",
            "CudaDistAutogradTest",
            "TensorPipeCudaDistAutogradTest",
            "CudaRemoteModuleTest",
            "CudaDdpComparisonTest",
        ),
        max_gpus=1,
        max_parallel=4,  # each has four workers with some 500 MiB of GPU memory, beside its tensors
    ),
    Module(
        "faulty",
        (f"{RPC}.faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
        ("FaultyAgentRpcTest", "FaultyAgentDistAutogradTest"),
    ),
)


def load(module: Module) -> dict[str, unittest.TestCase]:
    """Imports a module's suites and returns their tests by "Suite.test", in order."""
    import importlib
    import sys
    import types

    from torch.testing._internal.distributed import rpc_utils

    fixture = getattr(importlib.import_module(module.fixture[0]), module.fixture[1])
    classes = [getattr(rpc_utils, suite) for suite in module.suites]
    home = types.ModuleType(f"conformance_{module.name}", f"torch's suites, mixed with {fixture.__name__}.")
    vars(home).update(rpc_utils.generate_tests("", fixture, classes, home.__name__))
    sys.modules[home.__name__] = home  # tests pickle their own methods
    loader = unittest.TestLoader()
    return {
        f"{suite}.{name}": getattr(home, suite)(name)
        for suite in module.suites
        for name in loader.getTestCaseNames(getattr(home, suite))
        if module.max_gpus is None or gpus_needed(getattr(getattr(home, suite), name)) <= module.max_gpus
    }


def gpus_needed(test: Callable[..., Any]) -> int:
    """Returns the number of GPUs that a test needs by torch's decorator `skip_if_lt_x_gpu`; 0 without it."""
    while (wrapped := getattr(test, "__wrapped__", None)) is not None:
        if test.__code__.co_qualname.startswith("skip_if_lt_x_gpu."):
            return int(inspect.getclosurevars(test).nonlocals["x"])
        test = wrapped
    return 0
