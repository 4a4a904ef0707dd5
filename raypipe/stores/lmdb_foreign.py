"""Contents of LMDB files that other programs wrote, read in place; `raypipe.stores.lmdb_listing` has the layouts.

Columns are `image`; `label`, numbers from the values, from a list of keys, or from the keys' folders; `text`, if
the labels are text; and `key`. A value that is damaged, or cannot be parsed, is a bad sample.
"""

from __future__ import annotations

import itertools
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
from raypipe.stores.base import (
    Columns,
    as_text,
    by_part,
    hash_of_facts,
    join_fingerprints,
    missing,
    part_of,
)
from raypipe.stores.lmdb_file import LMDBFile, Shard, Shards
from raypipe.stores.lmdb_listing import Listing, Options, listing_of
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
    return _Shard(where, file, listing_of(file, where, file.written, options))


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

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        values: dict[str, Any] = {name: [None] * len(indices) for name in columns}
        stored = set(columns)
        if "label" in values and self._labels[0] is not None:  # no value is read for it
            values["label"] = np.empty(len(indices), np.int64)
            stored.discard("label")
        for number, positions in by_part(indices, self.offsets):
            rows = indices[positions] - self.offsets[number]
            labels = self._labels[number]
            if labels is not None and "label" in values:
                values["label"][positions] = labels[rows]
            if stored:
                self._read_into(values, self.shards[number], positions, rows, stored)
        images = values.pop("image", None)
        if "label" in stored:
            values["label"] = _labels_as(
                self.schema.field("label").type, values["label"]
            )
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
        keys = shard.listing.keys.take(pa.array(rows)).to_pylist()
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
