"""Installing and uninstalling patches torch's modules and those that have imported their names."""

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch.distributed.autograd
import torch.distributed.rpc
from gradwire import compat, rpc
from gradwire.compat.installation import IMPORTED_FIRST, Patches
from gradwire.compat.names import REPLACEMENTS

torch_rpc = torch.distributed.rpc


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def program(request) -> Iterator[types.ModuleType]:
    """Yields a module that imported names of torch before the installation."""
    module = types.ModuleType("a_program")
    exec("from torch.distributed.rpc import RRef, rpc_sync as call; limit = 60.0", vars(module))  # noqa: S102
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_globals_of_modules_that_imported_the_names_are_patched(program, installed):
    assert program.RRef is rpc.RRef
    assert program.call is torch_rpc.rpc_sync
    assert program.call.__module__ == "gradwire.rpc.calls.sending"
    assert program.limit == 60.0


def test_the_globals_of_all_modules_are_looked_through_once(program, monkeypatch):
    """There are several thousand modules, and a dozen of torch's that are patched."""
    passes = []
    look = Patches.patch_importers
    monkeypatch.setattr(Patches, "patch_importers", lambda patches: passes.append(look(patches)))
    compat.install()
    try:
        assert len(passes) == 1
        assert program.RRef is rpc.RRef
    finally:
        compat.uninstall()


def test_uninstalling_restores_every_name(program):
    for name in IMPORTED_FIRST:  # some change others when they are imported
        importlib.import_module(name)
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


def test_torch_modules_imported_later_are_patched():
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


def test_undo_keeps_later_changes(program):
    patches = Patches()
    patches.patch(program, {"limit": 1.0, "added": 2})
    program.limit = 3.0
    patches.undo()
    assert program.limit == 3.0
    assert not hasattr(program, "added")


def test_every_replaced_name_exists_in_torch():
    for name in REPLACEMENTS:
        importlib.import_module(name)
    torch_has = {name: set(dir(sys.modules[name])) for name in REPLACEMENTS}
    compat.install()
    compat.uninstall()
    assert not {f"{name}.{each}" for name, table in REPLACEMENTS.items() for each in set(table) - torch_has[name]}
