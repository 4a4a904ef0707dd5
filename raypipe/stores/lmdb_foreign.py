"""LMDB from other programs, a source of `raypipe convert`, which reads it once, in the order of its keys. Layouts:

image             every value is an encoded image, as in LSUN; the meaning of the keys is unknown
module:function   a user's function (key, value) → {"image": bytes, "label": int, …}, both arguments bytes
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.lookup import import_name
from raypipe.storage.filesystem import explained
from raypipe.stores.lmdb import lmdb_files
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.record import METADATA_KEY, ColumnValues

logger = logging.getLogger(__name__)

# Keys of entries that are metadata, not samples, as StyleGAN2's and BasicSR's tools write them.
_METADATA_KEYS = (b"__keys__", b"__len__", b"__meta__", b"length", b"meta_info.txt", b"num-samples")
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_NUM_TRIED = 16  # first entries, which determine the layout and must contain at least one sample


def foreign_samples(address: str | Path, layout: str = "auto") -> Iterator[ColumnValues]:
    """Yield the samples of an LMDB file or environment folder, or of a folder of `*.lmdb`.

    A sample that is damaged, or not in the layout, is {"image": None}, and a warning names it.

    Args:
        address: see above.
        layout: the name of a layout; "auto" = detected.
    """
    for listed in lmdb_files(str(Path(address).absolute())):
        with explained(StoreError, f"{listed.address} cannot be read"):
            yield from _samples(LMDBFile(listed.address), layout)


def _samples(file: LMDBFile, layout: str) -> Iterator[ColumnValues]:
    if file.get(METADATA_KEY) is not None:
        raise StoreError(
            f"{file.path} was written by raypipe: convert it without a layout, and separately from foreign files"
        )
    layout = _recognized(file) if layout == "auto" else layout
    parse = _parser(layout)
    num = num_bad = 0
    for key, value in _entries(file):
        num += 1
        try:
            if value is None:
                raise ValueError("the entry is damaged")
            sample = parse(key, value)
        except ValueError as error:
            reason = f"at key {key[:40]!r}: {error}"
            logger.warning("%s has a bad sample %s", file.path, reason)
            sample, num_bad = {"image": None}, num_bad + 1
            if num_bad == num == _NUM_TRIED:
                break
        yield sample
    if not num:
        raise StoreError(f"{file.path} has no samples: {file.num_entries} keys")
    if num_bad == num:
        raise StoreError(f"{file.path} is not in the layout {layout}: {reason}")


def _entries(file: LMDBFile) -> Iterator[tuple[bytes, memoryview | None]]:
    return (entry for entry in file.entries() if entry[0] not in _METADATA_KEYS)


def _recognized(file: LMDBFile) -> str:
    """Return the layout of a file; raise StoreError if the user must name it."""
    entries = [(key, bytes(value or b"")[:16]) for key, value in itertools.islice(_entries(file), _NUM_TRIED)]
    if 4 * sum(_is_image(value) for _, value in entries) >= 3 * len(entries):  # a quarter may be damaged
        return "image"
    shown = "; ".join(f"{key[:40]!r}: {value!r}" for key, value in entries[:2])
    raise StoreError(
        f"{file.path} has no __raypipe__ record, and its values are not images ({shown}): name its layout. "
        "--layout module:function names your own function, which makes a sample from a key and a value"
    )


def _is_image(start: bytes) -> bool:
    return start.startswith(_MAGICS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


def _parser(layout: str) -> Callable[[bytes, memoryview], ColumnValues]:
    """Return a function that makes a sample from a key and a value; it raises ValueError for an invalid pair."""
    if layout == "image":
        return lambda _, value: {"image": bytes(value)}
    if ":" not in layout:
        raise StoreError(f"layout must be auto, image or module:function, got {layout!r}")
    function = import_name(layout, "layout")

    def parse(key: bytes, value: memoryview) -> ColumnValues:
        try:
            sample = function(key, bytes(value))
        except Exception as error:  # a damaged value may raise anything in a user's function
            raise ValueError(f"{layout} raised {type(error).__name__}: {error}") from error
        if not isinstance(sample, dict) or "image" not in sample:
            raise ValueError(f"{layout} must return a dict with an image, got {sample!r:.200}")
        return sample

    return parse
