"""Listing of an LMDB file that another program wrote: the keys of its samples, in their order, and their labels.

A large file is listed once per node: the listing stays in the node's cache, and all processes map it.

    RAYPIPE_CACHE/lmdb/KEY-3.listing   KEY: hash of the file's path, size, time of change and inode, and of options
        8 bytes        length of the JSON
        JSON           layout, classes, fingerprint, number of samples, type of the labels in the listing
        int64 (n + 1,) where the key of each sample begins, and the last one ends
        int64 (n,)     labels, if the listing has them
        bytes          keys, end to end

Layouts, which are found by content:

image        each value is an encoded image, as in LSUN; labels are in a list of keys, or are the keys' folders
scene-text   image-000000001, … with its text at label-000000001, and num-samples (CRNN, ASTER, PARSeq)
pickle, msgpack, pyarrow, datum   see `raypipe.stores.lmdb_values`; `__keys__`, if it can be read, has the order
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import locked, make_cache_folder
from raypipe.storage.retries import report_progress
from raypipe.stores.base import hash_of_facts
from raypipe.stores.lmdb_file import Entries, LMDBFile
from raypipe.stores.lmdb_labels import (
    KeyTable,
    Labels,
    labels_of_folders,
    labels_of_list,
    table_of,
)
from raypipe.stores.lmdb_values import ValueLayout, find_layout, keys_in, value_kind

logger = logging.getLogger(__name__)

# Entries about the others, as folder2lmdb, scene-text tools, StyleGAN2 and BasicSR write them.
_ABOUT_ALL = (
    b"__keys__",
    b"__len__",
    b"__meta__",
    b"length",
    b"meta_info.txt",
    b"num-samples",
    b"__raypipe__",
)
_FIRST_PICTURE = b"image-000000001"
_FIRST_TEXT = b"label-000000001"
_NUM_TRIED = 16  # values that decide the layout
_NUM_HASHED = 64  # values in the fingerprint
_LARGE = 1_000_000  # entries: listing them takes a second
# entries: listing them takes a hundredth of a second, so it is not kept
_SMALL = 20_000
_TYPES = {int: "int64", bool: "int64", float: "float64", list: "array", str: "string"}

_UNTRUSTED = (
    "has pickled values, and a pickle can be a program. raypipe reads only bytes, text, numbers, tuples, lists "
    "and dicts from them, and only on your word: set store.trust_pickles to true (--store.trust-pickles true, or "
    "trust_pickles=True in Python) if you trust whoever wrote the file"
)


@dataclass(frozen=True)
class Options:
    """Settings that a listing depends on.

    Attributes:
        target_column: see `raypipe.stores.lmdb.LMDBStore`.
        trust_pickles: whether pickled values may be opened.
        list_file: list of keys with labels; "" = none.
    """

    target_column: str = "label"
    trust_pickles: bool = False
    list_file: str = ""


@dataclass(frozen=True)
class Listing:
    """Samples of a file.

    Attributes:
        layout: see above.
        keys: their keys, in the order of samples.
        labels: int64 (n,); None if the values have the labels, or there are none.
        value: places of image and label in the values; None for `image` and `scene-text`.
        label_type: "int64", "float64", "string", an array such as "float64[4]", lists of different lengths such as
            "float64[]", or "" without labels.
        classes: class names, position = label; None = not named.
        fingerprint: hash over keys, lengths of values, order and labels, and the values of 64 samples.
    """

    layout: str
    keys: KeyTable
    labels: np.ndarray | None
    value: ValueLayout | None
    label_type: str
    classes: tuple[str, ...] | None
    fingerprint: str


def listing_of(
    file: LMDBFile, where: str, version: Sequence[Any], options: Options
) -> Listing:
    """Return a file's listing: from the node's cache, or made now.

    Args:
        file: the open file.
        where: its address, for errors.
        version: facts that change when the file does.

    Raises:
        StoreError: the file is damaged, or its layout is unknown.
    """
    if file.num_entries < _SMALL:
        return _list(file, where, options)
    version = [where, *version, *asdict(options).values()]
    if options.list_file:
        with contextlib.suppress(OSError):  # a remote list has no time of change here
            status = Path(options.list_file).stat()
            version += [status.st_size, status.st_mtime_ns]
    try:
        kept = make_cache_folder("lmdb") / f"{hash_of_facts(version)}-3.listing"
    except OSError:  # the cache only saves time
        return _list(file, where, options)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return _read(kept)
    with locked(kept.with_suffix(".lock")):  # one process makes it, and the others wait
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return _read(kept)
        listing = _list(file, where, options)
        with contextlib.suppress(OSError):
            _write(kept, listing)
            return _read(kept)
    return listing


# In the cache


def _write(path: Path, listing: Listing) -> None:
    facts = {
        "layout": listing.layout,
        "value": listing.value and asdict(listing.value),
        "label_type": listing.label_type,
        "classes": listing.classes,
        "fingerprint": listing.fingerprint,
        "num_samples": len(listing.keys),
        "key_bytes": len(listing.keys.content),
        "has_labels": listing.labels is not None,
    }
    head = json.dumps(facts).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as target:
            target.write(len(head).to_bytes(8, "little") + head)
            target.write(listing.keys.starts.astype("<i8").tobytes())
            if listing.labels is not None:
                target.write(listing.labels.astype("<i8").tobytes())
            target.write(listing.keys.content.tobytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> Listing:
    with path.open("rb") as file:
        num_head = int.from_bytes(file.read(8), "little")
        num_bytes = os.fstat(file.fileno()).st_size
        if num_head > num_bytes:
            raise ValueError("it is cut")
        facts = json.loads(file.read(num_head))
        count = facts["num_samples"]
        num_numbers = count + 1 + count * facts["has_labels"]
        if num_bytes != 8 + num_head + 8 * num_numbers + facts["key_bytes"]:
            raise ValueError("it is cut")
        mapped = np.asarray(np.memmap(file, np.uint8, "r", 8 + num_head))
    numbers = mapped[: 8 * num_numbers].view("<i8")
    return Listing(
        facts["layout"],
        KeyTable(mapped[8 * num_numbers :], numbers[: count + 1]),
        numbers[count + 1 :] if facts["has_labels"] else None,
        facts["value"] and ValueLayout(**facts["value"]),
        facts["label_type"],
        None if facts["classes"] is None else tuple(facts["classes"]),
        facts["fingerprint"],
    )


# From the file


def _list(file: LMDBFile, where: str, options: Options) -> Listing:
    if file.num_entries >= _LARGE:
        logger.info(
            "listing the %s keys of %s, once per node", f"{file.num_entries:,}", where
        )
    is_text = _is_scene_text(file)
    table, value_sizes = _walk(
        file, _scene_text_bounds(file) if is_text else _sample_bounds()
    )
    if not len(table):
        raise StoreError(
            f"{where} has no samples: {file.num_entries} keys, and none of them is a sample's"
        )
    digest = hashlib.blake2b(table.hash(value_sizes), digest_size=16)
    samples = list(_some(file, table, _NUM_TRIED))
    layout = "scene-text" if is_text else _layout_of(where, samples)
    value: ValueLayout | None = None
    labels = Labels()
    if layout == "pickle" and not options.trust_pickles:
        raise StoreError(f"{where} {_UNTRUSTED}")
    if layout in ("image", "scene-text"):
        order = _numeric_order(table) if layout == "image" else None
        labels = _labels_of_keys(where, layout, table, options)
        label_type = "int64" if labels.numbers is not None else ""
    else:
        value, label_type = _value_layout(where, layout, samples, options.target_column)
        order = _order_of_values(file, where, layout, table)
    digest.update(repr((layout, value, label_type, labels.classes)).encode())
    numbers = labels.numbers
    if numbers is not None:
        digest.update(numbers.tobytes())
    if order is not None:
        digest.update(order.tobytes())
        table = table.reordered(order)
        numbers = None if numbers is None else numbers[order]
    for _, content in _some(file, table, _NUM_HASHED):
        digest.update(content)
    return Listing(
        layout, table, numbers, value, label_type, labels.classes, digest.hexdigest()
    )


def _is_scene_text(file: LMDBFile) -> bool:
    return file.get(_FIRST_PICTURE) is not None and (
        file.get(_FIRST_TEXT) is not None or file.get(b"num-samples") is not None
    )


def _order_of_values(
    file: LMDBFile, where: str, layout: str, table: KeyTable
) -> np.ndarray | None:
    """Return the row of each sample whose value has image and label; None if they are in the order of the file."""
    listed = file.get(b"__keys__")
    keys = None if listed is None else keys_in(listed, layout == "pickle")
    if keys is None:
        return _numeric_order(table)
    return _listed_order(where, table, keys)


def _sample_bounds() -> list[bytes]:
    """Bounds of the samples' keys, see `_walk`: all keys but those of `_ABOUT_ALL`."""
    return [b"", *(bound for key in sorted(_ABOUT_ALL) for bound in (key, key + b"\0"))]


def _scene_text_bounds(file: LMDBFile) -> list[bytes]:
    number = bytes(file.get(b"num-samples") or b"")
    if number.isdigit() and len(number) < 10:
        last = b"image-%09d\0" % int(number)
    else:
        last = b"image."
    return [b"image-", last]


def _walk(file: LMDBFile, bounds: Sequence[bytes]) -> tuple[KeyTable, np.ndarray]:
    """Return the keys of all samples, in the order of the file, and the lengths of their values.

    Args:
        bounds: ascending; samples have keys from the first to below the second, from the third to below the
            fourth, and so on.
    """
    samples: list[Entries] = []
    for entries in file.entries():
        report_progress()
        table, _ = table_of([entries])
        places = [_place_of(table, bound) for bound in bounds]
        places += [len(table)] * (len(bounds) % 2)
        for first, stop in zip(places[::2], places[1::2], strict=True):
            if first < stop:
                keys = entries.keys[table.starts[first] : table.starts[stop]]
                rows = slice(first, stop)
                samples.append(
                    Entries(keys, entries.key_sizes[rows], entries.value_sizes[rows])
                )
    return table_of(samples)


def _place_of(table: KeyTable, bound: bytes) -> int:
    """Return the row of the first key that is not below a bound."""
    return bisect_left(range(len(table)), bound, key=table.key)


def _some(
    file: LMDBFile, table: KeyTable, num: int
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield entries from everywhere in the file, except damaged ones."""
    for row in table.spread(num):
        key = table.key(row)
        with contextlib.suppress(StoreError):
            value = file.get(key)
            if value is not None:
                yield key, value


def _layout_of(where: str, samples: Sequence[tuple[bytes, memoryview]]) -> str:
    """Return the layout that at least three quarters of some values have, since a few may be damaged."""
    kinds = Counter(value_kind(value) for _, value in samples)
    kind, num = kinds.most_common(1)[0] if kinds else ("", 0)
    if kind and 4 * num >= 3 * len(samples):
        return kind
    shown = (
        "; ".join(f"{key[:40]!r}: {bytes(value[:16])!r}" for key, value in samples[:2])
        or "unreadable"
    )
    raise StoreError(
        f"{where} is LMDB of an unknown layout ({shown}): its values are neither encoded images nor (image, "
        "label) by pickle, msgpack or pyarrow, nor Caffe's Datum. Read it with the library lmdb, and give the "
        "samples to `raypipe.convert`, as docs/formats.md shows"
    )


def _value_layout(
    where: str, kind: str, samples: Sequence[tuple[bytes, memoryview]], target: str
) -> tuple[ValueLayout, str]:
    """Return where image and label are in the values, and the labels' type."""
    reason: object = "no value can be read"
    layout: ValueLayout | None = None
    labels = []
    for key, value in samples:
        try:
            layout = layout or find_layout(kind, value, target or "label")
            labels.append(layout.read(value)[1])
        except (ValueError, StoreError) as error:
            reason = f"at key {key[:40]!r}: {error}"
    if layout is None:
        raise StoreError(
            f"{where} has values of the kind {kind} that cannot be read: {reason}"
        )
    return layout, _type_of(labels)


def _type_of(labels: Sequence[Any]) -> str:
    """Return the type of labels that most of some have, since a few may be damaged."""
    kinds = Counter(_TYPES[type(label)] for label in labels if label is not None)
    if kinds["float64"]:  # among floats, a whole number may be an int
        kinds["float64"] += kinds.pop("int64", 0)
    if not kinds:
        return ""
    ((kind, _),) = kinds.most_common(1)
    if kind != "array":
        return kind
    lists = [label for label in labels if isinstance(label, list)]
    lengths = Counter(map(len, lists))
    has_floats = any(isinstance(number, float) for label in lists for number in label)
    dtype = "float64" if has_floats else "int64"
    return f"{dtype}[{'' if len(lengths) > 1 else len(lists[0])}]"


def _numeric_order(table: KeyTable) -> np.ndarray | None:
    """Return the order of keys "0", "1", … "10" by number; None if they are others, or in this order."""
    if len(set(table.key_bytes.tolist())) < 2 or not all(
        table.key(row).isdigit() for row in table.spread(16)
    ):
        return None
    numbers = table.numbers()
    if numbers is None:
        return None
    order = np.argsort(numbers, kind="stable")
    return None if (order == np.arange(len(order))).all() else order


def _listed_order(
    where: str, table: KeyTable, keys: Sequence[bytes]
) -> np.ndarray | None:
    """Return the row of each key of `__keys__`; None if they are in the order of the file."""
    order = table.rows(keys)
    if (order < 0).any():
        missing = keys[int(np.flatnonzero(order < 0)[0])]
        raise StoreError(
            f"{where} has no key {missing[:64]!r}, which its __keys__ names: copy it again"
        )
    if len(order) < len(table):
        logger.warning(
            "%s: __keys__ leaves out %s of %s samples",
            where,
            len(table) - len(order),
            len(table),
        )
    elif (order == np.arange(len(order))).all():
        return None
    return order


def _labels_of_keys(
    where: str, layout: str, table: KeyTable, options: Options
) -> Labels:
    """Return the labels of samples whose values are images: from a list, or from the folders in the keys."""
    if options.list_file:
        return labels_of_list(where, options.list_file, table)
    if layout == "image" and options.target_column in ("label", "folder"):
        return labels_of_folders(where, table, options.target_column == "folder")
    return Labels()
