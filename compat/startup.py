"""Has the compatibility layer installed in this process as soon as it has imported torch.

`import torch` imports torch.distributed.rpc. sitecustomize loads this file by its path, at the start of processes
that may never import torch; they only read small files.
"""

import importlib.util
import os
import sys
from types import ModuleType


def _import_hooks() -> ModuleType:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "import_hooks.py")
    spec = importlib.util.spec_from_file_location("_gradwire_compat_import_hooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install(module: object) -> None:
    # If gradwire is being imported and has imported torch, wait until the import of gradwire is done.
    if "gradwire" in sys.modules and module is not sys.modules["gradwire"]:
        return
    try:
        from gradwire import compat
        from gradwire.compat.launch import inherited_defaults
    except ModuleNotFoundError as error:
        message = (
            f"{sys.executable} was started by a program that runs on gradwire, but cannot import gradwire: "
            f"install it there, or remove {os.path.join(os.path.dirname(__file__), 'site')} from PYTHONPATH"
        )
        raise ImportError(message) from error
    compat.install(**inherited_defaults(os.environ))


_call_on_import = _import_hooks().call_on_import
for _name in ("torch", "gradwire"):
    _call_on_import(_name, _install)
