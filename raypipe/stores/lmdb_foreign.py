"""One LMDB file that others wrote, opened for reading: where the images are, and their labels. Layouts:

image        every value is an encoded image, as in LSUN; what the keys say is unknown
scene-text   image-000000001, …, with its text at label-000000001, and num-samples (CRNN, ASTER, PARSeq)
pickle       every value is a pickled (image, label), as Efficient-PyTorch's folder2lmdb writes it; read as plain
             data, see `loads`, and only where it is asked for
module:function   yours: (key, value) → {"image": bytes, "label": int, …}, both arguments bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import pickletools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raypipe.errors import StoreError
from raypipe.lookup import import_name
from raypipe.storage.filesystem import explained
from raypipe.stores.base import part_of
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.lmdb_shard import data_file
from raypipe.stores.record import check_column_types

_NUM_HASHED = 64  # samples whose values are hashed
Sample = dict[str, Any]
Parse = Callable[[bytes, memoryview], Sample]
"""Of a key and a value; raises ValueError or StoreError where they are no sample."""
T = TypeVar("T")

# Entries that tell of the others: what folder2lmdb, the scene-text tools, StyleGAN2's and BasicSR's write.
_ABOUT_ALL = (b"__keys__", b"__len__", b"__meta__", b"length", b"meta_info.txt", b"num-samples")
# Bounds of the keys of samples, see `Entries`: the next key after k is k and a zero; no key is a page long.
_SAMPLES = (b"", *(bound for key in _ABOUT_ALL for bound in (key, key + b"\0")), b"\xff" * 32_768)
_PICTURES = (b"image-", b"image.")
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_PROTOCOLS = [bytes([protocol]) for protocol in range(2, 6)]  # of pickle: the second byte
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
        with explained(StoreError, f"{path} cannot be read"):
            self._entries = Entries(self._file, _SAMPLES)
            if not len(self._entries):
                raise StoreError(f"{path} holds no samples: {self._file.num_entries} keys, none a sample's")
            self._layout = self._recognized() if layout == "auto" else layout
            types: dict[str, str] | None = {"image": "binary"}
            if self._layout == "image":
                self._parse: Parse = lambda _, value: {"image": bytes(value)}
            elif self._layout == "scene-text":
                types, self._parse = {"image": "binary", "text": "string"}, self._with_text
                self._entries = Entries(self._file, _PICTURES)
                if not len(self._entries):
                    raise StoreError(f"{path} holds no key that begins with image-, as scene-text has them")
            elif self._layout == "pickle":
                types, self._parse = {"image": "binary", "label": "int64"}, _from_pickle
            else:
                types, self._parse = None, _from_function(self._layout)
            self.types = types or self._first(lambda key, value: _types_of(self._parse(key, value)))
            self._first(self._sample)
        self.count = len(self._entries)

    def _recognized(self) -> str:
        has_others = self._file.num_entries > len(self._entries)
        if has_others and len(Entries(self._file, (b"image-000000001", b"image-000000001\0"))):
            return "scene-text"
        found = list(self._some())
        kinds = [_kind_of(bytes(value[:12])) for _, value in found]
        # A few may be damaged.
        most = next((kind for kind in ("image", "pickle") if 4 * kinds.count(kind) >= 3 * max(1, len(kinds))), "")
        if most == "image":
            return most
        advice = "or name a function of yours that makes a sample of a key and a value: layout module:function"
        if most == "pickle":
            raise StoreError(
                f"{self.path} holds pickled values, which can be programs, and are not unpickled by default. If "
                "they are (image, label), as Efficient-PyTorch writes them, layout pickle reads them, plain data "
                f"alone (--store.layout pickle; raypipe ingest --layout pickle); {advice}"
            )
        shown = "; ".join(f"{key[:40]!r}: {bytes(value[:16])!r}" for key, value in found[:2]) or "unreadable"
        raise StoreError(
            f"{self.path} has no __raypipe__ record, and its values are no images ({shown}): its layout is not "
            f"known. Ingest it from its source, {advice}"
        )

    def _some(self, most: int = _NUM_TRIED) -> Iterator[tuple[bytes, memoryview]]:
        """Entries from everywhere in the file, those left out that damage has made unreadable."""
        for index in np.unique(np.linspace(0, len(self._entries) - 1, most).astype(int)).tolist():
            try:
                yield self._entries.at(index)
            except StoreError:
                continue

    def _first(self, make: Callable[[bytes, memoryview], T]) -> T:
        """What is made of the first entry that it can be made of."""
        reason: object = "no value can be read"
        for key, value in self._some():
            try:
                return make(key, value)
            except (ValueError, StoreError) as error:
                reason = f"at key {key[:40]!r}: {error}"
        raise StoreError(f"{self.path} is not in the layout {self._layout}: {reason}")

    def _sample(self, key: bytes, value: memoryview) -> Sample:
        """The sample of an entry, with all columns, of the right types; raises as `Parse` does."""
        sample = self._parse(key, value)
        return {name: _checked(sample, name, kind) for name, kind in self.types.items()}

    def _with_text(self, key: bytes, value: memoryview) -> Sample:
        try:
            found = self._file.get(b"label-" + key.removeprefix(b"image-"))
            text = None if found is None else bytes(found).decode()
        except (UnicodeDecodeError, StoreError):
            text = None
        return {"image": bytes(value), "text": text}

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the layout, all keys and the lengths of their values, and the samples' values, of 64 of them.

        A copy that was compacted has the same. It takes about five microseconds per key.
        """
        digest = hashlib.blake2b(repr((self._layout, self.types)).encode(), digest_size=16)
        with explained(StoreError, f"{self.path} cannot be read"):
            for number, _ in self._file.leaves():
                entries = self._file.leaf(number)
                digest.update(b"".join(b"%d:%b%d;" % (len(key), key, length) for key, length in entries))
            for _, value in self._some(_NUM_HASHED):
                digest.update(value)
        return digest.hexdigest()

    def key(self, number: int) -> str:
        """That of a sample, for errors."""
        return self._entries.at(number)[0].decode(errors="backslashreplace")

    def read_into(
        self, rows: list[dict[str, Any]], positions: list[int], keys: list[int], columns: tuple[str, ...]
    ) -> None:
        """See `Shard.read_into`."""
        with explained(StoreError, f"{self.path} cannot be read"):
            for position, key in zip(positions, keys, strict=True):
                with contextlib.suppress(StoreError, ValueError):  # a bad sample
                    rows[position] = self._sample(*self._entries.at(key))


class Entries:
    """Entries of a file by their place in the order of its keys, where the keys themselves tell nothing.

    Held are the leaf pages and how many entries each has, 16 bytes for some seventy keys: three million images,
    the largest class of LSUN, are 700 KB and a third of a second, so each process makes this index for itself.

    Args:
        file: the file; what is damaged in it raises StoreError.
        bounds: of the keys that count: from the first to below the second, from the third to below the fourth, …
    """

    def __init__(self, file: LMDBFile, bounds: Sequence[bytes]) -> None:
        self._file = file
        leaves = np.array(list(file.leaves()), np.int64).reshape(-1, 2)
        self._pages, self._offsets = leaves[:, 0], np.cumsum([0, *leaves[:, 1]])
        self._starts, stops = np.array([self._rank(key) for key in bounds]).reshape(-1, 2).T
        if (stops < self._starts).any():
            raise StoreError(f"{file.path} is damaged: its keys do not ascend; copy or ingest it again")
        self._counts = np.cumsum([0, *(stops - self._starts)])

    def __len__(self) -> int:
        return int(self._counts[-1])

    def at(self, index: int) -> tuple[bytes, memoryview]:
        """Return the key and the value of an entry; raises as `LMDBFile.entry` does."""
        part, within = part_of(self._counts, index)
        leaf, slot = part_of(self._offsets, int(self._starts[part]) + within)
        return self._file.entry(int(self._pages[leaf]), slot)

    def _rank(self, key: bytes) -> int:
        """How many of the file's keys are below this one."""
        after = bisect_left(range(len(self._pages)), key, key=lambda leaf: self._keys(leaf)[0])
        if after == 0:
            return 0
        return int(self._offsets[after - 1]) + bisect_left(self._keys(after - 1), key)

    def _keys(self, leaf: int) -> list[bytes]:
        return [key for key, _ in self._file.leaf(int(self._pages[leaf]))]


def _kind_of(start: bytes) -> str:
    """What a value that begins so is: "image", "pickle", or "" for anything else."""
    if start.startswith(_MAGICS) or (start[:4] == b"RIFF" and start[8:] == b"WEBP"):
        return "image"
    return "pickle" if start[:1] == b"\x80" and start[1:2] in _PROTOCOLS else ""


def _from_pickle(_: bytes, value: memoryview) -> Sample:
    found = loads(value)
    if isinstance(found, dict):
        return found
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"it is a pickled {type(found).__name__}, not (image, label)")
    return {"image": found[0], "label": found[1]}


def _from_function(name: str) -> Parse:
    if ":" not in name:
        raise StoreError(f"layout {name!r} is none of: auto, image, scene-text, pickle, module:function")
    function = import_name(name, "layout")

    def parse(key: bytes, value: memoryview) -> Sample:
        try:
            sample = function(key, bytes(value))
        except Exception as error:  # whatever a damaged value makes of it
            raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(sample, dict) or "image" not in sample:
            raise ValueError(f"it returned no sample with an image, but {sample!r:.200}")
        return sample

    return parse


def _types_of(sample: Sample) -> dict[str, str]:
    types = {name: _TYPES.get(type(value), str(type(value))) for name, value in sample.items()}
    check_column_types(types)
    return types


def _checked(sample: Sample, name: str, kind: str) -> Any:
    if name not in sample:
        raise ValueError(f"it has no {name}")
    value = sample[name]
    if value is None and kind in ("binary", "string"):
        return None
    if _TYPES.get(type(value)) != kind or (kind == "int64" and not -(1 << 63) <= value < 1 << 63):
        raise ValueError(f"its {name} is {type(value).__name__}, not {kind}")
    return value


_MAX_INSTRUCTIONS = 10_000  # an image and what belongs to it take about ten
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
# Those that make plain data; also bytes of Python 2, and what only frames them.
_PLAIN = """
    PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 SHORT_BINSTRING BINSTRING
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
"""
_PLAIN_NAMES = frozenset(_PLAIN.split())


def loads(data: bytes | memoryview) -> Any:
    """Return what a pickle of protocol 2 or later holds, if it is plain data.

    A pickle is a program, and `pickle.loads` runs it: it may name any function and call it. So its instructions
    are looked at first, and it is run only where all of them make numbers, text, bytes, tuples, lists and dicts,
    which imports nothing and calls nothing.

    Raises:
        ValueError: it is damaged, holds more than plain data, or is a program of more than 10,000 instructions.
    """
    data, names = bytes(data), set[str]()
    try:
        for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            name = instruction.name
            names.add(name)
            if name not in _PLAIN_NAMES:
                raise ValueError(f"it holds more than plain data ({name}), which is not unpickled")
            # `pickle.loads` makes room for a memo of any size that is named.
            if number > _MAX_INSTRUCTIONS or (name == "LONG_BINPUT" and int(argument or 0) > _MAX_INSTRUCTIONS):
                raise ValueError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        if names & _TUPLES and names & {"SETITEM", "SETITEMS"} and names & {"BINGET", "LONG_BINGET"}:
            # A key of forty tuples, each of which has the one before it twice, takes for ever to be hashed.
            raise ValueError("it holds dicts, tuples, and values that repeat, which together are not unpickled")
        return pickle.loads(data, encoding="bytes")
    except ValueError:
        raise
    except Exception as error:  # damage makes it raise anything
        raise ValueError(f"it is no pickle that Python makes: {type(error).__name__}: {error}") from None
