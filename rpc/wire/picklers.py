"""The picklers that messages are made with: Python's own, or cloudpickle's, by the option `pickler`.

cloudpickle writes ordinary pickles. It names functions and classes that can be imported, as Python's pickler does,
and writes the code of others: of lambdas, of functions inside functions, and of the program's `__main__`.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..contracts.pickler import BY_VALUE

__all__ = ["PICKLE_PROTOCOL", "Pickler", "dumps", "fallback_reducers", "make_pickler", "resetter"]

PICKLE_PROTOCOL = 5


class Pickler(Protocol):
    """What messages use of `pickle.Pickler`."""

    memo: Any
    """Its `copy` returns a dict of the objects that are in the pickle."""

    def dump(self, value: Any, /) -> None:
        """Pickles a value."""

    def clear_memo(self) -> None:
        """Forgets which objects are in the pickle."""


def make_pickler(name: str, stream: io.BytesIO, reducers: Mapping[type, Callable[[Any], Any]]) -> Pickler:
    """Returns a new pickler that writes to a stream, with these reducers by class."""
    if name == BY_VALUE:
        return _by_value(stream, reducers)
    pickler = pickle.Pickler(stream, protocol=PICKLE_PROTOCOL)
    pickler.dispatch_table = reducers
    return pickler


def _by_value(stream: io.BytesIO, reducers: Mapping[type, Callable[[Any], Any]]) -> Pickler:
    import cloudpickle

    # Its class has an attribute `dispatch_table`, which the constructor of C reads, and nothing reads afterwards.
    pickler: Pickler = cloudpickle.Pickler.__new__(cloudpickle.Pickler)
    pickler.dispatch_table = reducers  # type: ignore[attr-defined]
    cloudpickle.Pickler.__init__(pickler, stream, protocol=PICKLE_PROTOCOL)
    return pickler


def resetter(pickler: Pickler) -> Callable[[], None]:
    """Returns a function that makes a pickler ready for another value."""
    # cloudpickle's: the namespaces of the functions of one value, by the ids of what may be gone by now.
    namespaces: dict[int, Any] | None = getattr(pickler, "globals_ref", None)
    if namespaces is None:
        return pickler.clear_memo

    def reset() -> None:
        pickler.clear_memo()
        namespaces.clear()

    return reset


def fallback_reducers(name: str) -> Mapping[type, Callable[[Any], Any]]:
    """Returns the reducers of a pickler, by exact class, which apply to classes that messages have none for."""
    if name != BY_VALUE:
        return copyreg.dispatch_table
    import cloudpickle

    reducers: Mapping[type, Callable[[Any], Any]] = cloudpickle.Pickler.dispatch_table  # copyreg's are part of it
    return reducers


def dumps(name: str, value: object) -> bytes:
    """Returns a pickle of a value with all that is in it: tensors are copied into it, references do not pickle."""
    if type(value) is tuple and name != BY_VALUE:
        return pickle.dumps(value, PICKLE_PROTOCOL)
    stream = io.BytesIO()
    make_pickler(name, stream, fallback_reducers(name)).dump(value)
    return stream.getvalue()
