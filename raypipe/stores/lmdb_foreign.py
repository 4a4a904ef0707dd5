"""Contents of LMDB files that other programs wrote, read in place; `raypipe.stores.lmdb_listing` has the layouts.

Columns are `image`; `label`, numbers from the values, from a list of keys, or from the keys' folders; `text`, if
the labels are text; and `key`. A value that is damaged, or cannot be parsed, is a bad sample.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.stores.arrow_values import to_arrow
from raypipe.stores.base import (
    Columns,
    as_text,
    by_part,
    hash_of_facts,
    join_fingerprints,
    missing,
    part_of,
)
from raypipe.stores.lmdb_file import LMDBFile
from raypipe.stores.lmdb_listing import Listing, Options, listing_of
from raypipe.stores.record import arrow_column, arrow_type

DATA_FILE = "data.mdb"
"""Name of the file in an LMDB that is a folder."""

_LIST_SUFFIXES = (".txt", ".csv", ".tsv")
_LIST_INSIDE = "labels.txt"
CLASS_OF_LSUN = re.compile(r"(?P<name>.+)_(?P<split>train|val|test)_lmdb")
"""Name of an LMDB of LSUN, which has one for each class."""


@dataclass(frozen=True)
class _Shard:
    """A file of a store.

    Attributes:
        path: the LMDB's path or URI, a file or a folder, for errors.
        file: stays open; a remote one is in the node's cache.
        listing: its samples.
    """

    path: str
    file: LMDBFile | RemoteFile
    listing: Listing

    def open(self) -> LMDBFile:
        if isinstance(self.file, LMDBFile):
            return self.file
        return shared_cache().get(self.file, LMDBFile)

    def is_at_hand(self) -> bool:
        """Return whether the file is on this node's disk."""
        if isinstance(self.file, LMDBFile):
            return True
        return shared_cache().find(self.file, LMDBFile) is not None


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
    if options.target_column.endswith(_LIST_SUFFIXES) or not options.target_column:
        list_file = options.target_column
        if list_file and not is_remote(list_file):
            # an absolute path stays as it is
            list_file = str(Path(where).parent / list_file)
    else:
        list_file = _list_beside(where)
    options = replace(
        options, list_file="" if options.target_column == "folder" else list_file
    )
    if is_remote(address):
        file: LMDBFile = shared_cache().get(listed, LMDBFile)
        return _Shard(where, listed, listing_of(file, where, astuple(listed), options))
    file = LMDBFile(address)
    try:
        return _Shard(where, file, listing_of(file, where, file.written, options))
    except StoreError as error:
        if file.num_bytes < file.declared_bytes and "is damaged" in str(error):
            raise StoreError(
                f"{where} is truncated: {file.num_bytes} bytes, needs {file.declared_bytes}; copy it again"
            ) from error
        raise


def _list_beside(where: str) -> str:
    """Return the list of keys and labels next to a local LMDB: `labels.txt` in its folder, or `NAME.txt`."""
    if is_remote(where):
        return ""
    path = Path(where)
    if path.suffix in (".lmdb", ".mdb"):
        beside = path.with_suffix(".txt")
    else:
        beside = path.with_name(f"{path.name}.txt")
    return next(
        (str(file) for file in (path / _LIST_INSIDE, beside) if file.is_file()), ""
    )


class ForeignShards:
    """The shards of an open store."""

    groups = None

    def __init__(self, shards: Sequence[_Shard], target_column: str) -> None:
        self._shards = shards
        first = shards[0].listing
        for shard in shards[1:]:
            listing = shard.listing
            if (listing.layout, listing.label_type) != (first.layout, first.label_type):
                raise StoreError(
                    f"{shard.path} and {shards[0].path} differ: {listing.layout} with labels of type "
                    f"{listing.label_type or 'none'}, and {first.layout} with {first.label_type or 'none'}; all "
                    "LMDBs of one store must have the same"
                )
        self._offsets = np.cumsum([0, *(len(shard.listing.keys) for shard in shards)])
        self.classes, self._labels = _labels_of(shards)
        label_type = "int64" if self._labels[0] is not None else first.label_type
        self._is_scene_text = first.layout == "scene-text"
        self._label_type = "" if label_type == "string" else label_type
        fields = {"image": pa.binary()}
        if self._label_type:
            fields["label"] = _arrow_type(self._label_type)
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
        self.written = hash_of_facts([shard.file.written for shard in shards])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        values: dict[str, Any] = {name: [None] * len(indices) for name in columns}
        stored = set(columns)
        if "label" in values and self._labels[0] is not None:  # no value is read for it
            values["label"] = np.empty(len(indices), np.int64)
            stored.discard("label")
        for number, positions in by_part(indices, self._offsets):
            rows = indices[positions] - self._offsets[number]
            labels = self._labels[number]
            if labels is not None and "label" in values:
                values["label"][positions] = labels[rows]
            if stored:
                self._read_into(values, self._shards[number], positions, rows, stored)
        images = values.pop("image", None)
        if "label" in stored:
            values["label"] = _labels_as(self._label_type, values["label"])
        fields = [self.schema.field(name) for name in values]
        return Columns(images, pa.table(values, schema=pa.schema(fields)))

    def _read_into(
        self,
        values: dict[str, Any],
        shard: _Shard,
        positions: np.ndarray,
        rows: np.ndarray,
        stored: set[str],
    ) -> None:
        file = shard.open()
        value = shard.listing.value
        keys = shard.listing.keys.keys(rows)
        for position, key in zip(positions.tolist(), keys, strict=True):
            try:
                content = None
                if stored != {"key"}:
                    content = file.get(key)
                    if content is None:
                        continue  # keys around it are damaged: a bad sample
                sample: dict[str, Any] = {"image": content, "key": as_text(key)}
                if value is not None and content is not None:
                    sample["image"], label = value.read(content)
                    sample["label"] = label
                    sample["text"] = label if isinstance(label, str) else None
                if self._is_scene_text and "text" in stored:
                    text = file.get(b"label-" + key.removeprefix(b"image-"))
                    sample["text"] = None if text is None else as_text(bytes(text))
            except OSError as error:
                raise StoreError(f"{shard.path} cannot be read: {error}") from error
            except (StoreError, ValueError):
                continue  # this sample's place in the file, or its value, is damaged: a bad sample
            for name in stored:
                values[name][position] = sample.get(name)

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """Return whether the files of samples are on this node's disk."""
        return all(
            self._shards[number].is_at_hand()
            for number, _ in by_part(indices, self._offsets)
        )

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the keys of samples."""
        return self.read(indices, ("key",))["key"]

    def sample_name(self, index: int) -> str:
        number, within = part_of(self._offsets, index)
        shard = self._shards[number]
        key = shard.listing.keys.key(within)
        return f"{shard.path}, key {key.decode(errors='backslashreplace')}"


def _labels_of(
    shards: Sequence[_Shard],
) -> tuple[tuple[str, ...] | None, list[np.ndarray | None]]:
    """Return class names, and each shard's labels that are known without reading values."""
    listings = [shard.listing for shard in shards]
    if all(listing.classes is not None for listing in listings):
        classes = tuple(
            sorted({name for listing in listings for name in listing.classes or ()})
        )
        if all(listing.classes == classes for listing in listings):
            return classes, [listing.labels for listing in listings]
        rank = {name: number for number, name in enumerate(classes)}
        ranks = [
            np.array([rank[name] for name in listing.classes or ()], np.int64)
            for listing in listings
        ]
        return classes, [
            None if listing.labels is None else ranks_here[listing.labels]
            for ranks_here, listing in zip(ranks, listings, strict=True)
        ]
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


def _arrow_type(label_type: str) -> pa.DataType:
    if label_type.endswith("[]"):
        return pa.list_(arrow_type(label_type.removesuffix("[]")))
    return arrow_type(label_type)


def _labels_as(label_type: str, labels: list[Any]) -> pa.Array:
    """Return labels as Arrow; those that are missing, or of another type, have no value."""
    dtype, is_array, length = label_type.partition("[")
    kinds = (int,) if dtype == "int64" else (int, float)
    if not is_array:
        numbers = [label if _fits(label, kinds) else None for label in labels]
        return _numbers(dtype, numbers)
    lists = [
        label
        if isinstance(label, list)
        and length in ("]", f"{len(label)}]")
        and all(_fits(number, kinds) for number in label)
        else None
        for label in labels
    ]
    if length == "]":
        return pa.array(lists, pa.list_(arrow_type(dtype)))
    return arrow_column(label_type, lists)


def _numbers(dtype: str, numbers: list[Any]) -> pa.Array:
    is_null = np.array([number is None for number in numbers], bool)
    filled = [0 if number is None else number for number in numbers]
    return to_arrow(np.array(filled, dtype), is_null)


def _fits(label: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a label is a number of these types, and of 64 bits."""
    if isinstance(label, int):
        return -(1 << 63) <= label < 1 << 63
    return isinstance(label, kinds)
