"""The option `pickler`: how values are pickled into messages."""

from importlib import import_module
from typing import Any

from ...errors import RpcError

__all__ = ["BY_NAME", "BY_VALUE", "PICKLERS", "SEND_CODE", "check_pickler"]

BY_NAME = "pickle"
"""Functions and classes travel as their names."""

BY_VALUE = "cloudpickle"
"""Functions and classes that the other worker cannot import by name travel with their code."""

PICKLERS = (BY_NAME, BY_VALUE)

SEND_CODE = f'send code with RpcBackendOptions(pickler="{BY_VALUE}")'
"""What errors advise for functions and classes that the other worker cannot import."""


def check_pickler(value: Any) -> str:
    """Returns the name of a pickler that can be used here.

    Raises:
        ValueError: there is none of this name.
        RpcError: its package is not installed.
    """
    if value not in PICKLERS:
        raise ValueError(f"pickler is {value!r}: give one of {PICKLERS}")
    if value == BY_VALUE:
        try:
            import_module(BY_VALUE)
        except ImportError as error:
            raise RpcError(f"pickler={value!r} needs cloudpickle: pip install cloudpickle ({error})") from error
    return str(value)
