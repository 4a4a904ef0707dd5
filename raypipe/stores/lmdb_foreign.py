"""One LMDB file that others wrote, opened for reading: where the images are, and their labels. Layouts:

image        every value is an encoded image, as in LSUN; what the keys say is unknown
scene-text   image-000000001, …, with its text at label-000000001, and num-samples (CRNN, ASTER, PARSeq)
pickle       every value is a pickled (image, label), as Efficient-PyTorch's folder2lmdb writes it; read as plain
             data, see `loads`, and only where it is asked for
module:function   yours: (key, value) → {"image": bytes, "label": int, …}, both arguments bytes
"""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raypipe.errors import StoreError
from raypipe.lookup import import_name
from raypipe.stores.lmdb_entries import Entries
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.lmdb_shard import data_file
from raypipe.stores.record import check_column_types

_NUM_HASHED = 64  # samples whose values are hashed
Sample = dict[str, Any]
T = TypeVar("T")

# Entries that tell of the others: what folder2lmdb, the scene-text tools, StyleGAN2's and BasicSR's write.
_ABOUT_ALL = (b"__keys__", b"__len__", b"__meta__", b"length", b"num-samples", b"meta_info.txt")
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_NUM_TRIED = 16
_TYPES = {int: "int64", float: "float64", bytes: "binary", str: "string"}


class ForeignShard:
    """What a `Shard` is, of a file without a record of raypipe's own. Samples are in the order of their keys.

    Args:
        path: the file, or the environment's folder.
        layout: "auto", or a layout's name.

    Raises:
        StoreError: the file is missing or damaged, or its layout is not known, or not the one named.
        ConfigError: a function of the user's cannot be imported.
    """

    classes: tuple[str, ...] | None = None

    def __init__(self, path: Path | str, layout: str = "auto") -> None:
        self.path = path
        self._file = LMDBFile(data_file(path))
        try:
            self._layout = _layout_of(self._file, layout)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        self.types, self.count = self._layout.types, len(self._layout.entries)

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the layout, all keys and the lengths of their values, and the samples' values, of 64 of them.

        A copy that was compacted has the same. It takes about five microseconds per key.
        """
        digest = hashlib.blake2b(repr((self._layout.name, self.types)).encode(), digest_size=16)
        try:
            for number, _ in self._file.leaves():
                entries = self._file.leaf(number)
                digest.update(b"".join(b"%d:%b%d;" % (len(key), key, length) for key, length in entries))
            for index in np.unique(np.linspace(0, self.count - 1, _NUM_HASHED).astype(int)).tolist():
                try:
                    digest.update(self._layout.entries.at(index)[1])
                except StoreError:
                    digest.update(b"damaged")
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from error
        return digest.hexdigest()

    def key(self, number: int) -> str:
        """That of a sample, for errors.

        Raises:
            StoreError, OSError: it cannot be read.
        """
        return self._layout.entries.at(number)[0].decode(errors="backslashreplace")

    def read_into(
        self, rows: list[dict[str, Any]], positions: list[int], keys: list[int], columns: tuple[str, ...]
    ) -> None:
        """Set rows[positions[i]] to sample keys[i]; one that is damaged leaves its row as it is.

        Raises:
            StoreError: the file cannot be read at all.
        """
        for position, key in zip(positions, keys, strict=True):
            try:
                rows[position] = self._layout.sample(*self._layout.entries.at(key))
            except (StoreError, ValueError):
                continue  # a bad sample
            except OSError as error:
                raise StoreError(f"{self.path} cannot be read at sample {key}: {error}") from error


@dataclass(frozen=True)
class _Layout:
    """How a file is read.

    Attributes:
        name: "image", "scene-text", "pickle" or `module:function`.
        entries: those that are samples.
        types: columns, name → one of `raypipe.stores.record.COLUMN_TYPES`.
        parse: (key, value) → a sample; raises ValueError or StoreError where there is none.
    """

    name: str
    entries: Entries
    types: dict[str, str]
    parse: Callable[[bytes, memoryview], Sample]

    def sample(self, key: bytes, value: memoryview) -> Sample:
        """The sample of an entry, with all columns, of the right types; raises as `parse` does."""
        sample = self.parse(key, value)
        return {name: _checked(sample, name, kind) for name, kind in self.types.items()}


def _layout_of(file: LMDBFile, name: str) -> _Layout:
    """Find out, or take from its name, how a file is read."""
    entries = Entries(file, without=_ABOUT_ALL)
    if not len(entries):
        raise StoreError(f"{file.path} holds no samples: {file.num_entries} keys, none of them a sample's")
    if name == "auto":
        name = _recognized(file, entries)
    if name == "image":
        return _Layout(name, entries, {"image": "binary"}, lambda _, value: {"image": bytes(value)})
    if name == "scene-text":
        types = {"image": "binary", "text": "string"}
        pictures = Entries(file, b"image-")
        if not len(pictures):
            raise StoreError(f"{file.path} holds no key that begins with image-, as scene-text has them")
        return _Layout(name, pictures, types, lambda key, value: _with_text(file, key, value))
    parse: Callable[[bytes, memoryview], Sample]
    if name == "pickle":
        types, parse = {"image": "binary", "label": "int64"}, _from_pickle
    else:
        parse = _from_function(name)
        types = _first(file, entries, name, lambda key, value: _types_of(parse(key, value)))
    layout = _Layout(name, entries, types, parse)
    _first(file, entries, name, layout.sample)
    return layout


def _recognized(file: LMDBFile, entries: Entries) -> str:
    if file.num_entries > len(entries):
        try:
            if file.get(b"image-000000001") is not None:
                return "scene-text"
        except StoreError:  # it is there, and damaged
            return "scene-text"
    found = list(_some(entries))
    if _most(_is_image(value) for _, value in found):
        return "image"
    advice = "or name a function of yours that makes a sample of a key and a value: layout module:function"
    if _most(len(value) > 1 and value[0] == 0x80 and 2 <= value[1] <= 5 for _, value in found):
        raise StoreError(
            f"{file.path} holds pickled values, which can be programs, and are not unpickled by default. If they "
            "are (image, label), as Efficient-PyTorch writes them, layout pickle reads them, plain data alone "
            f"(--store.layout pickle; raypipe ingest --layout pickle); {advice}"
        )
    shown = "; ".join(f"{key[:40]!r}: {bytes(value[:16])!r}" for key, value in found[:2]) or "unreadable"
    raise StoreError(
        f"{file.path} has no __raypipe__ record, and its values are no images ({shown}): its layout is not known. "
        f"Ingest it from its source, {advice}"
    )


def _some(entries: Entries) -> Iterator[tuple[bytes, memoryview]]:
    """Entries from everywhere in the file, those left out that damage has made unreadable."""
    for index in np.unique(np.linspace(0, len(entries) - 1, _NUM_TRIED).astype(int)).tolist():
        try:
            yield entries.at(index)
        except StoreError:
            continue


def _is_image(value: memoryview) -> bool:
    start = bytes(value[:12])
    return start.startswith(_MAGICS) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")


def _with_text(file: LMDBFile, key: bytes, value: memoryview) -> Sample:
    try:
        found = file.get(b"label-" + key.removeprefix(b"image-"))
        text = None if found is None else bytes(found).decode()
    except (UnicodeDecodeError, StoreError):
        text = None
    return {"image": bytes(value), "text": text}


def _from_pickle(_: bytes, value: memoryview) -> Sample:
    found = loads(value)
    if isinstance(found, dict):
        return found
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"it is a pickled {type(found).__name__}, not (image, label)")
    return {"image": found[0], "label": found[1]}


def _from_function(name: str) -> Callable[[bytes, memoryview], Sample]:
    if ":" not in name:
        raise StoreError(f"layout {name!r} is none of: auto, image, scene-text, pickle, module:function")
    function = import_name(name, "layout")

    def parse(key: bytes, value: memoryview) -> Sample:
        try:
            return function(key, bytes(value))
        except Exception as error:  # whatever a damaged value makes of it
            raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error

    return parse


def _types_of(sample: Any) -> dict[str, str]:
    """The columns of a sample, as a function of the user's has made it."""
    if not isinstance(sample, dict) or "image" not in sample:
        raise ValueError(f"it returned no sample with an image, but {sample!r:.200}")
    types = {name: _TYPES.get(type(value), str(type(value))) for name, value in sample.items()}
    check_column_types(types)
    return types


def _first(file: LMDBFile, entries: Entries, name: str, make: Callable[[bytes, memoryview], T]) -> T:
    """What is made of the first entry that it can be made of."""
    reason: object = "no value can be read"
    for key, value in _some(entries):
        try:
            return make(key, value)
        except (ValueError, StoreError) as error:
            reason = f"at key {key[:40]!r}: {error}"
    raise StoreError(f"{file.path} is not in the layout {name}: {reason}")


def _most(found: Iterable[bool]) -> bool:
    """Whether at least three quarters are true: a few may be damaged."""
    values = list(found)
    return bool(values) and 4 * sum(values) >= 3 * len(values)


def _checked(sample: Any, name: str, kind: str) -> Any:
    try:
        value = sample[name]
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"it has no {name}") from None
    if value is None and kind in ("binary", "string"):
        return None
    if _TYPES.get(type(value)) != kind or (kind == "int64" and not -(1 << 63) <= value < 1 << 63):
        raise ValueError(f"its {name} is {type(value).__name__}, not {kind}")
    return value


_MAX_INSTRUCTIONS = 10_000  # an image and what belongs to it take about ten
# Those that make plain data; also bytes of Python 2, and what only frames them.
_PLAIN = """
    PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 SHORT_BINSTRING BINSTRING
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
"""
_PLAIN_NAMES = frozenset(_PLAIN.split())
_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}


def loads(data: bytes | memoryview) -> Any:
    """Return what a pickle of protocol 2 or later holds, if it is plain data.

    A pickle is a program, and `pickle.loads` runs it: it may name any function and call it. Here only the
    instructions run that make numbers, text, bytes, tuples, lists and dicts; every other one is refused before
    anything comes of it. So nothing is imported, and nothing is called. Python's own machine in Python runs them:
    that in C makes room for a memo of any size which the pickle names.

    Raises:
        ValueError: it is damaged, holds more than plain data, or is a program of more than 10,000 instructions.
    """
    machine: Any = pickle._Unpickler(io.BytesIO(data), encoding="bytes")
    machine.dispatch = _PlainInstructions(machine.dispatch)
    try:
        found = machine.load()
    except ValueError:
        raise
    except Exception as error:  # damage makes it raise anything
        raise ValueError(f"it is no pickle that Python makes: {type(error).__name__}: {error}") from None
    if machine.stack or machine.metastack:
        raise ValueError("it leaves several values")
    return found


class _PlainInstructions:
    """The table of instructions by which the machine runs; counts them."""

    def __init__(self, table: dict[int, Any]) -> None:
        self._table, self._num_left = table, _MAX_INSTRUCTIONS

    def __getitem__(self, code: int) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        name = _NAMES.get(code, f"{code:#04x}")
        if name not in _PLAIN_NAMES:
            raise ValueError(f"it holds more than plain data ({name}), which is not unpickled")
        return self._table[code]
