"""The state of a pickle that is read as data: its stack and memo, and what its opcodes may do with them.

- Names are handed to a NameResolver, which alone decides what they stand for and what may be made with them.
- Only containers that the pickle has just made can be changed, and only until they are part of another one. So
  there are no cycles, and the depth of each is known.
- Every step is counted, and none allocates more than the bytes of the pickle that it has read.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, final

from ..contracts.messages import Buffer

__all__ = ["Extent", "Made", "Name", "NameResolver", "Node", "PickleMachine", "RefusedValueError"]

MAX_KEYS = 1000
"""Keys of dicts and sets in one message whose hashes a peer can choose: all but texts, bytes and ints of 60 bits.
With equal hashes, each is compared with all others."""

MAX_SAFE_INT = 1 << 60
"""Ints of smaller magnitude have different hashes."""

GETATTR = ("builtins", "getattr")
"""Module and name of the function as whose calls methods are pickled."""

MALFORMED = "its pickle is malformed"


class RefusedValueError(Exception):
    """A pickle has what is not accepted, or is malformed. The text says what.

    Attributes:
        name: the name of the function, class or method that is refused, if it is one.
    """

    def __init__(self, problem: str, name: str = "") -> None:
        super().__init__(problem)
        self.name = name


@final
class Name:
    """The name of a function, class or constant in a pickle, before it is known what the pickle does with it."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def full(self) -> str:
        """The module and the qualified name."""
        return f"{self.module}.{self.name}"


@final
class Made:
    """What a NameResolver has made: a value, and what sets its state, if the pickle may do that."""

    __slots__ = ("set_state", "value")

    def __init__(self, value: Any, set_state: Callable[[Any, Any], None] | None = None) -> None:
        self.value = value
        self.set_state = set_state


class NameResolver(Protocol):
    """Decides what the names in a pickle stand for. Its methods raise RefusedValueError if it is not accepted."""

    def name(self, module: str, name: str) -> Name:
        """Returns a name that the pickle has."""

    def value(self, name: Name) -> Any:
        """Returns what a name stands for as a part of a value."""

    def call(self, name: Name, args: tuple[Any, ...]) -> Made:
        """Returns what a call of what the name stands for makes."""

    def new(self, name: Name, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Made:
        """Returns a new instance of the class that the name stands for, without its state."""

    def attribute(self, target: Any, name: Any) -> Any:
        """Returns an attribute of a Name, which is a Name again, or of an instance."""


class Extent(NamedTuple):
    """How far containers and instances go."""

    depth: int
    """Levels of them inside each other."""
    size: int
    """Values inside of them, each counted as often as it occurs: as often as hashing or printing comes to it."""


EMPTY = Extent(depth=1, size=0)


@final
class Node:
    """A container or instance on the stack."""

    __slots__ = ("extent", "has_names", "is_open", "set_state", "value")

    def __init__(
        self, value: Any, extent: Extent = EMPTY, *, is_open: bool = True, has_names: bool = False
    ) -> None:
        """Makes one.

        Args:
            value: the container or instance.
            extent: that of its parts, and its own level.
            is_open: whether the pickle may still change it: not once it is part of another.
            has_names: whether it is a tuple with Names, which are resolved when it becomes part of another value.
        """
        self.value = value
        self.extent = extent
        self.is_open = is_open
        self.has_names = has_names
        self.set_state: Callable[[Any, Any], None] | None = None
        """Sets the state of an instance; None for containers, and for values without state."""


@final
class PickleMachine:
    """Reads one pickle. The stack has values, Nodes in place of containers and instances, and Names."""

    def __init__(self, data: Buffer, names: NameResolver, max_depth: int, max_operations: int) -> None:
        """Begins at the first byte of a pickle.

        Args:
            data: the pickle.
            names: decides what the names in it stand for.
            max_depth: levels of containers and instances inside each other.
            max_operations: steps.
        """
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.names = names
        self._data = memoryview(data)
        self._position = 0
        self._max_depth = max_depth
        self._max_operations = self._operations_left = max_operations
        self._keys_left = MAX_KEYS

    def opcode(self) -> int:
        """Returns the next opcode."""
        self._count(1)
        return self.byte()

    def byte(self) -> int:
        """Returns the next byte of the pickle."""
        byte = self._data[self._position]
        self._position += 1
        return byte

    def read(self, count: int) -> memoryview:
        """Returns the next bytes of the pickle."""
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise RefusedValueError("its pickle is cut off")
        return self._data[start : self._position]

    def number(self, count: int) -> int:
        """Returns an unsigned number of so many bytes."""
        return int.from_bytes(self.read(count), "little")

    def text(self) -> str:
        """Takes a text from the stack."""
        text = self.stack.pop()
        if type(text) is not str:
            raise RefusedValueError(MALFORMED)
        return text

    def result(self) -> Any:
        """Returns the value at the end."""
        result = self.stack.pop()
        if type(result) is Node:
            self.resolve(result)
            return result.value
        return self.names.value(result) if type(result) is Name else result

    def take(self, start: int) -> tuple[list[Any], Extent]:
        """Takes the items from a position of the stack on, as parts of a container.

        Returns:
            The items, and the extent of a container that has them.
        """
        if start < 0:
            raise RefusedValueError(MALFORMED)
        items = self.stack[start:]
        del self.stack[start:]
        depth, size = 0, len(items)
        for index, item in enumerate(items):
            kind = type(item)
            if kind is Node:
                item.is_open = False
                self.resolve(item)
                items[index] = item.value
                depth = max(depth, item.extent.depth)
                size += item.extent.size
            elif kind is Name:
                items[index] = self.names.value(item)
        if depth >= self._max_depth:
            raise RefusedValueError(f"it has more than max_depth={self._max_depth} levels")
        self._check_size(size)
        return items, Extent(depth + 1, size)

    def resolve(self, node: Node) -> None:
        """Replaces the Names in a tuple by what they stand for."""
        if node.has_names:
            node.value = tuple(self.names.value(item) if type(item) is Name else item for item in node.value)
            node.has_names = False

    def take_tuple(self, start: int) -> None:
        """Makes a tuple of the last items. Names in it stay names: it may be the arguments of `getattr`."""
        stack = self.stack
        names = [(index, stack[index]) for index in range(max(0, start), len(stack)) if type(stack[index]) is Name]
        for index, _ in names:
            stack[index] = None
        items, extent = self.take(start)
        for index, name in names:
            items[index - start] = name
        stack.append(Node(tuple(items), extent, is_open=False, has_names=bool(names)))

    def target(self, extent: Extent) -> Node:
        """Returns the container or instance at the top of the stack, which gets parts of this extent."""
        node = self.stack[-1]
        if type(node) is not Node or not node.is_open:
            raise RefusedValueError("its pickle changes a value that is complete, or contains itself")
        node.extent = Extent(max(node.extent.depth, extent.depth), node.extent.size + extent.size)
        self._check_size(node.extent.size)
        return node

    def extend(self, start: int) -> None:
        """Appends the items from a position of the stack on to the list below them."""
        items, extent = self.take(start)
        node = self.target(extent)
        extend = getattr(type(node.value), "extend", None)  # not an attribute, which a pickle can set
        if extend is None or (type(node.value) is not list and node.set_state is None):
            raise RefusedValueError(MALFORMED)
        extend(node.value, items)

    def set_items(self, start: int) -> None:
        """Sets keys and values, from a position of the stack on, of the dict below them."""
        items, extent = self.take(start)
        node = self.target(extent)
        if len(items) % 2 or (type(node.value) is not dict and node.set_state is None):
            raise RefusedValueError(MALFORMED)
        for index in range(0, len(items), 2):
            self._check_key(items[index])
            node.value[items[index]] = items[index + 1]

    def take_set(self, start: int) -> tuple[list[Any], Extent]:
        """Takes the items of a set."""
        items, extent = self.take(start)
        for item in items:
            self._check_key(item)
        return items, extent

    def take_args(self) -> tuple[Node, Name]:
        """Takes the arguments of a call, and the name of what is called."""
        args, callee = self.stack.pop(), self.stack.pop()
        if type(args) is tuple:  # which is empty
            args = Node((), is_open=False)
        if type(args) is not Node or type(args.value) is not tuple or type(callee) is not Name:
            raise RefusedValueError(MALFORMED)
        return args, callee

    def push_made(self, made: Made, extent: Extent) -> None:
        """Pushes what a NameResolver has made of values of this extent."""
        node = Node(made.value, extent)
        node.set_state = made.set_state
        self.stack.append(node)

    def _check_key(self, key: object) -> None:
        """Checks that hashing a key takes a bounded time, and that few keys can have the same hash."""
        if isinstance(key, str | bytes) or (isinstance(key, int) and -MAX_SAFE_INT < key < MAX_SAFE_INT):
            return
        self._keys_left -= 1
        if self._keys_left < 0:
            raise RefusedValueError(f"it has more than {MAX_KEYS} keys that are neither texts nor ints of 60 bits")
        pending = [key]
        while pending:
            if isinstance(inner := pending.pop(), tuple):
                self._count(len(inner))  # more often than once, if a tuple contains it more often
                pending.extend(inner)

    def _check_size(self, size: int) -> None:
        if size > self._max_operations:
            raise RefusedValueError(
                f"its containers have more than max_operations={self._max_operations} values, if those that occur "
                "in several places are counted in each"
            )

    def _count(self, operations: int) -> None:
        self._operations_left -= operations
        if self._operations_left < 0:
            raise RefusedValueError(f"decoding it takes more than max_operations={self._max_operations} steps")
