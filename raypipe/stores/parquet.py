"""Parquet stores: a file, or a folder of files, local or on any file system that pyarrow knows.

Two layouts are understood: flat, with the image column `binary`, and that of Hugging Face, with the
image column `struct{bytes: binary, path: string}`. A row group is the unit of reading, so a store
keeps the last ones decoded.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.files import open_input
from raypipe.storage.filesystem import explained, open_filesystem
from raypipe.storage.patience import Threads, one_line
from raypipe.stores.addresses import list_files
from raypipe.stores.arrow_columns import class_names, columns_of, is_hf_image, join, label_is_class, take
from raypipe.stores.base import Columns, FileStore, by_part, part_of
from raypipe.stores.parquet_pages import bounded

DEFAULT_CACHE_BYTES = 1 << 30  # more than a hundred groups of the 8 MiB that ParquetWriter makes

_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # uint32 size of the footer, then the magic
_NUM_FOOTER_THREADS = 16  # a remote footer takes two round trips; a store may have thousands


class ParquetStore(FileStore["_Groups"]):
    """A store in Parquet files, sorted by name, that all have one schema.

    Null images are None, and so is text that is not UTF-8; null labels raise StoreError. The fingerprint is a hash
    over the files' footers: schema, rows, sizes, positions and statistics. It does not cover the data, except in
    files by `ParquetWriter`, whose footers contain a hash of the data. It includes the names of the image and
    label columns if these are not the defaults.

    Args:
        address: path or URI of a file or folder.
        image_column: the column that becomes `image`.
        label_column: the column of numbers, or of lists of them, that becomes `label`; integers are classes. A
            file without a column `label` is a store without labels; any other name must be there.
        cache_bytes: decoded row groups that this object keeps; the last one always stays.
    """

    _has_lock = True

    def __init__(
        self,
        address: str | Path,
        image_column: str = "image",
        label_column: str = "label",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        super().__init__(address, image_column, label_column, cache_bytes)

    def _open(self) -> _Groups:
        return _Groups(self.address, *self._options)

    def forwards(self) -> ParquetStore:
        """The same store for a single pass from one end to the other: it keeps one row group."""
        image_column, label_column, _ = self._options
        return ParquetStore(self.address, image_column, label_column, cache_bytes=0)


class _Group(NamedTuple):
    """One row group: which file, and which of its groups."""

    path: str
    metadata: pq.FileMetaData
    number: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


class _Groups:
    """The row groups of the files that have rows, as one sequence; the last used ones are decoded."""

    def __init__(self, address: str, image_column: str, label_column: str, cache_bytes: int) -> None:
        files = list_files(address, lambda name: name.endswith(".parquet"), "*.parquet")
        with explained(StoreError, f"{address} cannot be opened"):
            self._filesystem, _ = open_filesystem(address)
            paths = [open_filesystem(file.address)[1] for file in files]
        with Threads(_NUM_FOOTER_THREADS) as pool:
            footers = list(pool.map(lambda path: _read_footer(self._filesystem, path), paths))
        digest, first = hashlib.blake2b(digest_size=16), None
        self._groups: list[_Group] = []
        for path, footer in zip(paths, footers, strict=True):
            metadata, schema, sizes = _parse_footer(path, footer)
            if first is None:
                first, self.classes = schema, class_names(schema, label_column)
            elif not schema.equals(first) or class_names(schema, label_column) != self.classes:
                raise StoreError(f"{path} and {paths[0]} differ in schema or classes: a store has one schema")
            self._groups += (_Group(path, metadata, number, size) for number, size in enumerate(sizes) if size)
            digest.update(len(footer).to_bytes(8, "little") + footer)
        if (image_column, label_column) != ("image", "label"):  # other columns are other contents
            digest.update(repr((image_column, label_column)).encode())
        self._fields = columns_of(paths[0], first, image_column, label_column)
        self.columns, self.fingerprint = tuple(self._fields), digest.hexdigest()
        self.label_is_class = label_is_class(self._fields)
        self.groups = np.cumsum([0, *(group.num_rows for group in self._groups)], dtype=np.int64)
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, str], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.groups[-1])

    def num_bytes(self) -> int:
        """Of the columns that are held now."""
        return sum(column.get_total_buffer_size() for column in self._cache.values())

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        parts: dict[str, list[Any]] = {name: [] for name in columns}
        for number, positions in by_part(indices, self.groups):
            decoded = self._decoded(number, columns)
            for name in columns:
                where = f"{self._groups[number].path}, column {self._fields[name].name!r}"
                rows = indices[positions] - self.groups[number]
                parts[name].append(take(decoded[name], rows, name == "label", where))
        places = np.argsort(np.argsort(indices, kind="stable"))
        return {name: join(parts[name], places, self._fields[name].type, name == "label") for name in columns}

    def sample_name(self, index: int) -> str:
        number, row = part_of(self.groups, index)
        return f"{self._groups[number]}, row {row}"

    def _decoded(self, number: int, names: tuple[str, ...]) -> dict[str, pa.ChunkedArray]:
        """Return columns of a row group, which become the last used."""
        with self._lock:
            missing = [name for name in names if (number, name) not in self._cache]
            self._cache.update({(number, name): column for name, column in self._load(number, missing).items()})
            for name in names:
                self._cache.move_to_end((number, name))
            found = {name: self._cache[number, name] for name in names}
            while len(self._cache) > len(found) and self.num_bytes() > self._cache_bytes:
                self._cache.popitem(last=False)
            return found

    def _load(self, number: int, names: list[str]) -> dict[str, pa.ChunkedArray]:
        if not names:
            return {}
        group = self._groups[number]
        fields = {name: self._fields[name] for name in names}
        # Of a Hugging Face image, the bytes alone: the paths would be decoded for nothing.
        leaves = [f"{f.name}.bytes" if is_hf_image(name, f) else f.name for name, f in fields.items()]
        try:
            with open_input(self._filesystem, group.path) as file:
                bytes_of, in_dictionaries = bounded(file, group.metadata, group.number, leaves)
                options = {"metadata": group.metadata, "read_dictionary": in_dictionaries}
                # What it reads is there, column by column: it must not ask for several at a time.
                reader = pq.ParquetFile(bytes_of, pre_buffer=False, **options)
                # One thread: a reader inside an actor has the CPUs of that actor and no more.
                table = reader.read_row_group(group.number, columns=leaves, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StoreError(f"{group}, cannot be read: {one_line(error)}; copy or convert it again") from error
        except StoreError as error:  # over a limit
            raise StoreError(f"{group}: {error}") from error
        if table.num_rows != group.num_rows:
            raise StoreError(
                f"{group}, has {table.num_rows} rows, but declares {group.num_rows}; copy or convert it again"
            )
        return {
            name: pc.struct_field(table[f.name], "bytes") if is_hf_image(name, f) else table[f.name]
            for name, f in fields.items()
        }


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


def _parse_footer(path: str, footer: bytes) -> tuple[pq.FileMetaData, pa.Schema, list[int]]:
    """Return what a footer says about the file, the schema, and the rows of each row group."""
    # A footer between two magics is itself a Parquet file, one without data.
    file = _MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC
    try:
        parsed = pq.read_metadata(pa.BufferReader(file))
        sizes = [parsed.row_group(number).num_rows for number in range(parsed.num_row_groups)]
        if min(sizes, default=0) < 0 or sum(sizes) != parsed.num_rows:
            raise ValueError(
                f"{parsed.num_rows} rows, in row groups of {sum(sizes)}, the smallest of {min(sizes, default=0)}"
            )
        return parsed, parsed.schema.to_arrow_schema(), sizes
    except (pa.ArrowException, OSError, ValueError) as error:  # also UnicodeDecodeError, of a column's name
        raise StoreError(f"{path} has a broken footer: {error}; copy or convert it again") from error
