"""Check of a pickle against bounds before it is unpickled: the scan reads opcodes, and creates and calls nothing.

A few bytes of a pickle can request any amount of memory or time. A memo index of two billion makes the unpickler
allocate a memo table of this size; a declared length is allocated before the bytes are read; thousands of calls can
copy one memoised list; and hashing a tuple nested 100,000 deep overflows the C stack. The scan simulates the
unpickler's stack with small records in place of values, and adds up an estimate of the memory.
"""

from __future__ import annotations

import mmap
import pickletools
import re
from collections.abc import Callable
from typing import Any

from common.errors import printable

MEMORY = 128 * 2**20
"""Limit in bytes for the values of a pickle, without the texts and bytes that it contains.

A state of 10,000 tensors needs 41 MiB, and the largest published models have about 3,000.
"""
TUPLE_ITEMS = 4096
"""Largest number of items of a tuple, including nested tuples. Python's random state has 628."""

Record = Any
"""Placeholder for a value on the stack:

- 0 for a number
- a float, the length of a text or of bytes
- a str, an imported name
- a list with one number, the size of a list, dict or set
- a tuple of (weight, records of the items...) for a tuple
- None for the result of a call
"""

_SCALAR, _TEXT, _CONTAINER, _SET, _MEMO, _CALL, _NAME = 40, 64, 80, 224, 80, 600, 200
"""Largest memory in bytes of each kind of value, including its stack entry (CPython 3.11, PyTorch 2.15)."""
_BYTE, _IN_LIST, _ENTRY = 8, 10, 100
"""Memory in bytes of an integer below 256, which CPython shares, of a list entry, and of a dict or set entry."""

_LENGTH = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_LENGTH |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
_RUNS = {
    ord("K"): (re.compile(rb"(?:K.)++", re.DOTALL), 2, _BYTE),
    ord("M"): (re.compile(rb"(?:M..)++", re.DOTALL), 3, _SCALAR),
    ord("J"): (re.compile(rb"(?:J....)++", re.DOTALL), 5, _SCALAR),
}
"""Consecutive integers, such as token ids, are matched at once: pattern, bytes of one in the pickle, memory of one."""
_FILLING = {"APPEND": 1, "SETITEM": 2, "APPENDS": 0, "SETITEMS": 0, "ADDITEMS": 0}
"""Opcodes that fill a container, with the number of values that they take; 0 for all values above the mark."""
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SHAPES = {
    opcode.name: (
        len(opcode.stack_before),
        len(opcode.stack_after),
        bool(opcode.stack_after) and opcode.stack_after[0].name in ("str", "bytes", "bytearray", "bytes_or_str"),
    )
    for opcode in pickletools.opcodes
}
"""For each opcode: values taken from the stack, values pushed, and whether these are texts or bytes."""


class Excessive(ValueError):
    """The pickle is damaged or exceeds a bound. Callers put the name of the file before the message."""


def scan(
    content: bytes | mmap.mmap,
    start: int = 0,
    *,
    memory: int = MEMORY,
    named: Callable[[str], None] = lambda name: None,
    called: Callable[[str, tuple[Record, ...]], None] = lambda name, arguments: None,
) -> int:
    """Read the opcodes of one pickle and return the offset behind its end.

    Args:
        memory: limit in bytes for its values. Texts and bytes do not count unless a call may copy them.
        named: called with every name that a ``GLOBAL`` opcode imports, as ``module.name``; raises to refuse it.
        called: called with the name and the records of the arguments of every call of an imported name.

    Raises:
        Excessive: the pickle is truncated or damaged, or exceeds a bound.
    """
    return _Scan(content, memory, named, called).run(start)


class _Scan:
    def __init__(
        self,
        content: bytes | mmap.mmap,
        memory: int,
        named: Callable[[str], None],
        called: Callable[[str, tuple[Record, ...]], None],
    ) -> None:
        self._content, self._memory, self._named, self._called = content, memory, named, called
        self._size = len(content)
        self._left = memory
        self._stack: list[Record] = []
        self._marks: list[int] = []
        self._memo: dict[int, Record] = {}

    def run(self, position: int) -> int:
        content, stack, actions = self._content, self._stack, _ACTIONS
        while position < self._size:
            code = content[position]
            if code in _RUNS:
                pattern, width, each = _RUNS[code]
                if found := pattern.match(content, position):
                    count = (found.end() - position) // width
                    position = found.end()
                    self._spend(each * count)
                    stack.extend([0] * count)
                    continue
            if code not in actions:
                raise Excessive(f"byte {position} of the pickle is no opcode")
            name, kind, action = actions[code]
            position += 1
            argument: bytes | int = b""
            if kind is not None:
                argument, position = self._argument(name, kind, position)
            if name == "STOP":
                return position
            action(self, name, argument)
        raise Excessive("the pickle is cut off: it has no end")

    def _argument(self, name: str, kind: int, position: int) -> tuple[bytes | int, int]:
        """Return the argument's bytes, or for long ones their number, and the offset behind it."""
        if kind == pickletools.UP_TO_NEWLINE:
            first = position
            for _ in range(2 if name in ("GLOBAL", "INST") else 1):
                end = self._content.find(b"\n", position)
                if end < 0:
                    raise Excessive("the pickle is cut off within a line")
                position = end + 1
            return self._content[first:position], position
        size = kind
        if kind < 0:
            width = _LENGTH[kind]
            size = int.from_bytes(self._content[position : position + width], "little")
            position += width
        elif name == "FRAME":
            size += int.from_bytes(self._content[position : position + size], "little")
        if size > self._size - position:
            raise Excessive(f"the pickle is cut off: {name} is longer than what is left of it")
        if name == "FRAME":
            return b"", position + kind
        return size if kind < 0 else self._content[position : position + size], position + size

    def _plain(self, name: str, argument: bytes | int) -> None:
        """Handle an opcode that pushes a number, a text or nothing, as described by ``_SHAPES``."""
        taken, made, text = _SHAPES[name]
        if taken:
            self._pop(taken)
        if made:
            self._spend(_CALL if "PERSID" in name else _TEXT if text else _SCALAR)
            length = argument if isinstance(argument, int) else len(argument)
            self._stack.append(float(length) if text else 0)

    def _mark(self, name: str, argument: bytes | int) -> None:
        self._marks.append(len(self._stack))
        self._spend(_SCALAR)

    def _put(self, name: str, argument: bytes | int) -> None:
        index = len(self._memo) if name == "MEMOIZE" else self._index(name, argument)
        # Python's pickler uses consecutive indices; the C unpickler allocates a table up to the largest.
        if index > 2 * len(self._memo) + 1000:
            raise Excessive(f"the pickle has the memo index {index:,} where {len(self._memo):,} values are memoised")
        self._spend(_MEMO)
        self._memo[index] = self._top()

    def _get(self, name: str, argument: bytes | int) -> None:
        self._push(self._memo.get(self._index(name, argument), 0))

    def _move(self, name: str, argument: bytes | int) -> None:
        if name == "DUP":
            self._push(self._top())
        elif name == "POP_MARK" or (self._marks and self._marks[-1] == len(self._stack)):
            self._pop_to_mark()
        else:
            self._pop(1)

    def _import(self, name: str, argument: bytes | int) -> None:
        self._spend(_NAME)
        full = "?"
        if name == "STACK_GLOBAL":
            self._pop(2)
        elif isinstance(argument, bytes) and name in ("GLOBAL", "INST"):
            full = ".".join(argument.decode("utf-8", "replace").split("\n")[:2])
            self._named(full)
        if name == "INST":
            self._pop_to_mark()
            self._spend(_CALL)
        self._stack.append(None if name == "INST" else full)

    def _tuple(self, name: str, argument: bytes | int) -> None:
        items = self._pop_to_mark() if name == "TUPLE" else self._pop(_TUPLES[name])
        weight = len(items) + sum(item[0] for item in items if type(item) is tuple)
        if weight > TUPLE_ITEMS:
            raise Excessive(f"the pickle has a tuple of more than {TUPLE_ITEMS:,} items, with those of tuples in it")
        self._spend(_CONTAINER)
        self._stack.append((weight + 1, *items))

    def _container(self, name: str, argument: bytes | int) -> None:
        items = [] if name.startswith("EMPTY") else self._pop_to_mark()
        self._spend(_ENTRY * len(items) + (_SET if name.endswith("SET") else _CONTAINER))
        self._stack.append([len(items)])

    def _fill(self, name: str, argument: bytes | int) -> None:
        items = self._pop(_FILLING[name]) if _FILLING[name] else self._pop_to_mark()
        self._spend((_IN_LIST if "APPEND" in name else _ENTRY) * len(items))
        target = self._top()
        if type(target) is list:
            target[0] += len(items)

    def _call(self, name: str, argument: bytes | int) -> None:
        if name == "OBJ":
            callee, *arguments = self._pop_to_mark() or [None]
        else:
            callee, *arguments = self._pop(3 if name == "NEWOBJ_EX" else 2)
        self._spend(_CALL + sum(map(self._copied, arguments)))
        if name != "BUILD" and type(callee) is str:
            given = arguments[0][1:] if len(arguments) == 1 and type(arguments[0]) is tuple else tuple(arguments)
            self._called(callee, given)
        self._stack.append(callee if name == "BUILD" else None)

    def _index(self, name: str, argument: bytes | int) -> int:
        assert isinstance(argument, bytes)
        if name not in ("PUT", "GET"):
            return int.from_bytes(argument, "little")
        if not argument[:-1].isdigit():
            raise Excessive("the pickle has a memo index that is no number")
        return int(argument[:20])

    def _copied(self, record: Record) -> int:
        """Return the memory in bytes of a copy of an argument, which a call may make."""
        if type(record) is tuple:
            return sum(map(self._copied, record[1:])) + _SCALAR * int(record[0])
        if type(record) is list:
            return _ENTRY * int(record[0])
        return int(record) if type(record) is float else 0

    def _push(self, record: Record) -> None:
        """Push an existing value; a tuple also costs its hash each time."""
        self._spend(_SCALAR + (8 * record[0] if type(record) is tuple else 0))
        self._stack.append(record)

    def _floor(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _top(self) -> Record:
        if len(self._stack) <= self._floor():
            raise Excessive("the pickle is damaged: it uses a value where there is none")
        return self._stack[-1]

    def _pop(self, count: int) -> list[Record]:
        if len(self._stack) - count < self._floor():
            raise Excessive("the pickle is damaged: it uses a value where there is none")
        popped = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return popped

    def _pop_to_mark(self) -> list[Record]:
        if not self._marks:
            raise Excessive("the pickle is damaged: a mark is missing")
        first = self._marks.pop()
        popped = self._stack[first:]
        del self._stack[first:]
        return popped

    def _spend(self, memory: int) -> None:
        self._left -= memory
        if self._left < 0:
            raise Excessive(
                f"the values of its pickle take more than {self._memory >> 20:,} MiB of memory beside their texts and "
                "bytes: no such file needs as much"
            )


_ACTION_OF: dict[str, Callable[[_Scan, str, bytes | int], None]] = {
    "MARK": _Scan._mark,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Scan._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Scan._get),
    **dict.fromkeys(("POP", "DUP", "POP_MARK"), _Scan._move),
    **dict.fromkeys((*_TUPLES, "TUPLE"), _Scan._tuple),
    **dict.fromkeys(("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"), _Scan._import),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "LIST", "DICT", "FROZENSET"), _Scan._container),
    **dict.fromkeys(_FILLING, _Scan._fill),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "BUILD"), _Scan._call),
}
_ACTIONS = {
    ord(opcode.code): (
        opcode.name,
        None if opcode.arg is None else opcode.arg.n,
        _ACTION_OF.get(opcode.name, _Scan._plain),
    )
    for opcode in pickletools.opcodes
}
"""Opcode to its name, the kind of its argument (:mod:`pickletools`) and the method of the scan."""


def shown(value: object) -> str:
    """Return a value of a pickle for a message: a text shortened to one line, or only the type of other values."""
    return printable(repr(value[:80])) if isinstance(value, str) else f"a {type(value).__name__}"
