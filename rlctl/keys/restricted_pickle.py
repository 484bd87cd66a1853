"""Reading pickles that a file format forces on us, without running anything they say.

This is no wrapper around ``pickle``: a small interpreter builds plain values (dict, list, tuple, set, str, bytes,
numbers) and inert ``Record`` objects. There is no instruction that imports or calls; a "global" is looked up by its
dotted name in a table that the caller gives, and a name that is not in the table is refused. Only the instructions
that protocols 2 to 5 need are known, sizes and nesting are bounded, and keys of dicts are cheap to hash, so that a
hostile stream can neither run code nor eat memory or time out of proportion to its length.

Instruction set: CPython's ``Lib/pickletools.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from rlctl.keys.pickled import Global, Maker, PickleError, Record, record

MAX_PICKLE_BYTES = 2 << 30
MAX_MARKS = 1000
MAX_KEY_PARTS = 64


def load_pickle(
    data: bytes | bytearray,
    allowed: Mapping[str, Maker],
    *,
    where: str,
    opaque: tuple[str, ...] = (),
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value that the pickle ``data`` describes.

    Args:
        allowed: dotted name -> function of ours that gets the constructor's arguments.
        where: how errors name the file.
        opaque: prefixes of dotted names that become inert Records instead of being refused.
        persistent: resolves a persistent id (torch's storages); None refuses them.

    Raises PickleError, naming what was refused.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise PickleError(f"a pickle of {len(data)} bytes is over the limit of {MAX_PICKLE_BYTES}", where=where)
    machine = _Machine(bytes(data), allowed, opaque, persistent, where)
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise PickleError("the pickle is truncated or damaged", where=where) from error


class _Machine:
    def __init__(
        self,
        data: bytes,
        allowed: Mapping[str, Maker],
        opaque: tuple[str, ...],
        persistent: Callable[[Any], Any] | None,
        where: str,
    ) -> None:
        self.data = data
        self.allowed = allowed
        self.opaque = opaque
        self.persistent = persistent
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if self.marks or len(self.stack) != 1:
                    raise self.fault("the pickle ends in the middle")
                return self.stack[0]
            action = table.get(code)
            if action is None:
                raise self.fault(f"pickle instruction 0x{code:02x} is not allowed")
            action(self)

    def fault(self, message: str, fix: str | None = None) -> PickleError:
        return PickleError(f"{message} (byte {self.at})", where=self.where, fix=fix)

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise IndexError
        self.at += count
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at) if b"\n" in self.data[self.at : self.at + 1000] else -1
        if end < 0:
            raise IndexError
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise self.fault("the pickle is nested too deeply")
        self.marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.marks.pop()
        return found

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.fault("a global without a name")
        dotted = f"{module}.{name}"
        make = self.allowed.get(dotted)
        if make is None and any(dotted.startswith(prefix) for prefix in self.opaque):
            make = record(dotted)
        if make is None:
            raise self.fault(
                f"the pickle asks for {dotted!r:.200}, which is not allowed",
                "do not trust this file unless you know why",
            )
        self.stack.append(Global(dotted, make))

    def construct(self, arguments: Any) -> None:
        made = self.stack.pop()
        if not isinstance(made, Global) or not isinstance(arguments, tuple):
            raise self.fault("the pickle calls something that is no allowed class")
        try:
            self.stack.append(made.make(*arguments))
        except PickleError as error:
            raise self.fault(error.message, error.fix) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise self.fault(f"{made.name} with unusable arguments") from error

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict's own attributes mean nothing here
            raise self.fault("the pickle sets the state of something that has none")

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Record) else target
        if not isinstance(items, dict) or len(pairs) % 2:
            raise self.fault("the pickle stores items in something that is no dict")
        for i in range(0, len(pairs), 2):
            items[self.key(pairs[i])] = pairs[i + 1]

    def key(self, value: Any) -> Any:
        """Return ``value`` when it is a cheap dict key: nested tuples would take exponential time to hash."""
        if isinstance(value, str | int | float | bytes | None | Record | Global):
            return value
        if not isinstance(value, tuple) or len(value) > MAX_KEY_PARTS:
            raise self.fault("the pickle uses a key that is no plain value")
        if not all(isinstance(part, str | int | float | bytes | None) for part in value):
            raise self.fault("the pickle uses a key of nested values")
        return value

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(self.key(value) for value in values)
        else:
            raise self.fault("the pickle appends to something that is no list")

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.fault("the pickle refers to nothing")
        self.stack.append(self.memo[index])

    def resolve(self) -> None:
        if self.persistent is None:
            raise self.fault("the pickle refers to data outside itself")
        self.stack.append(self.persistent(self.stack.pop()))

    def newobj_ex(self) -> None:
        keywords, arguments = self.stack.pop(), self.stack.pop()
        if keywords != {}:
            raise self.fault("the pickle gives keyword arguments")
        self.construct(arguments)

    def text(self, size: int) -> None:
        # surrogatepass, because Python writes strings so; such names are refused where they are used
        self.stack.append(self.take(self.number(size)).decode("utf-8", "surrogatepass"))

    def raw(self, size: int) -> None:
        self.stack.append(self.take(self.number(size)))

    def long(self, size: int) -> None:
        self.stack.append(int.from_bytes(self.take(self.number(size)), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError
        parts = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.stack.append(parts)

    def dict_of(self) -> None:
        pairs = self.since_mark()
        self.stack.append({})
        self.set_items(pairs)

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.find(module, name)


_TABLE: dict[int, Callable[[_Machine], Any]] = {
    ord(code): action
    for code, action in {
        "\x80": lambda m: m.take(1),  # PROTO
        "\x95": lambda m: m.take(8),  # FRAME: only a hint for readers
        "(": lambda m: m.mark(),
        "0": lambda m: m.stack.pop() if m.stack else m.since_mark(),  # POP
        "1": lambda m: m.since_mark(),  # POP_MARK
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),  # BININT
        "K": lambda m: m.push(m.number(1)),
        "M": lambda m: m.push(m.number(2)),
        "\x8a": lambda m: m.long(1),
        "\x8b": lambda m: m.long(4),
        "G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        "\x8c": lambda m: m.text(1),
        "X": lambda m: m.text(4),
        "\x8d": lambda m: m.text(8),
        "C": lambda m: m.raw(1),
        "B": lambda m: m.raw(4),
        "\x8e": lambda m: m.raw(8),
        "\x96": lambda m: m.raw(8),  # BYTEARRAY8
        "]": lambda m: m.push([]),
        "a": lambda m: m.extend([m.stack.pop()]),
        "e": lambda m: m.extend(m.since_mark()),
        "l": lambda m: m.push(m.since_mark()),
        ")": lambda m: m.push(()),
        "t": lambda m: m.push(tuple(m.since_mark())),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "}": lambda m: m.push({}),
        "d": lambda m: m.dict_of(),
        "s": lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
        "u": lambda m: m.set_items(m.since_mark()),
        "\x8f": lambda m: m.push(set()),
        "\x90": lambda m: m.extend(m.since_mark()),  # ADDITEMS
        "\x91": lambda m: m.push(frozenset(m.key(v) for v in m.since_mark())),
        "h": lambda m: m.recall(m.number(1)),
        "j": lambda m: m.recall(m.number(4)),
        "q": lambda m: m.remember(m.number(1)),
        "r": lambda m: m.remember(m.number(4)),
        "\x94": lambda m: m.remember(len(m.memo)),
        "c": lambda m: m.find(m.line(), m.line()),
        "\x93": lambda m: m.stack_global(),
        "R": lambda m: m.construct(m.stack.pop()),
        "\x81": lambda m: m.construct(m.stack.pop()),
        "\x92": lambda m: m.newobj_ex(),
        "b": lambda m: m.build(),
        "Q": lambda m: m.resolve(),
    }.items()
}
