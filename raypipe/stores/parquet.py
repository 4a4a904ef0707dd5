"""Parquet stores: a file, or a folder of files, local or on any of pyarrow's file systems.

The image column has one of two layouts: bytes, or Hugging Face's `struct{bytes, path}`. A row group is the unit of
reading, so a store keeps the last used row groups decoded. Files with paths instead of images are a table, see
`raypipe.stores.tables`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.files import open_input, read_by, version_of
from raypipe.storage.filesystem import errors_as, open_filesystem
from raypipe.storage.read_limit import check_read, read_limit
from raypipe.storage.retries import error_reason, in_threads
from raypipe.stores.addresses import list_files
from raypipe.stores.arrow_columns import TableColumns, chunked_taker
from raypipe.stores.arrow_values import is_bytes, is_text, take
from raypipe.stores.base import Columns, FileStore, PartedStore, hash_of_facts
from raypipe.stores.tables import ListedFiles, read_tables

# more than a hundred groups of the 8 MiB that ParquetWriter makes
DEFAULT_CACHE_BYTES = 1 << 30
# 1 / fraction of cache_bytes that views of images may keep in memory after their row groups have left the cache. A
# window of 10 groups of 8 MiB needs a third of it.
_VIEWED = 4

_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # uint32 size of the footer, then the magic

# Most bytes of a row group's images that are read to see whether there are any; rows without one take almost none.
_LOOKED_AT = 1 << 20

_VALUE_BYTES = 8  # least unpacked size of a value: equal values may take almost nothing in the file


class ParquetStore(FileStore["_Groups | ListedFiles"]):
    """A store in Parquet files with one schema, sorted by name.

    Null images, and text that is not UTF-8, are None; null labels raise StoreError. The fingerprint is a hash over
    the files' footers: schema, rows, sizes, positions and statistics. It does not cover the data, except in files
    that `ParquetWriter` wrote, whose footers contain a hash of the data. It includes the names of the image and
    label columns if they are not the defaults.

    Args:
        address: path or URI of a file or folder.
        image_column: the column that becomes `image`; or that has its paths, see `TableStore`.
        target_column: the column of numbers, or of lists of numbers, that becomes `label`; integers are classes.
            The store has no labels if its files lack `label`; a column of any other name must exist. Empty = no
            label is needed: one of another type is left out, and null labels are None.
        cache_bytes: size of the decoded row groups that this object keeps; the last used always stays. Images of
            one read, while in use, may keep up to a quarter of it in addition.
    """

    _has_lock = True

    def __init__(
        self,
        address: str | Path,
        image_column: str = "image",
        target_column: str = "label",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        super().__init__(address, image_column, target_column, cache_bytes)

    def _open(self) -> _Groups | ListedFiles:
        files = list_files(
            self.address, lambda name: name.endswith(".parquet"), "*.parquet"
        )
        with errors_as(StoreError, f"{self.address} cannot be opened"):
            filesystem, _ = open_filesystem(self.address)
            paths = [open_filesystem(file.address)[1] for file in files]
        footers = in_threads(lambda path: _footer_of(filesystem, path), paths)
        if _have_only_paths(filesystem, footers, self._options[0]):
            return read_tables(self.address, files, *self._options[:2])
        return _Groups(filesystem, footers, *self._options)

    def forwards(self) -> ParquetStore:
        """Return the same store for a single pass from start to end, which keeps only one row group."""
        image_column, target_column, _ = self._options
        return ParquetStore(self.address, image_column, target_column, cache_bytes=0)


class _Footer(NamedTuple):
    """The footer of a file.

    Attributes:
        content: its bytes, whose hash no release of pyarrow changes.
        version: the file's version.
        num_rows: the rows of each row group.
    """

    path: str
    content: bytes
    version: str
    metadata: pq.FileMetaData
    schema: pa.Schema
    num_rows: list[int]


class _Group(NamedTuple):
    """A row group of a file."""

    path: str
    metadata: pq.FileMetaData
    number: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


class _Column(NamedTuple):
    """A column of a row group, in memory: a function that takes rows, int64 (n,), and its size."""

    take: Callable[[np.ndarray], Any]
    num_bytes: int


def _column_of(name: str, column: pa.ChunkedArray) -> _Column:
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    taker: Callable[[np.ndarray], Any] = partial(take, column)
    if name == "image":
        taker = chunked_taker(column)
    elif is_number and column.num_chunks == 1 and not column.null_count:
        # NumPy takes rows in a third of Arrow's time
        taker = column.chunk(0).to_numpy().__getitem__
    return _Column(taker, column.get_total_buffer_size())


class _Groups(PartedStore, TableColumns):
    """The row groups that have rows, as one sequence; the last used row groups stay decoded."""

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        footers: Sequence[_Footer],
        image_column: str,
        target_column: str,
        cache_bytes: int,
    ) -> None:
        self._filesystem = filesystem
        self.written = hash_of_facts([footer.version for footer in footers])
        self._groups = [
            _Group(footer.path, footer.metadata, number, num_rows)
            for footer in footers
            for number, num_rows in enumerate(footer.num_rows)
            if num_rows
        ]
        schemas = [(footer.path, footer.schema) for footer in footers]
        TableColumns.__init__(self, schemas, image_column, target_column)
        digest = hashlib.blake2b(digest_size=16)
        for footer in footers:
            digest.update(len(footer.content).to_bytes(8, "little") + footer.content)
        if (image_column, target_column or "label") != ("image", "label"):
            digest.update(repr((image_column, target_column)).encode())
        self.fingerprint = digest.hexdigest()
        sizes = [group.num_rows for group in self._groups]
        self.groups = self.offsets = np.cumsum([0, *sizes], dtype=np.int64)
        self._cache_bytes = cache_bytes
        self._cache: dict[tuple[int, tuple[str, ...]], dict[str, _Column]] = {}
        self._lock = threading.Lock()
        # bytes of the groups of which one read, in its thread, has views
        self._viewed = threading.local()

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        def path_of(row: int) -> str:
            return self._groups[self.part_of(int(indices[row]))[0]].path

        self._viewed.num_bytes = 0
        found = super().read(indices, tuple(columns))
        return Columns(found.images, self.table_of(found.table, path_of))

    def _read(
        self, number: int, rows: np.ndarray, columns: tuple[str, ...]
    ) -> dict[str, Any]:
        group = self._columns(number, columns)
        found = {name: column.take(rows) for name, column in group.items()}
        if "image" in group:
            self._viewed.num_bytes += group["image"].num_bytes
            # A single view keeps its whole group in memory.
            if self._viewed.num_bytes > self._cache_bytes // _VIEWED:
                views = found["image"]
                found["image"] = [
                    view if view is None else bytes(view) for view in views
                ]
        return found

    def num_bytes(self) -> int:
        """Return the bytes of the columns in the cache."""
        groups = self._cache.values()
        return sum(column.num_bytes for group in groups for column in group.values())

    def sample_name(self, index: int) -> str:
        number, row = self.part_of(index)
        return f"{self._groups[number]}, row {row}"

    def _columns(self, number: int, names: tuple[str, ...]) -> dict[str, _Column]:
        """Return columns of a row group, which become the last used."""
        with self._lock:
            columns = self._cache.pop((number, names), None)
            is_new = columns is None
            if columns is None:
                columns = self._load(number, names)
            self._cache[number, names] = columns
            while (
                is_new and len(self._cache) > 1 and self.num_bytes() > self._cache_bytes
            ):
                self._cache.pop(next(iter(self._cache)))
            return columns

    def _load(self, number: int, names: tuple[str, ...]) -> dict[str, _Column]:
        if not names:
            return {}
        group = self._groups[number]
        # Only the bytes of a Hugging Face image are read, not its path.
        leaves = [self.stored_path(name) for name in names]
        _check_size(group, leaves)

        def read(file: pa.NativeFile) -> pa.Table:
            # Pages that have a checksum are compared with it; pyarrow's default leaves damage unnoticed.
            reader = pq.ParquetFile(
                file,
                metadata=group.metadata,
                pre_buffer=True,
                page_checksum_verification=True,
            )
            # One thread, since a reader inside an actor only has that actor's CPUs.
            return reader.read_row_group(
                group.number, columns=leaves, use_threads=False
            )

        try:
            table = read_by(self._filesystem, group.path, read)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StoreError(
                f"{group}: cannot be read: {error_reason(error)}; copy or convert it again"
            ) from error
        if table.num_rows != group.num_rows:
            raise StoreError(
                f"{group}: has {table.num_rows} rows, but declares {group.num_rows}; copy or convert it again"
            )
        return {
            name: _column_of(name, self.opened(name, table[self.fields[name].name]))
            for name in names
        }


def _have_only_paths(
    filesystem: pafs.FileSystem, footers: Sequence[_Footer], image_column: str
) -> bool:
    """Return whether the image column has no images or, if there is none, no column could have them."""
    schema = footers[0].schema
    if image_column not in schema.names:
        return not any(is_bytes(kind) or kind.num_fields for kind in schema.types)
    kind = schema.field(image_column).type
    if is_text(kind):
        return True
    if not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        return False
    if not any(footer.metadata.num_rows for footer in footers):
        return False
    is_named = partial(_is_only_named, filesystem, image_column)
    # images end it at the first file
    return is_named(footers[0]) and all(in_threads(is_named, footers[1:]))


class _SmallReads:
    """A file of which a read of more than `_LOOKED_AT` bytes is a ValueError.

    Attributes:
        error: the error of the file itself; None = it had none.
    """

    error: Exception | None = None

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_buffer(self, num_bytes: int) -> pa.Buffer:
        if num_bytes > _LOOKED_AT:
            raise ValueError("these are not rows without a value")
        try:
            return self._file.read_buffer(num_bytes)
        except (pa.ArrowException, OSError) as error:
            self.error = error
            raise

    read = read_buffer


def _is_only_named(
    filesystem: pafs.FileSystem, image_column: str, footer: _Footer
) -> bool:
    """Return whether a file's images of Hugging Face's layout have paths, and no bytes.

    Where none has bytes, these take a moment to read. The footer would tell as well, but pyarrow ends the process
    at the statistics of a damaged one.
    """
    groups = map(footer.metadata.row_group, range(footer.metadata.num_row_groups))
    if any(group.total_byte_size > read_limit() for group in groups):
        return False

    def has_none(file: pa.NativeFile) -> bool:
        reads = _SmallReads(file)
        try:
            reader = pq.ParquetFile(
                pa.PythonFile(reads, mode="r"), metadata=footer.metadata
            )
            batches = reader.iter_batches(
                columns=[f"{image_column}.bytes"], use_threads=False
            )
            return all(
                pc.struct_field(batch.column(0), "bytes").null_count == batch.num_rows
                for batch in batches
            )
        except (pa.ArrowException, OSError, ValueError):
            if reads.error:
                raise reads.error from None
            return False  # to read the images is an error that names the row group

    with errors_as(StoreError, f"{footer.path} cannot be read"):
        return read_by(filesystem, footer.path, has_none)


def _check_size(group: _Group, leaves: list[str]) -> None:
    """Raise StoreError if, by the footer, columns of a row group unpack to more than the limit."""
    row_group = group.metadata.row_group(group.number)
    unpacked = _VALUE_BYTES * row_group.num_rows * len(leaves)
    stored = 0
    if row_group.total_byte_size + unpacked <= read_limit():
        return
    starts = tuple(f"{leaf}." for leaf in leaves)
    for number in range(row_group.num_columns):
        path = group.metadata.schema.column(number).path
        if path in leaves or path.startswith(starts):
            column = row_group.column(number)
            unpacked += column.total_uncompressed_size
            stored += column.total_compressed_size
    check_read(
        f"{group}: its columns",
        unpacked,
        stored,
        "write smaller row groups (row_group_size=1000)",
    )


def _footer_of(filesystem: pafs.FileSystem, path: str) -> _Footer:
    try:
        with open_input(filesystem, path) as file:
            num_bytes = file.size()
            tail = file.read_at(_TAIL_BYTES, max(0, num_bytes - _TAIL_BYTES))
            start = num_bytes - _TAIL_BYTES - int.from_bytes(tail[:4], "little")
            if tail[4:] != _MAGIC or start < len(_MAGIC):
                raise StoreError(
                    f"{path} is truncated or not Parquet: no footer at its end; copy it again"
                )
            check_read(f"{path}: its footer", num_bytes - _TAIL_BYTES - start)
            content = file.read_at(num_bytes - _TAIL_BYTES - start, start)
            version = version_of(file, filesystem, path)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path} cannot be read as Parquet: {error}") from error
    try:
        # A footer between two magics is itself a Parquet file, without data.
        parsed = pq.read_metadata(pa.BufferReader(_MAGIC + content + tail))
        num_rows = [
            parsed.row_group(number).num_rows for number in range(parsed.num_row_groups)
        ]
        least = min(num_rows, default=0)
        if least < 0 or sum(num_rows) != parsed.num_rows:
            raise ValueError(
                f"{parsed.num_rows} rows, in row groups of {sum(num_rows)}, the smallest of {least}"
            )
        schema = parsed.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError) as error:
        # includes UnicodeDecodeError for a column's name
        raise StoreError(
            f"{path} has a broken footer: {error}; copy or convert it again"
        ) from error
    return _Footer(path, content, version, parsed, schema, num_rows)
