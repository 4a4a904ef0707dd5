"""Parquet files: their footers, which tell all of them but their rows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.filesystem import explained, open_filesystem, open_input
from raypipe.stores.addresses import list_files

_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # uint32 size of the footer, then the magic
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
class ParquetFile:
    """A file's path in its file system, its footer as it stands there, and what that says."""

    path: str
    footer: bytes
    metadata: pq.FileMetaData
    schema: pa.Schema

    def groups(self) -> list[Group]:
        """Its row groups that have rows."""
        groups = [Group(self.path, self.metadata, number) for number in range(self.metadata.num_row_groups)]
        return [group for group in groups if group.num_rows]


def read_files(address: str) -> tuple[pafs.FileSystem, list[ParquetFile]]:
    """Read all footers at an absolute path or URI.

    Raises:
        StoreError: no file, or a broken one.
    """
    files = list_files(address, lambda name: name.endswith(".parquet"), "*.parquet")
    with explained(StoreError, f"{address} cannot be opened"):
        filesystem, _ = open_filesystem(address)
        paths = [open_filesystem(file.address)[1] for file in files]
    with ThreadPoolExecutor(_NUM_FOOTER_THREADS) as pool:
        footers = list(pool.map(lambda path: _read_footer(filesystem, path), paths))
    return filesystem, [_parse_footer(path, footer) for path, footer in zip(paths, footers, strict=True)]


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


def _parse_footer(path: str, footer: bytes) -> ParquetFile:
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
    try:
        schema = parsed.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} has a broken schema: {error}; copy or ingest it again") from error
    return ParquetFile(path, footer, parsed, schema)


def columns_of(file: ParquetFile, image_column: str, label_column: str) -> dict[str, pa.Field]:
    """Name in the store → field in the file, `image` and `label` first; raises StoreError where those are none."""
    path, schema = file.path, file.schema
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


def class_names(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    """The names in the label's ClassLabel of Hugging Face, None without one; older files leave out its `_type`."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label_column]
        if feature.get("_type", "ClassLabel") != "ClassLabel":
            return None
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
