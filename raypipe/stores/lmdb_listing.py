"""Listing of an LMDB file that another program wrote: the keys of its samples, in their order, and their labels.

A large file is listed once per node: the listing stays in the node's cache, and all processes map it, see
`raypipe.stores.kept`. It has `key` and, if labels are not in the values, `label`.

Layouts, which are found by content:

image        each value is an encoded image, as in LSUN; labels are in a list of keys, or are the keys' folders
scene-text   image-000000001, … with its text at label-000000001, and num-samples (CRNN, ASTER, PARSeq)
pickle, msgpack   see `raypipe.stores.lmdb_values`; `__keys__`, if it can be read, has the order
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.storage.local_file import written_facts
from raypipe.storage.retries import report_progress
from raypipe.stores.class_folders import BY_FOLDER
from raypipe.stores.kept import kept, path_of
from raypipe.stores.lmdb_file import LMDBFile, Shard
from raypipe.stores.lmdb_labels import (
    find_list,
    labels_of_folders,
    labels_of_list,
    rows_of,
)
from raypipe.stores.lmdb_values import (
    READERS,
    ValueLayout,
    find_layout,
    keys_in,
    value_kind,
)
from raypipe.stores.record import Fingerprint
from raypipe.stores.scan import spread

logger = logging.getLogger(__name__)

# Entries about the others, as folder2lmdb, scene-text tools, StyleGAN2 and BasicSR write them.
_ABOUT_ALL = pa.array(
    [
        b"__keys__",
        b"__len__",
        b"__meta__",
        b"length",
        b"meta_info.txt",
        b"num-samples",
        b"__raypipe__",
    ],
    pa.large_binary(),
)
_NUMBER = "^[0-9]{1,18}$"
_VERSION = 8  # the kept listings' form has this version
_FIRST_PICTURE = b"image-000000001"
_FIRST_TEXT = b"label-000000001"
_NUM_TEXTS = b"num-samples"
_NUM_TRIED = 16  # values that decide the layout
_NUM_HASHED = 64  # values in the fingerprint
_LARGE = 1_000_000  # entries: listing them takes a second
# entries: listing them takes a hundredth of a second, so it is not kept
_SMALL = 20_000

_UNTRUSTED = (
    "has pickled values, and a pickle can be a program. raypipe reads only bytes, text, numbers, tuples, lists "
    "and dicts from them, and only on your word: set store.trust_pickles to true (--store.trust-pickles true, or "
    "trust_pickles=True in Python) if you trust whoever wrote the file"
)


class Listing(NamedTuple):
    """Samples of a file.

    Attributes:
        layout: see above.
        keys: their keys, in the order of samples, of the type large_binary.
        labels: see `raypipe.stores.lmdb_labels`; None if the values have the labels, or there are none.
        value: a `ValueLayout`, the places of image and label in the values; None for `image` and `scene-text`.
        label_type: "int64", "float64", "string", an array such as "float64[4]", lists of different lengths such as
            "float64[]", "class" of names of classes, or "" without labels.
        fingerprint: hash over keys, lengths of values, order and labels, and the values of 64 samples.
    """

    layout: str
    keys: pa.LargeBinaryArray
    labels: pa.Array | None
    value: Sequence[Any] | None
    label_type: str
    fingerprint: str


def listing_of(shard: Shard, target_column: str, trust_pickles: bool) -> Listing:
    """Return a file's listing: from the node's cache, or made now; the options are those of `LMDBStore`.

    Raises:
        StoreError: the file is damaged, or its layout is unknown.
    """
    file = shard.open()
    list_file = find_list(shard.path, target_column)
    options = target_column, trust_pickles, list_file
    facts = [shard.path, *shard.file.written, *options, _VERSION]
    if list_file:
        with contextlib.suppress(OSError):  # a remote list has no time of change here
            facts += written_facts(Path(list_file).stat())
    path = None if file.num_entries < _SMALL else path_of("lmdb", *facts)
    return kept(path, Listing, lambda: _list(file, shard.path, *options))


# From the file


def _list(
    file: LMDBFile, where: str, target_column: str, trust_pickles: bool, list_file: str
) -> Listing:
    is_text = file.get(_FIRST_PICTURE) is not None and (
        file.get(_FIRST_TEXT) is not None or file.get(_NUM_TEXTS) is not None
    )
    keys, value_sizes = _walk(file, where, is_text)
    samples = list(_some(file, keys, _NUM_TRIED))
    layout = "scene-text" if is_text else _layout_of(where, samples)
    if layout == "pickle" and not trust_pickles:
        raise StoreError(f"{where} {_UNTRUSTED}")
    order = _order_of(file, where, layout, keys)
    keys = keys.take(pa.array(order))
    value = labels = None
    label_type = ""
    if layout in READERS:
        value, label_type = _value_layout(where, layout, samples, target_column)
    elif list_file:
        labels = labels_of_list(where, list_file, keys)
    elif layout == "image" and target_column in ("label", BY_FOLDER):
        labels = labels_of_folders(where, keys, target_column == BY_FOLDER)
    if labels is not None:
        label_type = "int64" if pa.types.is_integer(labels.type) else "class"
    fingerprint = Fingerprint({"layout": repr((layout, value, label_type))}, None)
    for fact in _facts(keys, value_sizes[order], labels):
        fingerprint.add(fact)
    for _, content in _some(file, keys, _NUM_HASHED):
        fingerprint.add(bytes(content))
    return Listing(layout, keys, labels, value, label_type, fingerprint.hexdigest())


def _order_of(
    file: LMDBFile, where: str, layout: str, keys: pa.LargeBinaryArray
) -> np.ndarray:
    """Return the row of each sample: by `__keys__`, by numbers that are keys, or in the order of the file."""
    content = file.get(b"__keys__") if layout in READERS else None
    listed = None if content is None else keys_in(content, layout == "pickle")
    if listed is not None:
        return _listed_order(where, keys, listed)
    if not pc.all(pc.match_substring_regex(keys, _NUMBER)).as_py():
        return np.arange(len(keys))
    numbers = keys.cast(pa.large_string()).cast(pa.int64()).to_numpy()
    return np.argsort(numbers, kind="stable")


def _walk(
    file: LMDBFile, where: str, is_text: bool
) -> tuple[pa.LargeBinaryArray, np.ndarray]:
    """Return the keys of all samples, in the order of the file, and the lengths of their values."""
    if file.num_entries >= _LARGE:
        logger.info(
            "listing the %s keys of %s, once per node", f"{file.num_entries:,}", where
        )
    every = [pa.array([], pa.large_binary())]
    value_sizes = [np.empty(0, np.int64)]
    for entries in file.entries():
        report_progress()
        every.append(entries.keys)
        value_sizes.append(entries.value_sizes)
    keys = pa.concat_arrays(every)
    if is_text:
        are_samples = pc.and_(
            pc.starts_with(keys, "image-"), pc.less_equal(keys, _last_picture(file))
        )
    else:
        are_samples = pc.invert(pc.is_in(keys, value_set=_ABOUT_ALL))
    samples = keys.filter(are_samples)
    if not len(samples):
        raise StoreError(
            f"{where} has no samples: {file.num_entries} keys, and none of them is a sample's"
        )
    return samples, np.concatenate(value_sizes)[are_samples.to_numpy(False)]


def _last_picture(file: LMDBFile) -> pa.Scalar:
    """Return the key of the last picture of scene text, or one after all."""
    number = bytes(file.get(_NUM_TEXTS) or b"")
    is_number = number.isdigit() and len(number) < 10
    last = b"image-%09d" % int(number) if is_number else b"image."
    return pa.scalar(last, pa.large_binary())


def _facts(
    keys: pa.LargeBinaryArray, value_sizes: np.ndarray, labels: pa.Array | None
) -> Iterator[bytes]:
    """Yield what tells a file from others, besides its values."""
    yield b"".join(keys.to_pylist())
    yield pc.binary_length(keys).to_numpy().tobytes()
    yield value_sizes.astype(np.int64).tobytes()
    if isinstance(labels, pa.DictionaryArray):
        yield repr(labels.dictionary.to_pylist()).encode()
        labels = labels.indices
    if labels is not None:
        yield labels.to_numpy().tobytes()


def _some(
    file: LMDBFile, keys: pa.LargeBinaryArray, num: int
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield entries from everywhere in the file, except damaged ones."""
    for key in keys.take(spread(len(keys), num)).to_pylist():
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
        "label) by pickle or msgpack. Read it with the library lmdb (Caffe's Datum and pyarrow.serialize: with "
        "theirs too), and give the samples to `raypipe.convert`, as docs/formats.md shows"
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
    texts: list[Any] = [label for label in labels if isinstance(label, str)]
    numbers: list[Any] = [label for label in labels if isinstance(label, int | float)]
    lists: list[Any] = [label for label in labels if isinstance(label, list)]
    most = max(texts, numbers, lists, key=len)
    if not most:
        return ""
    if most is texts:
        return "string"
    flat = numbers if most is numbers else itertools.chain(*lists)
    # among floats, a whole number may be an int
    dtype = "float64" if any(isinstance(number, float) for number in flat) else "int64"
    if most is numbers:
        return dtype
    lengths = set(map(len, lists))
    return f"{dtype}[{lengths.pop() if len(lengths) == 1 else ''}]"


def _listed_order(
    where: str, keys: pa.LargeBinaryArray, listed: Sequence[bytes]
) -> np.ndarray:
    """Return the row of each key of `__keys__`."""
    order = rows_of(keys, listed)
    if (order < 0).any():
        missing = listed[int(np.flatnonzero(order < 0)[0])]
        raise StoreError(
            f"{where} has no key {missing[:64]!r}, which its __keys__ names: copy it again"
        )
    if len(order) < len(keys):
        logger.warning(
            "%s: __keys__ leaves out %s of %s samples",
            where,
            len(keys) - len(order),
            len(keys),
        )
    return order
