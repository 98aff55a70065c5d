"""The proxy through which a program calls methods of a referenced value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

__all__ = ["RRefProxy"]

K = TypeVar("K")
"""The type of a call through the proxy: that of the method's result, a future of it, or a reference to it."""


@final
class RRefProxy(Generic[K]):
    """Offers the methods of the referenced value; other attributes are methods that return them."""

    __slots__ = ("__call",)

    def __init__(self, call: Callable[[str, Sequence[Any], Mapping[str, Any]], K]) -> None:
        """Args: call: calls a method, by name, with positional and named arguments."""
        self.__call = call

    def __getattr__(self, name: str) -> Callable[..., K]:
        call = self.__call

        def call_method(*args: Any, **kwargs: Any) -> K:
            return call(name, args, kwargs)

        return call_method
