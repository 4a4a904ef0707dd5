"""Contents of LMDB files that other programs wrote, read in place; `raypipe.stores.lmdb_listing` has the layouts.

Columns are `image`; `label`, numbers from the values, from a list of keys, or from the keys' folders; `text`, if
the labels are text; and `key`. A value that is damaged, or cannot be parsed, is a bad sample.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile
from raypipe.storage.filesystem import errors_as, is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.stores.base import (
    Columns,
    as_text,
    gathered,
    hash_of_facts,
    join_fingerprints,
    missing,
    part_of,
)
from raypipe.stores.class_folders import BY_FOLDER
from raypipe.stores.lmdb_file import LMDBFile, Shard, Shards
from raypipe.stores.lmdb_listing import Listing, Options, listing_of
from raypipe.stores.lmdb_values import ValueLayout
from raypipe.stores.record import arrow_type

DATA_FILE = "data.mdb"
"""Name of the file in an LMDB that is a folder."""

_LIST_SUFFIXES = (".txt", ".csv", ".tsv")
_LIST_INSIDE = "labels.txt"
_NO_LABEL = (pa.ArrowException, OverflowError)  # values of another type raise these
CLASS_OF_LSUN = re.compile(r"(?P<name>.+)_(?P<split>train|val|test)_lmdb")
"""Name of an LMDB of LSUN, which has one for each class."""


@dataclass(frozen=True)
class _Shard(Shard):
    """An LMDB, a file or a folder, with its samples."""

    listing: Listing


def open_foreign(files: Sequence[RemoteFile], options: Options) -> ForeignShards:
    """Open files that another program wrote.

    Raises:
        StoreError: a file is damaged, its layout is unknown, or the files do not belong together.
    """
    return ForeignShards(
        [_open(file, options) for file in files], options.target_column
    )


def _open(listed: RemoteFile, options: Options) -> _Shard:
    address = listed.address
    where = address.removesuffix(f"/{DATA_FILE}")
    options = replace(options, list_file=_list_of(where, options.target_column))
    if is_remote(address):
        file: LMDBFile = shared_cache().get(listed, LMDBFile)
        return _Shard(where, listed, listing_of(file, where, astuple(listed), options))
    file = LMDBFile(address)
    return _Shard(where, file, listing_of(file, where, file.written, options))


def _list_of(where: str, target_column: str) -> str:
    """Return the list of keys and labels that is named, or is next to a local LMDB; empty if there is none."""
    path = Path(where)
    if target_column in ("", BY_FOLDER):
        return ""
    if target_column.endswith(_LIST_SUFFIXES):
        # an absolute path stays as it is
        is_address = is_remote(target_column)
        return target_column if is_address else str(path.parent / target_column)
    if is_remote(where):
        return ""
    if path.suffix in (".lmdb", ".mdb"):
        beside = path.with_suffix(".txt")
    else:
        beside = path.with_name(f"{path.name}.txt")
    lists = (path / _LIST_INSIDE, beside)
    return next((str(file) for file in lists if file.is_file()), "")


class ForeignShards(Shards[_Shard]):
    """The shards of an open store."""

    def __init__(self, shards: Sequence[_Shard], target_column: str) -> None:
        super().__init__(shards, [len(shard.listing.keys) for shard in shards])
        first = shards[0].listing
        for shard in shards[1:]:
            listing = shard.listing
            if (listing.layout, listing.label_type) != (first.layout, first.label_type):
                raise StoreError(
                    f"{shard.path} and {shards[0].path} differ: {listing.layout} with labels of type "
                    f"{listing.label_type or 'none'}, and {first.layout} with {first.label_type or 'none'}; all "
                    "LMDBs of one store must have the same"
                )
        self._labels, self.classes = _labels_of(shards)
        label_type = "int64" if self._labels is not None else first.label_type
        self._is_scene_text = first.layout == "scene-text"
        fields = {"image": pa.binary()}
        if label_type not in ("", "string"):
            fields["label"] = _arrow_type(label_type)
        if self._is_scene_text or label_type == "string":
            fields["text"] = pa.string()
        fields["key"] = pa.string()
        self.schema = pa.schema(fields)
        if target_column not in ("", "label") and "label" not in fields:
            raise StoreError(
                missing(shards[0].path, target_column, fields, "target_column")
            )
        facts = [hash_of_facts(self.classes)] if self.classes else []
        self.fingerprint = join_fingerprints(
            [*(shard.listing.fingerprint for shard in shards), *facts]
        )

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return gathered(indices, self.offsets, self.schema, columns, self._read)

    def _read(
        self, number: int, rows: np.ndarray, columns: Collection[str]
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if "label" in columns and self._labels is not None:
            values["label"] = self._labels[rows + self.offsets[number]]
        by_value = set(columns) - values.keys()
        if by_value:
            values |= self._values(self.shards[number], rows, by_value)
        return values

    def _values(
        self, shard: _Shard, rows: np.ndarray, columns: Collection[str]
    ) -> dict[str, Any]:
        """Return the values of columns that are in a file, or are its keys."""
        keys = shard.listing.keys.take(pa.array(rows)).to_pylist()
        values: dict[str, Any] = {name: [None] * len(rows) for name in columns}
        file = shard.open()
        layout = shard.listing.value
        value = None if layout is None else ValueLayout(*layout)
        with errors_as(StoreError, f"{shard.path} cannot be read"):
            for row, key in enumerate(keys):
                # a damaged value, or place in the file, is a bad sample
                with contextlib.suppress(StoreError, ValueError):
                    sample = self._sample(file, value, key, columns)
                    for name in columns:
                        values[name][row] = sample.get(name)
        for name in columns:
            if name != "image":
                values[name] = _as_arrow(self.schema.field(name).type, values[name])
        return values

    def _sample(
        self,
        file: LMDBFile,
        value: ValueLayout | None,
        key: bytes,
        columns: Collection[str],
    ) -> dict[str, Any]:
        """Return columns of a sample; none if keys around it are damaged."""
        sample: dict[str, Any] = {"key": as_text(key)}
        if columns == {"key"}:
            return sample
        content = file.get(key)
        if content is None:
            return {}
        sample["image"] = content
        if value is not None:
            sample["image"], label = value.read(content)
            sample["text" if isinstance(label, str) else "label"] = label
        if self._is_scene_text and "text" in columns:
            text = file.get(b"label-" + key.removeprefix(b"image-"))
            sample["text"] = None if text is None else as_text(bytes(text))
        return sample

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the keys of samples."""
        return self.read(indices, ("key",))["key"]

    def sample_name(self, index: int) -> str:
        number, within = part_of(self.offsets, index)
        shard = self.shards[number]
        key = shard.listing.keys[within].as_py()
        return f"{shard.path}, key {key.decode(errors='backslashreplace')}"


def _labels_of(
    shards: Sequence[_Shard],
) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """Return the labels that are known without reading values, (N,), and the names of classes."""
    listings = [shard.listing for shard in shards]
    labels = [listing.labels for listing in listings if listing.labels is not None]
    if not any(listing.label_type for listing in listings):
        names = [
            CLASS_OF_LSUN.fullmatch(PurePosixPath(shard.path).name) for shard in shards
        ]
        classes_of_lsun = {name["name"] for name in names if name is not None}
        if len(classes_of_lsun) == len(shards) > 1 and listings[0].layout == "image":
            labels = [
                pa.array([name["name"]] * len(listing.keys)).dictionary_encode()
                for name, listing in zip(names, listings, strict=True)
                if name is not None
            ]
    if not labels:
        return None, None
    known = labels[0]
    if len(labels) > 1:  # a mapped file stays one
        known = pa.chunked_array(labels).unify_dictionaries().combine_chunks()
    if not isinstance(known, pa.DictionaryArray):
        return known.to_numpy(), None
    classes = sorted(known.dictionary.to_pylist())
    numbers = pc.index_in(known.dictionary, pa.array(classes))
    labels_of_all = numbers.take(known.indices).cast(pa.int64())
    return labels_of_all.to_numpy(), tuple(classes)


def _arrow_type(label_type: str) -> pa.DataType:
    if label_type.endswith("[]"):
        return pa.list_(arrow_type(label_type.removesuffix("[]")))
    return arrow_type(label_type)


def _as_arrow(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Return values as Arrow; those that are missing, or of another type, have none."""
    try:
        return pa.array(values, kind)
    except _NO_LABEL:
        return pa.array([each if _fits(kind, each) else None for each in values], kind)


def _fits(kind: pa.DataType, label: Any) -> bool:
    try:
        return pa.scalar(label, kind) is not None
    except _NO_LABEL:
        return False
