"""Names of torch, and of modules that have imported them, become gradwire's and come back."""

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch.distributed.autograd
import torch.distributed.rpc
from gradwire import compat, rpc
from gradwire.compat.names import REPLACEMENTS
from gradwire.compat.patches import Patches

torch_rpc = torch.distributed.rpc


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def program(request) -> Iterator[types.ModuleType]:
    """A module that has imported names of torch before anything is installed."""
    module = types.ModuleType("a_program")
    exec("from torch.distributed.rpc import RRef, rpc_sync as call; limit = 60.0", vars(module))  # noqa: S102
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_names_that_were_imported_before(program, installed):
    assert program.RRef is rpc.RRef
    assert program.call is torch_rpc.rpc_sync
    assert program.call.__module__ == "gradwire.rpc.calls"
    assert program.limit == 60.0


def test_everything_comes_back(program):
    modules = [m for name, m in sys.modules.items() if name.startswith(("torch.distributed", "torch._C._dist"))]
    before = {module.__name__: dict(vars(module)) for module in [*modules, program]}
    compat.install()
    compat.install()
    assert compat.is_installed()
    assert before["torch.distributed.rpc"] != dict(vars(torch_rpc))
    compat.uninstall()
    assert not compat.is_installed()
    after = {module.__name__: dict(vars(module)) for module in [*modules, program]}
    changed = {
        f"{module}.{name}"
        for module, names in after.items()
        for name, value in names.items()
        if name in before[module] and before[module][name] is not value
    }
    assert not changed


def test_modules_of_torch_that_are_imported_later():
    program = """if True:
        from gradwire import compat, optim
        import sys
        compat.install()
        assert "torch.distributed.optim" not in sys.modules
        import torch.distributed.optim
        assert torch.distributed.optim.DistributedOptimizer is optim.DistributedOptimizer
        compat.uninstall()
        assert torch.distributed.optim.DistributedOptimizer.__module__ == "torch.distributed.optim.optimizer"
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_somebody_has_changed_since_stays(program):
    patches = Patches()
    patches.patch(program, {"limit": 1.0, "added": 2})
    program.limit = 3.0
    patches.undo()
    assert program.limit == 3.0
    assert not hasattr(program, "added")


def test_every_name_of_the_tables_exists_in_torch():
    for name in REPLACEMENTS:
        importlib.import_module(name)
    torch_has = {name: set(dir(sys.modules[name])) for name in REPLACEMENTS}
    compat.install()
    compat.uninstall()
    assert not {
        f"{name}.{each}" for name, table in REPLACEMENTS.items() for each in set(table()) - torch_has[name]
    }
