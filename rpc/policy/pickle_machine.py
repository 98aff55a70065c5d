"""The state of a pickle that is read as data: its stack and memo, and what its opcodes may do with them.

- Names are handed to a NameResolver, which alone decides what they stand for and what may be made with them.
- Only containers that the pickle has just made can be changed, and only until they are part of another one. So
  there are no cycles, and the depth of each is known.
- Every step is counted, and none allocates more than the bytes of the pickle that it has read.
- What a step does with values that are there already is counted too, as often as it can do it: a value that the
  pickle has once may occur in a million places.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, final

from ..contracts.messages import Buffer

__all__ = ["Extent", "Made", "Name", "NameResolver", "Node", "PickleMachine", "RefusedValueError"]

MAX_KEYS = 1000
"""Keys of dicts and sets in one message whose hashes a peer can choose: all but texts, bytes and ints of 60 bits.
With equal hashes, each is compared with all others."""

MAX_SAFE_INT = 1 << 60
"""Ints of smaller magnitude have different hashes."""

PROBES_PER_STEP = 512
"""Places of a dict or set that one step looks at. A peer can choose even ints of different hashes so that each is
looked for in the places of all others."""

COMPARISONS_PER_STEP = 16
"""How many values of keys one step compares with those of other keys."""

BYTES_PER_STEP = 256
"""Bytes of texts and large ints that one step reads, besides those of the pickle."""

ERROR_SIZE = 256
"""How many values an exception counts as: formatting it takes as long."""

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
    nbytes: int
    """Bytes of the texts and ints among them, counted in the same way."""


EMPTY = Extent(depth=1, size=0, nbytes=0)


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
        self._max_bytes = self._bytes_left = len(self._data) + BYTES_PER_STEP * max_operations
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
        """Takes a part of a name from the stack."""
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
        depth, size, nbytes = 0, len(items), 0
        for index, item in enumerate(items):
            kind = type(item)
            if kind is Node:
                item.is_open = False
                self.resolve(item)
                items[index] = item.value
                depth = max(depth, item.extent.depth)
                size += item.extent.size
                nbytes += item.extent.nbytes
            elif kind is Name:
                items[index] = self.names.value(item)
            elif kind is int:
                nbytes += item.bit_length() >> 3
            elif kind is not float:
                nbytes += _nbytes(item)
        if depth >= self._max_depth:
            raise RefusedValueError(f"it has more than max_depth={self._max_depth} levels")
        return items, self._checked(Extent(depth + 1, size, nbytes))

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
        node.extent = self._joined(node.extent, extent)
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
        keys = self.stack[start::2]
        items, extent = self.take(start)
        node = self.target(extent)
        if len(items) % 2 or (type(node.value) is not dict and node.set_state is None):
            raise RefusedValueError(MALFORMED)
        is_dict = isinstance(node.value, dict)
        for index, key in enumerate(keys):
            self._count_key(key, dict.__len__(node.value) if is_dict else 0)
            node.value[items[2 * index]] = items[2 * index + 1]

    def add_items(self, start: int) -> None:
        """Adds the items from a position of the stack on to the set below them."""
        keys = self.stack[start:]
        items, extent = self.take(start)
        node = self.target(extent)
        if type(node.value) is not set:
            raise RefusedValueError(MALFORMED)
        for key, item in zip(keys, items, strict=True):
            self._count_key(key, len(node.value))
            node.value.add(item)

    def take_frozenset(self, start: int) -> None:
        """Makes a frozenset of the items from a position of the stack on."""
        keys = self.stack[start:]
        items, extent = self.take(start)
        for others, key in enumerate(keys):
            self._count_key(key, others)
        self.stack.append(Node(frozenset(items), extent, is_open=False))

    def take_args(self) -> tuple[Node, Name]:
        """Takes the arguments of a call, and the name of what is called."""
        args, callee = self.stack.pop(), self.stack.pop()
        if type(args) is tuple:  # which is empty
            args = Node((), is_open=False)
        if type(args) is not Node or type(args.value) is not tuple or type(callee) is not Name:
            raise RefusedValueError(MALFORMED)
        self.count_use(args.extent)
        self._count_bytes(sum(_nbytes(each) for each in args.value))
        return args, callee

    def count_use(self, extent: Extent) -> None:
        """Counts that something goes through all values inside of arguments or of a state."""
        self._count(extent.size)

    def push_made(self, made: Made, *extents: Extent) -> None:
        """Pushes what a NameResolver has made of values of these extents."""
        if isinstance(made.value, BaseException):
            extents += (Extent(1, ERROR_SIZE, 0),)
        extent = EMPTY
        for each in extents:
            extent = self._joined(extent, each)
        node = Node(made.value, extent)
        node.set_state = made.set_state
        self.stack.append(node)

    def _count_key(self, key: object, others: int) -> None:
        """Counts what it takes to hash a key, and to find its place among others.

        Args:
            key: as it was on the stack.
            others: how many keys there may be.
        """
        kind = type(key)
        if kind is str or kind is bytes:  # hashed once, in a way that peers do not know
            self._count_bytes(len(key))  # type: ignore[arg-type]
            return
        if kind is bool or (kind is int and -MAX_SAFE_INT < key < MAX_SAFE_INT):  # type: ignore[operator]
            self._count(others // PROBES_PER_STEP)
            return
        self._keys_left -= 1
        if self._keys_left < 0:
            raise RefusedValueError(f"it has more than {MAX_KEYS} keys that are neither texts nor ints of 60 bits")
        _, size, nbytes = key.extent if type(key) is Node else Extent(1, 0, _nbytes(key))
        compared = min(others, MAX_KEYS - self._keys_left) // COMPARISONS_PER_STEP
        self._count((1 + size) * (1 + compared))
        self._count_bytes(nbytes * (1 + compared))

    def _joined(self, first: Extent, second: Extent) -> Extent:
        """Returns the extent of what has parts of two extents."""
        depth, size, nbytes = first
        return self._checked(Extent(max(depth, second.depth), size + second.size, nbytes + second.nbytes))

    def _checked(self, extent: Extent) -> Extent:
        """Returns an extent that is not too large."""
        if extent.size > self._max_operations:
            raise RefusedValueError(
                f"its containers have more than max_operations={self._max_operations} values, if those that occur "
                f"in several places are counted in each, and an exception as {ERROR_SIZE}"
            )
        if extent.nbytes > self._max_bytes:
            self._refuse_bytes()
        return extent

    def _count_bytes(self, nbytes: int) -> None:
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            self._refuse_bytes()

    def _refuse_bytes(self) -> NoReturn:
        raise RefusedValueError(
            f"its texts and large ints have more than {BYTES_PER_STEP} bytes for each of "
            f"max_operations={self._max_operations} besides its own, if those that occur in several places are "
            "counted in each"
        )

    def _count(self, operations: int) -> None:
        self._operations_left -= operations
        if self._operations_left < 0:
            raise RefusedValueError(f"decoding it takes more than max_operations={self._max_operations} steps")


def _nbytes(value: object) -> int:
    """Returns how many bytes hashing, comparing or printing a value reads, if there can be many."""
    kind = type(value)
    if kind is int:
        return value.bit_length() >> 3  # type: ignore[attr-defined,no-any-return]
    if kind is str or kind is bytes or kind is bytearray:
        return len(value)  # type: ignore[arg-type]
    return 0
