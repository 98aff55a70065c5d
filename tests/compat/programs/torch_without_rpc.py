"""Takes RPC out of torch: its modules in Python, as if they were deleted, or its C++ part, as in some builds.

Run with the arguments "python" or "c++", then the path of a program, and that one's arguments.
"""

import importlib.abc
import importlib.machinery
import runpy
import sys
import types

MODULES = ("torch.distributed.rpc", "torch.distributed.autograd")
INITIALIZERS = ("_rpc_init", "_dist_autograd_init")
EXTENSIONS = ("_distributed_rpc", "_distributed_autograd")


class WithoutExtensions(importlib.abc.MetaPathFinder):
    """Finds torch._C, and takes from it what a build without RPC does not have."""

    def find_spec(self, name: str, path, target=None):
        if name != "torch._C":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for initializer in INITIALIZERS:
                delattr(module, initializer)

        spec.loader.exec_module = exec_module
        return spec


class WithoutModules(importlib.abc.MetaPathFinder):
    """Does not find the modules."""

    def find_spec(self, name: str, path, target=None):
        if name.startswith(MODULES) or name in (f"torch._C.{each}" for each in EXTENSIONS):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove_modules() -> None:
    """Removes what `import torch` has imported."""
    import torch
    import torch._dynamo  # of the modules of torch, torch.optim imports it late, and it imports RPC

    for name in [name for name in sys.modules if name.startswith(MODULES)]:
        del sys.modules[name]
    for name in MODULES:
        delattr(torch.distributed, name.rpartition(".")[2])
    for name in EXTENSIONS:
        sys.modules.pop(f"torch._C.{name}", None)
        delattr(torch._C, name)
    for name in INITIALIZERS:
        delattr(torch._C, name)
    sys.meta_path.insert(0, WithoutModules())


if __name__ == "__main__":
    if sys.argv[1] == "c++":
        sys.meta_path.insert(0, WithoutExtensions())
        import torch._dynamo  # noqa: F401 # once, for all processes that are forked from this one
    else:
        remove_modules()
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
