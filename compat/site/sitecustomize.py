"""Python runs this at the start of every process whose PYTHONPATH has this folder.

`python -m gradwire.compat` puts it there, so that the processes a program starts move to gradwire as well: as soon
as they have imported torch, which imports torch.distributed.rpc. A process that does not import torch only reads
two small files.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next_one() -> None:
    """This file hides another sitecustomize, for instance that of the Linux distribution."""
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch_for_torch() -> None:
    path = os.path.join(os.path.dirname(_HERE), "imports.py")
    spec = importlib.util.spec_from_file_location("_gradwire_compat_imports", path)
    assert spec is not None
    assert spec.loader is not None
    imports = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imports)

    def install(module: object) -> None:
        # A program may import gradwire, and that torch: then it is gradwire that has to be complete.
        if "gradwire" in sys.modules and module is not sys.modules["gradwire"]:
            return
        try:
            from gradwire import compat
            from gradwire.compat.defaults import inherited
        except ModuleNotFoundError as error:
            message = (
                f"{sys.executable} was started by a program that runs on gradwire, but has no gradwire: install "
                f"it there, or take {_HERE} out of PYTHONPATH"
            )
            raise ImportError(message) from error
        compat.install(**inherited(os.environ))

    imports.when_imported("torch", install)
    imports.when_imported("gradwire", install)


_watch_for_torch()
_run_the_next_one()
