"""Facts about a Dataset that decide its items, part by part: its length, its code, and the values in its pickle.

Two processes that make the same Dataset find the same facts, whichever objects it shares, and in whatever order
its sets are.
"""

from __future__ import annotations

import hashlib
import pickle
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.importing import is_of, is_own_code
from raypipe.transform.nest import bytes_of, bytes_of_tensor
from raypipe.transform.reach import is_generator, is_own_class
from raypipe.transform.user_code import contents

_DIGEST_BYTES = 16
# Parts as large as this are named, since each actor holds them.
LARGE_BYTES = 64 << 20


class Part:
    """The hash and the size of one part of a Dataset, as it is pickled into this file."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.num_bytes = 0

    def write(self, content: Any) -> int:
        """Add bytes, as a file."""
        num_bytes = memoryview(content).nbytes
        self._hash.update(content)
        self.num_bytes += num_bytes
        return num_bytes

    def digest(self) -> str:
        """Return 32 hex digits."""
        return self._hash.hexdigest()


class _Hasher(pickle.Pickler):
    """Pickles a value into a hash, with code by what it does, and arrays by their values."""

    def __init__(self, part: Part) -> None:
        # numbers and texts only refer to others by what they are
        super().__init__(part, protocol=5)
        self.fast = True
        self._part = part
        # a method that calls super() closes over its class
        self._code = set[int]()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, str | int | float):  # most are
            return None
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            num_bytes = self._part.write(bytes_of(value))
            return "array", value.dtype.str, value.shape, num_bytes
        if isinstance(value, set | frozenset):
            return "set", sorted(map(_hash_of, value))
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if is_generator(value):
            # its state decides nothing, since it is set for each item
            return "generator", type(value).__qualname__
        if is_of(value, "torch", "Tensor"):
            num_bytes = self._part.write(bytes_of_tensor(value))
            return "tensor", str(value.dtype), tuple(value.shape), num_bytes
        if not isinstance(value, type | types.FunctionType):
            return None
        if id(value) in self._code:
            return "code", value.__qualname__
        self._code.add(id(value))
        if isinstance(value, type):
            return "class", *_facts_of_class(value)
        return "function", *_facts_of_function(value)


def facts_of_dataset(dataset: Any) -> dict[str, Part]:
    """Return the parts of a Dataset that decide its items, by name.

    Raises:
        ConfigError: a part cannot be sent to another process, such as an open file.
    """
    name = type(dataset).__qualname__
    parts = {"len": part_of("len", len(dataset)), name: part_of(name, type(dataset))}
    try:
        members = vars(dataset)
    except TypeError:  # a list, an array, …
        return parts | {"items": part_of("items", dataset)}
    state = dataset.__getstate__()
    if isinstance(state, dict):
        # a class may leave out what it opens again
        members = state
    return parts | {member: part_of(member, value) for member, value in members.items()}


def part_of(name: str, value: Any) -> Part:
    """Return the hash and size of a part; raises ConfigError as `facts_of_dataset`."""
    part = Part()
    try:
        _Hasher(part).dump(value)
    except ConfigError as error:
        raise ConfigError(f"its {name} holds {error}") from None
    except (RecursionError, ValueError):
        # it refers to itself
        part.write(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    except Exception as error:
        raise ConfigError(
            f"its {name} cannot be sent to the actors ({type(error).__name__}: {error}): let it make what does "
            "not pickle, such as an open file, an LMDB or a lock, at its first use, or give the Dataset as "
            "'module:function', which each actor calls"
        ) from error
    return part


def _hash_of(value: Any) -> str:
    part = Part()
    _Hasher(part).dump(value)
    return part.digest()


def _facts_of_function(function: types.FunctionType) -> Iterator[Any]:
    """The name of a function, and for the code of a user its code, its defaults and its closure."""
    yield function.__qualname__
    code = function.__code__
    if not is_own_code(code.co_filename):
        yield function.__module__
        return
    yield from _facts_of_code(code)
    yield function.__defaults__
    yield function.__kwdefaults__
    yield from contents(function)


def _facts_of_code(code: types.CodeType) -> Iterator[Any]:
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _facts_of_code(constant)
        else:
            yield constant


def _facts_of_class(kind: type) -> Iterator[Any]:
    """The name of a class, and for the code of a user its methods, its values and its bases."""
    yield kind.__qualname__
    if not is_own_class(kind):
        yield kind.__module__
        return
    yield from kind.__mro__[1:]
    for name, member in sorted(vars(kind).items()):
        member = getattr(member, "__func__", member)
        if isinstance(member, property):
            member = member.fget
        is_plain = isinstance(member, str | int | float | tuple | types.FunctionType)
        if is_plain and name not in ("__module__", "__doc__", "__qualname__"):
            yield name
            yield member
