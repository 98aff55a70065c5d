"""Installs the compatibility layer in the processes that a program started by `gradwire run` starts.

Python runs this file at startup if its folder is in PYTHONPATH: every Python, also one that is older than gradwire
needs, or has none. So it does little, in a way that all of them understand, and leaves no trace: the folder is
taken from sys.path again, and the sitecustomize that this one hides runs as if it had been found first.
"""

import importlib
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]

if sys.version_info >= (3, 11):  # noqa: UP036 - older ones run this file, too
    _path = os.path.join(os.path.dirname(_here), "import_hooks.py")
    with open(_path) as _file:
        exec(compile(_file.read(), _path, "exec"), {"__name__": "gradwire_startup", "__file__": _path})  # noqa: S102 - a file of gradwire

_own = sys.modules.pop("sitecustomize")
try:
    importlib.import_module("sitecustomize")  # the one that this file hides, for example the distribution's
except ImportError:
    if "sitecustomize" in sys.modules:
        raise
finally:
    sys.modules.setdefault("sitecustomize", _own)
