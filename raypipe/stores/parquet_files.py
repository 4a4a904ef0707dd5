"""Parquet files: their footers, put together as one dataset before any row is read; and their writer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.files import open_input
from raypipe.storage.filesystem import explained, open_filesystem
from raypipe.stores.addresses import list_files
from raypipe.stores.record import FileWriter

_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # uint32 size of the footer, then the magic
# A group is what one read costs at least: big enough for throughput, small enough to shuffle well.
GROUP_BYTES = 8 << 20
_ARROW_TYPES = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "binary": pa.binary(),
    "string": pa.string(),
}
_NUM_FOOTER_THREADS = 16  # a remote footer takes two round trips; a store may have thousands


@dataclass(frozen=True)
class Group:
    """One row group: which file, and which of its groups."""

    path: str
    metadata: pq.FileMetaData
    row_group: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.row_group}"

    @property
    def num_rows(self) -> int:
        return self.metadata.row_group(self.row_group).num_rows


@dataclass(frozen=True)
class Dataset:
    """Parquet files of one schema, as one sequence of row groups.

    Attributes:
        filesystem: where the files are.
        columns: name in the store → field in the files; `image` and `label` first.
        classes: class names from the label's Hugging Face feature, None without one.
        groups: all row groups that have rows, in order.
        offsets: int64 of shape (num_groups + 1,), the first sample of each group, and the end.
        fingerprint: hash over the files' footers: schema, rows, sizes, positions and statistics, not the data, but
            for files by `ParquetWriter`, which have a hash of the data there; and over the names of the image and
            label columns, where they are others.
    """

    filesystem: pafs.FileSystem
    columns: dict[str, pa.Field]
    classes: tuple[str, ...] | None
    groups: list[Group]
    offsets: np.ndarray
    fingerprint: str


def open_dataset(address: str, image_column: str, label_column: str) -> Dataset:
    """Read all footers at an absolute path or URI.

    Raises:
        StoreError: no file, a broken file, files of different schemas, or a column that is missing or
            of an unusable type.
    """
    files = list_files(address, lambda name: name.endswith(".parquet"), "*.parquet")
    with explained(StoreError, f"{address} cannot be opened"):
        filesystem, _ = open_filesystem(address)
        paths = [open_filesystem(file.address)[1] for file in files]
    with ThreadPoolExecutor(_NUM_FOOTER_THREADS) as pool:
        footers = list(pool.map(lambda path: _read_footer(filesystem, path), paths))
    metadata = [_parse_footer(path, footer) for path, footer in zip(paths, footers, strict=True)]

    schema = _arrow_schema(paths[0], metadata[0])
    classes = _class_names(schema, label_column)
    for path, other in zip(paths[1:], metadata[1:], strict=True):
        other_schema = _arrow_schema(path, other)
        if not other_schema.equals(schema) or _class_names(other_schema, label_column) != classes:
            raise StoreError(f"{path} and {paths[0]} differ in schema or classes: a store has one schema")

    groups = [
        group
        for path, parsed in zip(paths, metadata, strict=True)
        for group in (Group(path, parsed, number) for number in range(parsed.num_row_groups))
        if group.num_rows
    ]
    digest = hashlib.blake2b(digest_size=16)
    for footer in footers:
        digest.update(len(footer).to_bytes(8, "little") + footer)
    if (image_column, label_column) != ("image", "label"):  # other columns are other contents
        digest.update(repr((image_column, label_column)).encode())
    return Dataset(
        filesystem=filesystem,
        columns=_columns(paths[0], schema, image_column, label_column),
        classes=classes,
        groups=groups,
        offsets=np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64),
        fingerprint=digest.hexdigest(),
    )


def _read_footer(filesystem: pafs.FileSystem, path: str) -> bytes:
    """Return the footer as it stands in the file, so that its hash does not depend on pyarrow's version."""
    try:
        with open_input(filesystem, path) as file:
            num_bytes = file.size()
            tail = file.read_at(_TAIL_BYTES, max(0, num_bytes - _TAIL_BYTES))
            start = num_bytes - _TAIL_BYTES - int.from_bytes(tail[:4], "little")
            if tail[4:] != _MAGIC or start < len(_MAGIC):
                raise StoreError(f"{path} is truncated or no Parquet: no footer at its end; copy it again")
            return file.read_at(num_bytes - _TAIL_BYTES - start, start)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} cannot be read as Parquet: {error}") from error


def _parse_footer(path: str, footer: bytes) -> pq.FileMetaData:
    # A footer between two magics is itself a Parquet file, one without data.
    file = _MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC
    try:
        parsed = pq.read_metadata(pa.BufferReader(file))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's name
        raise StoreError(f"{path} has a broken footer: {error}; copy or ingest it again") from error
    sizes = [parsed.row_group(row_group).num_rows for row_group in range(parsed.num_row_groups)]
    if min(sizes, default=0) < 0 or sum(sizes) != parsed.num_rows:
        raise StoreError(
            f"{path} has a broken footer: {parsed.num_rows} rows, in row groups of {sum(sizes)}, the smallest of "
            f"{min(sizes, default=0)}; copy or ingest it again"
        )
    return parsed


def _arrow_schema(path: str, metadata: pq.FileMetaData) -> pa.Schema:
    try:
        return metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} has a broken schema: {error}; copy or ingest it again") from error


def _columns(path: str, schema: pa.Schema, image_column: str, label_column: str) -> dict[str, pa.Field]:
    """Return the store's columns, after checking that image and label are of usable types."""
    there = ", ".join(schema.names)
    renamed = {"image": image_column, "label": label_column}
    columns: dict[str, pa.Field] = {}
    for name, stored in renamed.items():
        if stored in schema.names:
            columns[name] = schema.field(stored)
        elif name == "image" or stored != "label":
            raise StoreError(f"{path} has no column {stored!r} for {name}, only: {there}; set {name}_column")
    image = columns["image"].type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not (pa.types.is_binary(image) or pa.types.is_large_binary(image)):
        raise StoreError(
            f"{path}, column {image_column!r} has type {columns['image'].type}; an image is binary, "
            "large_binary or struct{bytes, path}"
        )
    if "label" in columns and not pa.types.is_integer(columns["label"].type):
        raise StoreError(
            f"{path}, column {label_column!r} has type {columns['label'].type}; a label is an integer; "
            "set label_column"
        )
    extra = (column for column in schema if column.name not in renamed.values())
    for column in extra:
        columns.setdefault(column.name, column)
    return columns


def _class_names(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    """Return the names in the label's ClassLabel feature. Older files leave the feature's `_type` out."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label_column]
        if feature.get("_type", "ClassLabel") != "ClassLabel":
            return None
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


class ParquetWriter(FileWriter):
    """Writes one new Parquet file in the flat layout.

    The class names go into the schema's metadata as a Hugging Face ClassLabel, and a hash of all
    samples into the footer.

    Args:
        path, columns, classes: see `FileWriter`.
        row_group_size: samples per row group; None for as many as make up about 8 MiB.
    """

    failures = (pa.ArrowException, OSError)

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        row_group_size: int | None = None,
    ) -> None:
        super().__init__(path, columns, classes)
        if row_group_size is not None and row_group_size < 1:
            raise ValueError(f"row_group_size must be at least 1, not {row_group_size}")
        self._row_group_size = row_group_size
        self._schema = _schema(self._layout.types, classes)
        self._pending: list[Mapping[str, Any]] = []
        self._pending_bytes = 0

    def _begin(self) -> None:
        # Of images (JPEGs, mostly) there is nothing to compress, and statistics would repeat whole ones.
        small = [name for name in self._schema.names if name != "image"]
        self._file = self._path.open("wb")
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression={name: "none" if name == "image" else "zstd" for name in self._schema.names},
            use_dictionary=small,
            write_statistics=small,
        )

    def _add(self, sample: Mapping[str, Any], record: bytes) -> None:
        self._pending.append(dict(sample))
        self._pending_bytes += len(record)
        if len(self._pending) == self._row_group_size or (
            self._row_group_size is None and self._pending_bytes >= GROUP_BYTES
        ):
            self._flush()

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if pending:
            columns = {name: [sample[name] for sample in pending] for name in self._schema.names}
            self._writer.write_table(pa.table(columns, schema=self._schema))

    def _finish(self) -> None:
        self._flush()
        self._writer.add_key_value_metadata({"raypipe.fingerprint": self._fingerprint.hexdigest()})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _close(self) -> None:
        # What is still buffered goes into a file that is about to be removed.
        with contextlib.suppress(pa.ArrowException, OSError):
            self._writer.close()
        self._file.close()


def _schema(types: Mapping[str, str], classes: Sequence[str] | None) -> pa.Schema:
    schema = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in types.items()])
    if classes is None or "label" not in types:
        return schema
    features: dict[str, Any] = {name: {"dtype": kind, "_type": "Value"} for name, kind in types.items()}
    features["label"] = {"names": list(classes), "_type": "ClassLabel"}
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
