"""The root of the tree of errors, which is drawn in errors.py."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["GradwireError", "rebuild_exception"]


class GradwireError(RuntimeError):
    """The root of the tree.

    Pickling keeps `args` and the attributes and bypasses the constructor, so that every error can be sent to other
    workers whatever its constructor takes.
    """

    def __reduce__(self) -> tuple[Callable[..., "GradwireError"], tuple[Any, ...]]:
        return rebuild_exception, (type(self), self.args, self.__dict__)


E = TypeVar("E", bound=BaseException)


def rebuild_exception(cls: type[E], args: tuple[Any, ...], attributes: dict[str, Any]) -> E:
    """Returns an exception with these `args` and attributes, without calling its `__init__`.

    An `__init__` may take other arguments than those it leaves in `args`, such as the parts of a message.
    """
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
