"""Reads pickles as data: the opcodes that gradwire's pickler writes, none of which runs anything.

A `find_class` of Python's own unpickler is not enough to read the pickle of a stranger: ten bytes have it allocate
64 GiB (LONG_BINPUT), BUILD sets attributes of any function that `find_class` returns, the hash of a deep tuple
overflows the stack, and that of a tuple which has the next one twice on each level never ends.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ..contracts.messages import Buffer
from .pickle_machine import GETATTR, MALFORMED, NameResolver, Node, PickleMachine, RefusedValueError

__all__ = ["read_plain_pickle"]

PROTOCOLS = range(2, 6)
STOP = ord(".")

Operation = Callable[[PickleMachine], None]
"""What an opcode does."""


def read_plain_pickle(data: Buffer, names: NameResolver, max_depth: int, max_operations: int) -> Any:
    """Returns the value of a pickle.

    Args:
        data: the pickle.
        names: decides what the names in it stand for.
        max_depth: levels of containers and instances inside each other.
        max_operations: steps.

    Raises:
        RefusedValueError: it has what is not accepted, is too large, or is malformed.
        Exception: what making an instance of an exposed class raises.
    """
    machine = PickleMachine(data, names, max_depth, max_operations)
    try:
        while (opcode := machine.opcode()) != STOP:
            operation = _OPERATIONS.get(opcode)
            if operation is None:
                raise RefusedValueError(f"its pickle has the opcode {opcode:#x}, which gradwire does not write")
            operation(machine)
        return machine.result()
    except (IndexError, UnicodeDecodeError) as error:
        raise RefusedValueError(MALFORMED) from error


def _protocol(machine: PickleMachine) -> None:
    if machine.number(1) not in PROTOCOLS:
        raise RefusedValueError("its pickle has another protocol")


def _frame(machine: PickleMachine) -> None:
    machine.read(8)  # how much to read of a file


def _mark(machine: PickleMachine) -> None:
    machine.marks.append(len(machine.stack))


def _push(value: object) -> Operation:
    return lambda machine: machine.stack.append(value)


def _push_new(kind: Callable[[], Any]) -> Operation:
    return lambda machine: machine.stack.append(Node(kind()))


def _byte(machine: PickleMachine) -> None:
    machine.stack.append(machine.byte())


def _unsigned(count: int) -> Operation:
    return lambda machine: machine.stack.append(machine.number(count))


def _signed(machine: PickleMachine) -> None:
    machine.stack.append(int.from_bytes(machine.read(4), "little", signed=True))


def _long(count: int) -> Operation:
    return lambda machine: machine.stack.append(
        int.from_bytes(machine.read(machine.number(count)), "little", signed=True)
    )


def _float(machine: PickleMachine) -> None:
    machine.stack.append(struct.unpack(">d", machine.read(8))[0])


def _short_text(machine: PickleMachine) -> None:
    machine.stack.append(str(machine.read(machine.byte()), "utf-8", "surrogatepass"))


def _text(count: int) -> Operation:
    return lambda machine: machine.stack.append(str(machine.read(machine.number(count)), "utf-8", "surrogatepass"))


def _bytes(count: int, kind: type[bytes | bytearray] = bytes) -> Operation:
    return lambda machine: machine.stack.append(kind(machine.read(machine.number(count))))


def _with_last(count: int, use: Callable[[PickleMachine, int], None]) -> Operation:
    """Returns the operation that uses so many items at the top of the stack."""
    return lambda machine: use(machine, len(machine.stack) - count)


def _from_mark(use: Callable[[PickleMachine, int], None]) -> Operation:
    """Returns the operation that uses the items from the last mark on."""
    return lambda machine: use(machine, machine.marks.pop())


def _memoize(machine: PickleMachine) -> None:
    machine.memo.append(machine.stack[-1])


def _get(machine: PickleMachine) -> None:
    machine.stack.append(machine.memo[machine.number(4)])


def _get_early(machine: PickleMachine) -> None:
    machine.stack.append(machine.memo[machine.byte()])


def _name(machine: PickleMachine) -> None:
    name, module = machine.text(), machine.text()
    machine.stack.append(machine.names.name(module, name))


def _reduce(machine: PickleMachine) -> None:
    args, callee = machine.take_args()
    if (callee.module, callee.name) == GETATTR and len(args.value) == 2:
        machine.stack.append(machine.names.attribute(*args.value))
        return
    machine.resolve(args)
    machine.push_made(machine.names.call(callee, args.value), args.extent)


def _new(machine: PickleMachine) -> None:
    args, cls = machine.take_args()
    machine.resolve(args)
    machine.push_made(machine.names.new(cls, args.value, {}), args.extent)


def _new_with_keywords(machine: PickleMachine) -> None:
    (kwargs,), extent = machine.take(len(machine.stack) - 1)
    args, cls = machine.take_args()
    machine.resolve(args)
    if type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
        raise RefusedValueError(MALFORMED)
    machine.count_use(extent)
    machine.push_made(machine.names.new(cls, args.value, kwargs), args.extent, extent)


def _build(machine: PickleMachine) -> None:
    (state,), extent = machine.take(len(machine.stack) - 1)
    node = machine.target(extent)
    if node.set_state is None:
        raise RefusedValueError("its pickle sets the state of a value that has none")
    machine.count_use(extent)
    node.set_state(node.value, state)


_OPERATIONS: Mapping[int, Operation] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _mark,
    ord("N"): _push(None),
    0x88: _push(value=True),
    0x89: _push(value=False),
    ord("K"): _byte,
    ord("M"): _unsigned(2),
    ord("J"): _signed,
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): _float,
    0x8C: _short_text,
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _bytes(1),
    ord("B"): _bytes(4),
    0x8E: _bytes(8),
    0x96: _bytes(8, bytearray),
    ord(")"): _push(()),
    0x85: _with_last(1, PickleMachine.take_tuple),
    0x86: _with_last(2, PickleMachine.take_tuple),
    0x87: _with_last(3, PickleMachine.take_tuple),
    ord("t"): _from_mark(PickleMachine.take_tuple),
    ord("]"): _push_new(list),
    ord("a"): _with_last(1, PickleMachine.extend),
    ord("e"): _from_mark(PickleMachine.extend),
    ord("}"): _push_new(dict),
    ord("s"): _with_last(2, PickleMachine.set_items),
    ord("u"): _from_mark(PickleMachine.set_items),
    0x8F: _push_new(set),
    0x90: _from_mark(PickleMachine.add_items),
    0x91: _from_mark(PickleMachine.take_frozenset),
    0x94: _memoize,
    ord("h"): _get_early,
    ord("j"): _get,
    0x93: _name,
    ord("R"): _reduce,
    0x81: _new,
    0x92: _new_with_keywords,
    ord("b"): _build,
}
"""What the opcodes do. Those that gradwire's pickler does not write are not accepted."""
