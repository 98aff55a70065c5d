"""Reads pickles as data: the opcodes that gradwire's pickler writes, none of which runs anything.

So a `RestrictedReader` reads the values of messages whose senders may send exposed or plain values only.

A `find_class` of Python's own unpickler is not enough to read the pickle of a stranger: ten bytes have it allocate
64 GiB (LONG_BINPUT), BUILD sets attributes of any function that `find_class` returns, the hash of a deep tuple
overflows the stack, and that of a tuple which has the next one twice on each level never ends.

- MessageNames alone decides what names stand for and what may be made with them.
- Only containers that the pickle has just made can be changed, and only until they are part of another one. So
  there are no cycles, and the depth of each is known.
- Every step is counted, and none allocates more than the bytes of the pickle that it has read.
- What a step does with values that are there already is counted too, as often as it can do it: a value that the
  pickle has once may occur in a million places.
"""

import pickle
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, final

import torch

from ...errors import PolicyError
from ...net.security import Audit
from ..contracts.messages import Buffer, Incoming
from ..contracts.policy import Policy
from ..contracts.worker import WorkerInfo
from .failures import explain_missing
from .message_names import (
    GETATTR,
    MALFORMED,
    Made,
    MessageNames,
    Name,
    RefusedValueError,
    is_method_exposed,
    show,
)
from .pickling import unpickle

__all__ = ["RestrictedReader"]

PROTOCOLS = range(2, 6)

_STOP = pickle.STOP[0]

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


class _Extent(NamedTuple):
    """How far containers and instances go."""

    depth: int
    """Levels of them inside each other."""
    size: int
    """Values inside of them, each counted as often as it occurs: as often as hashing or printing comes to it."""
    nbytes: int
    """Bytes of the texts and ints among them, counted in the same way."""


EMPTY = _Extent(depth=1, size=0, nbytes=0)


@final
class _Node:
    """A container or instance on the stack."""

    __slots__ = ("extent", "has_names", "is_open", "set_state", "value")

    def __init__(
        self,
        value: Any,
        extent: _Extent = EMPTY,
        *,
        is_open: bool = True,
        has_names: bool = False,
        set_state: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Makes one. The extent is that of its parts, and its own level.

        The pickle may change it while it `is_open`: not once it is part of another. A tuple that `has_names` has
        Names in it, which are resolved when it becomes part of another value. `set_state` sets the state of an
        instance; containers, and values without state, have none.
        """
        self.value = value
        self.extent = extent
        self.is_open = is_open
        self.has_names = has_names
        self.set_state = set_state


@final
class _PickleMachine:
    """The state of a pickle that is read: its stack and memo, and what its opcodes may do with them.

    The stack has values, Nodes in place of containers and instances, and Names.
    """

    def __init__(self, data: Buffer, names: MessageNames, max_depth: int, max_operations: int) -> None:
        """Begins at the first byte of a pickle. The limits are those of `_read_plain_pickle`."""
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
        self.count(1)
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
        if type(result) is _Node:
            self.resolve(result)
            return result.value
        return self.names.value(result) if type(result) is Name else result

    def take(self, start: int) -> tuple[list[Any], _Extent]:
        """Takes the items from a position of the stack on; returns them, and the extent of their container."""
        if start < 0:
            raise RefusedValueError(MALFORMED)
        items = self.stack[start:]
        del self.stack[start:]
        depth, size, nbytes = 0, len(items), 0
        for index, item in enumerate(items):
            kind = type(item)
            if kind is _Node:
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
        return items, self._checked(_Extent(depth + 1, size, nbytes))

    def resolve(self, node: _Node) -> None:
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
        stack.append(_Node(tuple(items), extent, is_open=False, has_names=bool(names)))

    def target(self, extent: _Extent) -> _Node:
        """Returns the container or instance at the top of the stack, which gets parts of this extent."""
        node = self.stack[-1]
        if type(node) is not _Node or not node.is_open:
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
        self.stack.append(_Node(frozenset(items), extent, is_open=False))

    def take_args(self) -> tuple[_Node, Name]:
        """Takes the arguments of a call, and the name of what is called."""
        args, callee = self.stack.pop(), self.stack.pop()
        if type(args) is tuple:  # which is empty
            args = _Node((), is_open=False)
        if type(args) is not _Node or type(args.value) is not tuple or type(callee) is not Name:
            raise RefusedValueError(MALFORMED)
        self.count(args.extent.size)
        self._count_bytes(sum(_nbytes(each) for each in args.value))
        return args, callee

    def push_made(self, made: Made, *extents: _Extent) -> None:
        """Pushes what MessageNames has made of values of these extents."""
        if isinstance(made.value, BaseException):
            extents += (_Extent(1, ERROR_SIZE, 0),)
        extent = EMPTY
        for each in extents:
            extent = self._joined(extent, each)
        self.stack.append(_Node(made.value, extent, set_state=made.set_state))

    def _count_key(self, key: object, others: int) -> None:
        """Counts what it takes to hash a key, as it was on the stack, and to find its place among others."""
        kind = type(key)
        if kind is str or kind is bytes:  # hashed once, in a way that peers do not know
            self._count_bytes(len(key))  # type: ignore[arg-type]
            return
        if kind is bool or (kind is int and -MAX_SAFE_INT < key < MAX_SAFE_INT):  # type: ignore[operator]
            self.count(others // PROBES_PER_STEP)
            return
        self._keys_left -= 1
        if self._keys_left < 0:
            raise RefusedValueError(f"it has more than {MAX_KEYS} keys that are neither texts nor ints of 60 bits")
        _, size, nbytes = key.extent if type(key) is _Node else _Extent(1, 0, _nbytes(key))
        compared = min(others, MAX_KEYS - self._keys_left) // COMPARISONS_PER_STEP
        self.count((1 + size) * (1 + compared))
        self._count_bytes(nbytes * (1 + compared))

    def _joined(self, first: _Extent, second: _Extent) -> _Extent:
        """Returns the extent of what has parts of two extents."""
        depth, size, nbytes = first
        return self._checked(_Extent(max(depth, second.depth), size + second.size, nbytes + second.nbytes))

    def _checked(self, extent: _Extent) -> _Extent:
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

    def count(self, operations: int) -> None:
        """Counts steps, such as one for each value inside of arguments or of a state."""
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


Operation = Callable[[_PickleMachine], None]
"""What an opcode does."""


def _read_plain_pickle(data: Buffer, names: MessageNames, max_depth: int, max_operations: int) -> Any:
    """Returns the value of a pickle, of at most so many levels of containers, in at most so many steps.

    Raises:
        RefusedValueError: it has what is not accepted, is too large, or is malformed.
        Exception: what making an instance of an exposed class raises.
    """
    machine = _PickleMachine(data, names, max_depth, max_operations)
    try:
        while (opcode := machine.opcode()) != _STOP:
            operation = _OPERATIONS.get(opcode)
            if operation is None:
                raise RefusedValueError(f"its pickle has the opcode {opcode:#x}, which gradwire does not write")
            operation(machine)
        return machine.result()
    except (IndexError, UnicodeDecodeError) as error:
        raise RefusedValueError(MALFORMED) from error


def _protocol(machine: _PickleMachine) -> None:
    if machine.number(1) not in PROTOCOLS:
        raise RefusedValueError("its pickle has another protocol")


def _frame(machine: _PickleMachine) -> None:
    machine.read(8)  # how much to read of a file


def _mark(machine: _PickleMachine) -> None:
    machine.marks.append(len(machine.stack))


def _push(value: object) -> Operation:
    return lambda machine: machine.stack.append(value)


def _push_new(kind: Callable[[], Any]) -> Operation:
    return lambda machine: machine.stack.append(_Node(kind()))


def _byte(machine: _PickleMachine) -> None:
    machine.stack.append(machine.byte())


def _unsigned(count: int) -> Operation:
    return lambda machine: machine.stack.append(machine.number(count))


def _signed(machine: _PickleMachine) -> None:
    machine.stack.append(int.from_bytes(machine.read(4), "little", signed=True))


def _long(count: int) -> Operation:
    return lambda machine: machine.stack.append(
        int.from_bytes(machine.read(machine.number(count)), "little", signed=True)
    )


def _float(machine: _PickleMachine) -> None:
    machine.stack.append(struct.unpack(">d", machine.read(8))[0])


def _short_text(machine: _PickleMachine) -> None:
    machine.stack.append(str(machine.read(machine.byte()), "utf-8", "surrogatepass"))


def _text(count: int) -> Operation:
    return lambda machine: machine.stack.append(str(machine.read(machine.number(count)), "utf-8", "surrogatepass"))


def _bytes(count: int, kind: type[bytes | bytearray] = bytes) -> Operation:
    return lambda machine: machine.stack.append(kind(machine.read(machine.number(count))))


def _with_last(count: int, use: Callable[[_PickleMachine, int], None]) -> Operation:
    """Returns the operation that uses so many items at the top of the stack."""
    return lambda machine: use(machine, len(machine.stack) - count)


def _from_mark(use: Callable[[_PickleMachine, int], None]) -> Operation:
    """Returns the operation that uses the items from the last mark on."""
    return lambda machine: use(machine, machine.marks.pop())


def _memoize(machine: _PickleMachine) -> None:
    machine.memo.append(machine.stack[-1])


def _get(machine: _PickleMachine) -> None:
    machine.stack.append(machine.memo[machine.number(4)])


def _get_early(machine: _PickleMachine) -> None:
    machine.stack.append(machine.memo[machine.byte()])


def _name(machine: _PickleMachine) -> None:
    name, module = machine.text(), machine.text()
    machine.stack.append(machine.names.name(module, name))


def _reduce(machine: _PickleMachine) -> None:
    args, callee = machine.take_args()
    if (callee.module, callee.name) == GETATTR and len(args.value) == 2:
        machine.stack.append(machine.names.attribute(*args.value))
        return
    machine.resolve(args)
    machine.push_made(machine.names.call(callee, args.value), args.extent)


def _new(machine: _PickleMachine) -> None:
    args, cls = machine.take_args()
    machine.resolve(args)
    machine.push_made(machine.names.new(cls, args.value, {}), args.extent)


def _new_with_keywords(machine: _PickleMachine) -> None:
    (kwargs,), extent = machine.take(len(machine.stack) - 1)
    args, cls = machine.take_args()
    machine.resolve(args)
    if type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
        raise RefusedValueError(MALFORMED)
    machine.count(extent.size)
    machine.push_made(machine.names.new(cls, args.value, kwargs), args.extent, extent)


def _build(machine: _PickleMachine) -> None:
    (state,), extent = machine.take(len(machine.stack) - 1)
    node = machine.target(extent)
    if node.set_state is None:
        raise RefusedValueError("its pickle sets the state of a value that has none")
    machine.count(extent.size)
    node.set_state(node.value, state)


_OPERATIONS: Mapping[int, Operation] = {
    pickle.PROTO[0]: _protocol,
    pickle.FRAME[0]: _frame,
    pickle.MARK[0]: _mark,
    pickle.NONE[0]: _push(None),
    pickle.NEWTRUE[0]: _push(value=True),
    pickle.NEWFALSE[0]: _push(value=False),
    pickle.BININT1[0]: _byte,
    pickle.BININT2[0]: _unsigned(2),
    pickle.BININT[0]: _signed,
    pickle.LONG1[0]: _long(1),
    pickle.LONG4[0]: _long(4),
    pickle.BINFLOAT[0]: _float,
    pickle.SHORT_BINUNICODE[0]: _short_text,
    pickle.BINUNICODE[0]: _text(4),
    pickle.BINUNICODE8[0]: _text(8),
    pickle.SHORT_BINBYTES[0]: _bytes(1),
    pickle.BINBYTES[0]: _bytes(4),
    pickle.BINBYTES8[0]: _bytes(8),
    pickle.BYTEARRAY8[0]: _bytes(8, bytearray),
    pickle.EMPTY_TUPLE[0]: _push(()),
    pickle.TUPLE1[0]: _with_last(1, _PickleMachine.take_tuple),
    pickle.TUPLE2[0]: _with_last(2, _PickleMachine.take_tuple),
    pickle.TUPLE3[0]: _with_last(3, _PickleMachine.take_tuple),
    pickle.TUPLE[0]: _from_mark(_PickleMachine.take_tuple),
    pickle.EMPTY_LIST[0]: _push_new(list),
    pickle.APPEND[0]: _with_last(1, _PickleMachine.extend),
    pickle.APPENDS[0]: _from_mark(_PickleMachine.extend),
    pickle.EMPTY_DICT[0]: _push_new(dict),
    pickle.SETITEM[0]: _with_last(2, _PickleMachine.set_items),
    pickle.SETITEMS[0]: _from_mark(_PickleMachine.set_items),
    pickle.EMPTY_SET[0]: _push_new(set),
    pickle.ADDITEMS[0]: _from_mark(_PickleMachine.add_items),
    pickle.FROZENSET[0]: _from_mark(_PickleMachine.take_frozenset),
    pickle.MEMOIZE[0]: _memoize,
    pickle.BINGET[0]: _get_early,
    pickle.LONG_BINGET[0]: _get,
    pickle.STACK_GLOBAL[0]: _name,
    pickle.REDUCE[0]: _reduce,
    pickle.NEWOBJ[0]: _new,
    pickle.NEWOBJ_EX[0]: _new_with_keywords,
    pickle.BUILD[0]: _build,
}
"""What the opcodes do. Those that gradwire's pickler does not write are not accepted."""


@final
class RestrictedReader:
    """Accepts what the policy for the sender of a message says. Safe to use from any thread."""

    def __init__(self, me: WorkerInfo, policy: Policy, audit: Audit) -> None:
        """Makes the reader of one worker, whose messages to itself may have anything."""
        self._audit = audit
        self._me = me
        self._policy = policy
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages were refused, by the name of their sender."""
        with self._lock:
            return dict(self._refused)

    def read(self, message: Incoming) -> Any:
        """Returns the value of a message.

        Raises:
            PolicyError: the policy does not accept it; nothing of it has run.
            SerializationError: this worker has not got what it names.
            Exception: whatever unpickling the value raises.
        """
        try:
            return self._read(message.source, message.body, message.tensors, message.references)
        except (AttributeError, ImportError) as error:
            raise explain_missing(error, self._me.name) from error

    def load(self, source: WorkerInfo, data: Buffer | bytearray) -> Any:
        """Returns the value of a pickle without tensors. Raises as `read` does."""
        return self._read(source, memoryview(data), (), ())

    def _read(
        self,
        source: WorkerInfo,
        data: Buffer,
        tensors: Sequence[torch.Tensor],
        references: Sequence[Any],
    ) -> Any:
        policy = self._policy.of(source.name)
        if policy.accepts == "anything" or source.wire_id == self._me.wire_id:
            return unpickle(data, tensors, references)
        names = MessageNames(policy, partial(self._check_method, policy, source), tensors, references)
        try:
            return _read_plain_pickle(data, names, policy.max_depth, policy.max_operations)
        except RefusedValueError as refusal:
            name, problem = refusal.name, str(refusal)
        except PolicyError:
            raise
        except Exception as error:
            if names.has_run:  # it may be the error of an exposed class
                raise
            name, problem = "", f"{MALFORMED}: {type(error).__name__}: {show(str(error))}"
        raise self._refusal(source, name, problem)

    def _check_method(self, policy: Policy, source: WorkerInfo, value: object, name: str) -> None:
        """Raises PolicyError if a worker may not call this method, or read this attribute, of a value."""
        if is_method_exposed(policy, value, name):
            return
        full = f"{type(value).__module__}.{type(value).__qualname__}.{name}"
        raise self._refusal(
            source,
            full,
            f"it uses {show(full)}, which is not exposed: decorate the method or its class with rpc.expose, or "
            "list it in `exposed` of the rpc.Policy in this worker's RpcBackendOptions",
        )

    def _refusal(self, source: WorkerInfo, name: str, problem: str) -> PolicyError:
        """Counts and records a message that is refused; returns the error to raise.

        `name` is that of the function, class or method that is refused, if it is one.
        """
        name = show(name)[1:-1]
        with self._lock:
            self._refused[source.name] += 1
        self._audit.deny("policy", problem, worker=source.name)
        return PolicyError(self._me.name, source.name, name, problem)
