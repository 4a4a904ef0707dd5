"""Contents of LMDB files that other programs wrote, read in place; `raypipe.stores.lmdb_listing` has the layouts.

Columns are `image`; `label`, numbers from the values, from a list of keys, or from the keys' folders; `text`, if
the labels are text; and `key`. A value that is damaged, or cannot be parsed, is a bad sample.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.storage.filesystem import errors_as
from raypipe.stores.base import as_text, hash_of_facts, join_fingerprints, missing
from raypipe.stores.lmdb_file import LMDBFile, Shard, Shards
from raypipe.stores.lmdb_listing import Listing, listing_of
from raypipe.stores.lmdb_values import ValueLayout
from raypipe.stores.record import arrow_type

_NO_LABEL = (pa.ArrowException, OverflowError)  # values of another type raise these
CLASS_OF_LSUN = re.compile(r"(?P<name>.+)_(?P<split>train|val|test)_lmdb")
"""Name of an LMDB of LSUN, which has one for each class."""


def _check_same_layout(shards: Sequence[Shard], listings: Sequence[Listing]) -> None:
    first = listings[0]
    for shard, listing in zip(shards, listings, strict=True):
        if (listing.layout, listing.label_type) != (first.layout, first.label_type):
            raise StoreError(
                f"{shard.path} and {shards[0].path} differ: {listing.layout} with labels of type "
                f"{listing.label_type or 'none'}, and {first.layout} with {first.label_type or 'none'}; all LMDBs "
                "of one store must have the same"
            )


def _schema_of(layout: str, label_type: str) -> pa.Schema:
    """Return the columns of samples of a layout."""
    fields = {"image": pa.binary()}
    if label_type not in ("", "string"):
        fields["label"] = _arrow_type(label_type)
    if layout == "scene-text" or label_type == "string":
        fields["text"] = pa.string()
    return pa.schema(fields | {"key": pa.string()})


class ForeignShards(Shards):
    """Open files that another program wrote; the options are those of `LMDBStore`.

    Raises:
        StoreError: a file is damaged, its layout is unknown, or the files do not belong together.
    """

    def __init__(
        self, shards: Sequence[Shard], target_column: str, trust_pickles: bool
    ) -> None:
        listings: Sequence[Listing] = [
            listing_of(shard, target_column, trust_pickles) for shard in shards
        ]
        super().__init__(shards, [len(listing.keys) for listing in listings])
        _check_same_layout(shards, listings)
        first = listings[0]
        if (first.layout, first.label_type) == ("image", ""):
            listings = _with_classes_of_lsun(shards, listings)
        self._listings = listings
        self.classes: tuple[str, ...] | None = None
        # views of what the node keeps
        self._labels: list[Any] = [listing.labels for listing in listings]
        label_type = first.label_type
        if isinstance(self._labels[0], pa.DictionaryArray):
            label_type = "int64"
            texts = [named.dictionary for named in self._labels]
            every = pc.unique(pa.chunked_array(texts)).sort()
            self.classes = tuple(every.to_pylist())
            self._labels = [
                pa.DictionaryArray.from_arrays(
                    named.indices, pc.index_in(named.dictionary, every).cast(pa.int64())
                )
                for named in self._labels
            ]
        self.schema = _schema_of(first.layout, label_type)
        names = self.schema.names
        if target_column not in ("", "label") and "label" not in names:
            raise StoreError(
                missing(shards[0].path, target_column, names, "target_column")
            )
        facts = [hash_of_facts(self.classes)] if self.classes else []
        self.fingerprint = join_fingerprints(
            [*(listing.fingerprint for listing in listings), *facts]
        )

    def _read(
        self, number: int, rows: np.ndarray, columns: tuple[str, ...]
    ) -> dict[str, Any]:
        shard = self.shards[number]
        listing = self._listings[number]
        taken = pa.array(rows)
        found: dict[str, Any] = {}
        labels = self._labels[number]
        if "label" in columns and labels is not None:
            found["label"] = labels.take(taken).cast(pa.int64())
        names = [name for name in columns if name not in found]
        if not names:
            return found
        file = shard.open()
        keys = listing.keys.take(taken).to_pylist()
        with errors_as(StoreError, f"{shard.path} cannot be read"):
            samples = [_sample(file, listing, key, names) for key in keys]
        for name in names:
            values = [sample.get(name) for sample in samples]
            if name != "image":
                values = _as_arrow(self.schema.field(name).type, values)
            found[name] = values
        return found

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the keys of samples."""
        return self.read(indices, ("key",))["key"]

    def _key(self, number: int, row: int) -> str:
        key = self._listings[number].keys[row].as_py()
        return key.decode(errors="backslashreplace")


def _sample(
    file: LMDBFile, listing: Listing, key: bytes, columns: Sequence[str]
) -> dict[str, Any]:
    """Return columns of a sample; none if its value, or its place in the file, is damaged."""
    sample: dict[str, Any] = {"key": as_text(key)}
    if columns == ["key"]:
        return sample
    with contextlib.suppress(StoreError, ValueError):
        content = file.get(key)
        if content is None:
            return {}
        sample["image"] = content
        if listing.value is not None:
            sample["image"], label = ValueLayout(*listing.value).read(content)
            sample["text" if isinstance(label, str) else "label"] = label
        elif listing.layout == "scene-text" and "text" in columns:
            text = file.get(b"label-" + key.removeprefix(b"image-"))
            sample["text"] = None if text is None else as_text(bytes(text))
        return sample
    return {}


def _with_classes_of_lsun(
    shards: Sequence[Shard], listings: Sequence[Listing]
) -> Sequence[Listing]:
    """Return the listings with the classes that their files' names are, if each has one of its own."""
    matches = [
        CLASS_OF_LSUN.fullmatch(PurePosixPath(shard.path).name) for shard in shards
    ]
    names = [match["name"] for match in matches if match]
    if len(shards) == 1 or len(set(names)) < len(shards):
        return listings
    return [
        listing._replace(
            labels=pa.array([name] * len(listing.keys)).dictionary_encode()
        )
        for listing, name in zip(listings, names, strict=True)
    ]


def _arrow_type(label_type: str) -> pa.DataType:
    if label_type.endswith("[]"):
        return pa.list_(arrow_type(label_type.removesuffix("[]")))
    return arrow_type(label_type)


def _as_arrow(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Return values as Arrow; those that are missing, or of another type, have none."""
    try:
        return pa.array(values, kind)
    except _NO_LABEL:
        if len(values) == 1:
            return pa.nulls(1, kind)
        return pa.concat_arrays([_as_arrow(kind, [value]) for value in values])
