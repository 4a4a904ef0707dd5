"""What the entries of an LMDB file mean that others wrote: where the images are, and their labels.

image        every value is an encoded image, as in LSUN; what the keys say is unknown
scene-text   image-000000001, …, with its text at label-000000001, and num-samples (CRNN, ASTER, PARSeq)
pickle       every value is a pickled (image, label), as Efficient-PyTorch's folder2lmdb writes it; read by
             raypipe.stores.plain_pickle, and only where it is asked for
module:function   yours: (key, value) → {"image": bytes, "label": int, …}, both arguments bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from raypipe.errors import StoreError
from raypipe.lookup import import_name
from raypipe.stores.lmdb_entries import Entries
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.plain_pickle import loads
from raypipe.stores.record import check_column_types

Sample = dict[str, Any]
T = TypeVar("T")

# Entries that tell of the others: what folder2lmdb, the scene-text tools, StyleGAN2's and BasicSR's write.
_ABOUT_ALL = (b"__keys__", b"__len__", b"__meta__", b"length", b"num-samples", b"meta_info.txt")
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_NUM_TRIED = 16
_TYPES = {int: "int64", float: "float64", bytes: "binary", str: "string"}


@dataclass(frozen=True)
class Layout:
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

    def sample(self, index: int) -> Sample:
        """Return the sample at a place, with all columns, of the right types.

        Raises:
            ValueError, StoreError: it is damaged, or no sample of this layout.
            OSError: the file cannot be read.
        """
        return self.checked(*self.entries.at(index))

    def checked(self, key: bytes, value: memoryview) -> Sample:
        """`sample`, of an entry."""
        sample = self.parse(key, value)
        return {name: _checked(sample, name, kind) for name, kind in self.types.items()}


def layout_of(file: LMDBFile, name: str) -> Layout:
    """Find out, or take from its name, how a file is read.

    Args:
        file: without a record of raypipe's own.
        name: "auto", or a layout's.

    Raises:
        StoreError: the file is damaged, or in none of the layouts, or not in the one that is named.
        ConfigError: `module:function` cannot be imported.
    """
    entries = Entries(file, without=_ABOUT_ALL)
    if not len(entries):
        raise StoreError(f"{file.path} holds no samples: {file.num_entries} keys, none of them a sample's")
    if name == "auto":
        name = _recognized(file, entries)
    if name == "image":
        return Layout(name, entries, {"image": "binary"}, lambda _, value: {"image": bytes(value)})
    if name == "scene-text":
        types = {"image": "binary", "text": "string"}
        pictures = Entries(file, b"image-")
        if not len(pictures):
            raise StoreError(f"{file.path} holds no key that begins with image-, as scene-text has them")
        return Layout(name, pictures, types, lambda key, value: _with_text(file, key, value))
    parse: Callable[[bytes, memoryview], Sample]
    if name == "pickle":
        types, parse = {"image": "binary", "label": "int64"}, _from_pickle
    else:
        parse = _from_function(name)
        types = _first(file, entries, name, lambda key, value: _types_of(parse(key, value)))
    layout = Layout(name, entries, types, parse)
    _first(file, entries, name, layout.checked)
    return layout


def _recognized(file: LMDBFile, entries: Entries) -> str:
    if file.num_entries > len(entries) and _starts(file, b"image-000000001"):
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


def _starts(file: LMDBFile, key: bytes) -> bool:
    try:
        value = file.get(key)
    except StoreError:
        return True  # it is there, and damaged
    return value is not None


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
        text = file.get(b"label-" + key.removeprefix(b"image-"))
        return {"image": bytes(value), "text": None if text is None else bytes(text).decode()}
    except (UnicodeDecodeError, StoreError):
        return {"image": bytes(value), "text": None}


def _from_pickle(_: bytes, value: memoryview) -> Sample:
    found = loads(bytes(value))
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
