"""Which of torch's test suites run, and on which of torch's fixtures.

The suites come from `torch.testing._internal.distributed`, inside the torch wheel. A module is loaded in a process
of its own: torch registers the fault-injecting backend globally, and with it loaded two other tests fail.

To run more suites, add their names here.
"""

import unittest
from dataclasses import dataclass

__all__ = ["MODULES", "Module", "load"]

RPC = "torch.testing._internal.distributed.rpc"


@dataclass(frozen=True, slots=True)
class Module:
    """Suites that are loaded together.

    name: what the module is called on the command line.
    fixture: the module and class of torch's fixture, which says which backend is tested and how.
    suites: names of classes in `torch.testing._internal.distributed.rpc_utils`.
    """

    name: str
    fixture: tuple[str, str]
    suites: tuple[str, ...]


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
        "faulty",
        (f"{RPC}.faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
        ("FaultyAgentRpcTest", "FaultyAgentDistAutogradTest"),
    ),
)


def load(module: Module) -> dict[str, unittest.TestCase]:
    """Imports a module's suites; all of their tests by "Suite.test", in order."""
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
    }
