"""Contents of LMDB files that other programs wrote, read in place; `raypipe.stores.lmdb_listing` has the layouts.

Columns are `image`; `label`, numbers from the values, from a list of keys, or from the keys' folders; `text`, if
the labels are text; and `key`. A value that is damaged, or cannot be parsed, is a bad sample.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile
from raypipe.storage.filesystem import errors_as, is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.stores.base import (
    Columns,
    as_text,
    by_part,
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
        self.classes, labels = _labels_of(shards)
        self._labels = _joined(labels)
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
        values: dict[str, Any] = {name: [None] * len(indices) for name in columns}
        by_value = set(columns)
        if "label" in columns and self._labels is not None:
            values["label"] = self._labels[indices]
            by_value.remove("label")
        for number, positions in by_part(indices, self.offsets) if by_value else ():
            shard = self.shards[number]
            file = shard.open()
            rows = pa.array(indices[positions] - self.offsets[number])
            keys = shard.listing.keys.take(rows).to_pylist()
            with errors_as(StoreError, f"{shard.path} cannot be read"):
                for position, key in zip(positions.tolist(), keys, strict=True):
                    # a damaged value, or place in the file, is a bad sample
                    with contextlib.suppress(StoreError, ValueError):
                        sample = self._sample(file, shard.listing.value, key, by_value)
                        for name in by_value:
                            values[name][position] = sample.get(name)
        images = values.pop("image", None)
        if "label" in by_value:
            label_type = self.schema.field("label").type
            values["label"] = _labels_as(label_type, values["label"])
        fields = [self.schema.field(name) for name in values]
        return Columns(images, pa.table(values, schema=pa.schema(fields)))

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
) -> tuple[tuple[str, ...] | None, list[np.ndarray | None]]:
    """Return class names, and each shard's labels that are known without reading values."""
    listings = [shard.listing for shard in shards]
    if all(listing.classes is not None for listing in listings):
        every = (listing.classes or () for listing in listings)
        classes = tuple(sorted(set(itertools.chain(*every))))
        return classes, [_renumbered(listing, classes) for listing in listings]
    if len(shards) > 1 and not any(listing.label_type for listing in listings):
        names = [
            CLASS_OF_LSUN.fullmatch(PurePosixPath(shard.path).name) for shard in shards
        ]
        classes_of_lsun = [name["name"] for name in names if name is not None]
        if (
            len(classes_of_lsun) == len(set(classes_of_lsun)) == len(shards)
            and listings[0].layout == "image"
        ):
            sizes = [len(listing.keys) for listing in listings]
            return tuple(classes_of_lsun), [
                np.full(size, number) for number, size in enumerate(sizes)
            ]
    return None, [listing.labels for listing in listings]


def _joined(labels: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the labels of all files, if they are known without reading values."""
    known = [of_file for of_file in labels if of_file is not None]
    if len(known) == 1:  # a mapped file stays one
        return known[0]
    return np.concatenate(known) if known else None


def _renumbered(listing: Listing, classes: tuple[str, ...]) -> np.ndarray | None:
    """Return a file's labels, as numbers of the store's classes."""
    if listing.labels is None or listing.classes == classes:
        return listing.labels
    rank = {name: number for number, name in enumerate(classes)}
    return np.array([rank[name] for name in listing.classes or ()])[listing.labels]


def _arrow_type(label_type: str) -> pa.DataType:
    if label_type.endswith("[]"):
        return pa.list_(arrow_type(label_type.removesuffix("[]")))
    return arrow_type(label_type)


def _labels_as(kind: pa.DataType, labels: list[Any]) -> pa.Array:
    """Return labels as Arrow; those that are missing, or of another type, have no value."""
    try:
        return pa.array(labels, kind)
    except _NO_LABEL:
        fitting = [label if _fits(kind, label) else None for label in labels]
        return pa.array(fitting, kind)


def _fits(kind: pa.DataType, label: Any) -> bool:
    try:
        return pa.scalar(label, kind) is not None
    except _NO_LABEL:
        return False
