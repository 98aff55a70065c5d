"""Installs the compatibility layer in the processes that a program started by `gradwire run` starts.

Python runs this file at startup if its folder is in PYTHONPATH. The layer is installed as soon as the process has
imported torch, which imports torch.distributed.rpc. A process that never imports torch only reads two small files.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden_sitecustomize() -> None:
    """Runs the sitecustomize that this file hides, for example the Linux distribution's."""
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _install_on_import() -> None:
    path = os.path.join(os.path.dirname(_HERE), "import_hooks.py")
    spec = importlib.util.spec_from_file_location("_gradwire_compat_import_hooks", path)
    assert spec is not None
    assert spec.loader is not None
    import_hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(import_hooks)

    def install(module: object) -> None:
        # If gradwire is being imported and has imported torch, wait until the import of gradwire is done.
        if "gradwire" in sys.modules and module is not sys.modules["gradwire"]:
            return
        try:
            from gradwire import compat
            from gradwire.compat.defaults import inherited_defaults
        except ModuleNotFoundError as error:
            message = (
                f"{sys.executable} was started by a program that runs on gradwire, but cannot import gradwire: "
                f"install it there, or remove {_HERE} from PYTHONPATH"
            )
            raise ImportError(message) from error
        compat.install(**inherited_defaults(os.environ))

    import_hooks.call_on_import("torch", install)
    import_hooks.call_on_import("gradwire", install)


_install_on_import()
_run_hidden_sitecustomize()
