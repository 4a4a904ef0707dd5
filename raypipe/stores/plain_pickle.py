"""Plain data out of a pickle, by a machine that knows of nothing else.

A pickle is a program, and `pickle.loads` runs it: it may name any function and call it. Here are the
instructions that make numbers, text, bytes, tuples, lists and dicts; every other one is refused before anything
comes of it. So nothing is imported, nothing is called, and nothing is made that is larger than the pickle says
it in full.
"""

from __future__ import annotations

import pickletools
from typing import Any

_MAX_INSTRUCTIONS = 10_000  # an image and what belongs to it take about ten

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_PYTHON_2_BYTES = {"SHORT_BINSTRING", "BINSTRING"}  # which pickletools decodes
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}


def loads(data: bytes) -> Any:
    """Return what a pickle of protocol 2 or later holds.

    Raises:
        ValueError: it is damaged, holds more than plain data, or is a program of more than 10,000 instructions.
    """
    try:
        return _run(data)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it is no pickle that Python makes: {type(error).__name__}: {error}") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if number >= _MAX_INSTRUCTIONS:
            raise ValueError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        name = instruction.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PYTHON_2_BYTES:
            stack.append(argument.encode("latin-1"))
        elif name == "BYTEARRAY8":
            stack.append(bytes(argument))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _PUTS:
            memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name in _TUPLES:
            num = _TUPLES[name]
            if len(stack) < num:
                raise ValueError(f"{name} of {len(stack)} values")
            stack[-num:] = [tuple(stack[-num:])]
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(_since_mark(stack, marks)))
        elif name == "APPEND":
            value = stack.pop()
            _of_kind(stack, list).append(value)
        elif name == "APPENDS":
            values = _since_mark(stack, marks)
            _of_kind(stack, list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack, marks)
            for key, value in zip(values[::2], values[1::2], strict=True):
                if not isinstance(key, str | bytes | int):  # the hash of a tuple goes as deep as the tuple does
                    raise ValueError(f"a key of a dict is {type(key).__name__}")
                _of_kind(stack, dict)[key] = value
        elif name not in ("PROTO", "FRAME", "STOP"):
            what = f"{name} {argument!s:.80}" if argument is not None else name
            raise ValueError(f"it holds more than plain data ({what}), which is not unpickled")
    if len(stack) != 1:
        raise ValueError(f"it leaves {len(stack)} values")
    return stack[0]


def _since_mark(stack: list[Any], marks: list[int]) -> list[Any]:
    start = marks.pop()
    values = stack[start:]
    del stack[start:]
    return values


def _of_kind(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"{type(stack[-1]).__name__} in place of {kind.__name__}")
    return stack[-1]
