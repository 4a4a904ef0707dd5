"""Parquet stores: a file, or a folder of files, local or on any file system that pyarrow knows.

Two layouts are understood: flat, with the image column `binary`, and that of Hugging Face, with the
image column `struct{bytes: binary, path: string}`. A row group is the unit of reading, so a store
keeps the last ones decoded.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.filesystem import open_input
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, FileStore, part_of
from raypipe.stores.parquet_files import class_names, columns_of, read_files
from raypipe.stores.parquet_pages import bounded

DEFAULT_CACHE_BYTES = 1 << 30  # more than a hundred groups of the 8 MiB that ParquetWriter makes


class ParquetStore(FileStore["_Groups"]):
    """A store in Parquet files, sorted by name, that all have one schema.

    Null images are None, text that is no UTF-8 as well; null labels raise StoreError. The fingerprint is a hash
    over the files' footers: schema, rows, sizes, positions and statistics, not the data, but for files by
    `ParquetWriter`, which have a hash of the data there; and over the names of the image and label columns, where
    they are others.

    Args:
        address: path or URI of a file or folder.
        image_column: the column that becomes `image`.
        label_column: the column, of any integer type, that becomes `label`. A file without a column
            `label` is a store without labels; any other name must be there.
        cache_bytes: decoded row groups that this object keeps; the last one always stays.
    """

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

    @property
    def _contents(self) -> _Groups:
        if self._opened is not None and self._opened.pid != os.getpid():
            self.close()  # in a forked child, since its parent's lock may have been held
        return super()._contents

    def forwards(self) -> ParquetStore:
        """The same store for one who goes through it once, from one end to the other: it keeps one row group."""
        image_column, label_column, _ = self._options
        return ParquetStore(self.address, image_column, label_column, cache_bytes=0)


class _Groups:
    """The row groups of the files, as one sequence; the last used ones are decoded."""

    def __init__(self, address: str, image_column: str, label_column: str, cache_bytes: int) -> None:
        self._filesystem, files = read_files(address)
        first, digest = files[0], hashlib.blake2b(digest_size=16)
        self._fields = columns_of(first, image_column, label_column)
        self.columns, self.classes = tuple(self._fields), class_names(first.schema, label_column)
        for file in files:
            if not file.schema.equals(first.schema) or class_names(file.schema, label_column) != self.classes:
                raise StoreError(
                    f"{file.path} and {first.path} differ in schema or classes: a store has one schema"
                )
            digest.update(len(file.footer).to_bytes(8, "little") + file.footer)
        if (image_column, label_column) != ("image", "label"):  # other columns are other contents
            digest.update(repr((image_column, label_column)).encode())
        self.fingerprint = digest.hexdigest()
        self._groups = [group for file in files for group in file.groups()]
        self.groups = np.cumsum([0, *(group.num_rows for group in self._groups)], dtype=np.int64)
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, str], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()
        self.pid = os.getpid()

    def __len__(self) -> int:
        return int(self.groups[-1])

    def num_bytes(self) -> int:
        """Of the columns that are held now."""
        return sum(column.get_total_buffer_size() for column in self._cache.values())

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        # Each group is visited once: its rows stand together in `order`.
        order = np.argsort(indices, kind="stable")
        bounds = np.searchsorted(indices[order], self.groups)
        parts: dict[str, list[Any]] = {name: [] for name in columns}
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = indices[order[bounds[group] : bounds[group + 1]]] - self.groups[group]
            decoded = self._decoded(group, columns)
            for name in columns:
                where = f"{self._groups[group].path}, column {self._fields[name].name!r}"
                parts[name].append(_take(decoded[name], rows, name == "label", where))
        return {name: _join(parts[name], order, self._fields[name].type, name == "label") for name in columns}

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
        leaves = [f"{f.name}.bytes" if _is_hf_image(name, f) else f.name for name, f in fields.items()]
        try:
            with open_input(self._filesystem, group.path) as file:
                bytes_of, in_dictionaries = bounded(file, group.metadata, group.row_group, leaves)
                options = {"metadata": group.metadata, "read_dictionary": in_dictionaries}
                # What it reads is there, column by column: it must not ask for several at a time.
                reader = pq.ParquetFile(bytes_of, pre_buffer=False, **options)
                # One thread: a reader inside an actor has the CPUs of that actor and no more.
                table = reader.read_row_group(group.row_group, columns=leaves, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())  # pyarrow's have several lines
            raise StoreError(f"{group}, cannot be read: {reason}; copy or ingest it again") from error
        except StoreError as error:  # over a limit
            raise StoreError(f"{group}: {error}") from error
        if table.num_rows != group.num_rows:
            raise StoreError(
                f"{group}, has {table.num_rows} rows, but declares {group.num_rows}; copy or ingest it again"
            )
        return {
            name: pc.struct_field(table[f.name], "bytes") if _is_hf_image(name, f) else table[f.name]
            for name, f in fields.items()
        }


def _is_hf_image(name: str, column: pa.Field) -> bool:
    return name == "image" and pa.types.is_struct(column.type)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _take(column: pa.ChunkedArray, rows: np.ndarray, is_label: bool, where: str) -> Any:
    """Return the rows of a column: numbers as an array, other values as a list."""
    if not _is_number(column.type):
        return [_python_value(column[row]) for row in rows.tolist()]
    taken = column.take(pa.array(rows))
    if is_label and taken.null_count:
        raise StoreError(f"{where}: a label is null; training on a made-up one would not be noticed")
    return taken.to_numpy()


def _python_value(scalar: pa.Scalar) -> Any:
    """Return the value; None for text that is no UTF-8, as from a damaged record, and for a list over 512 MiB."""
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar) and _num_bytes_of(scalar.values) > MAX_SAMPLE_BYTES:
        return None
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def _num_bytes_of(values: pa.Array | None) -> int:
    """The most that values may take in Python, where each of a dictionary's may be all that is in it."""
    if values is None:
        return 0
    if pa.types.is_nested(values.type):
        return sum(map(_num_bytes_of, values.flatten() if pa.types.is_struct(values.type) else [values.flatten()]))
    if pa.types.is_dictionary(values.type):
        return len(values) * values.dictionary.nbytes
    return values.nbytes


def _join(parts: list[Any], order: np.ndarray, kind: pa.DataType, is_label: bool) -> Any:
    """Put the parts, one per group, together as they were asked for: value i of them all belongs to order[i]."""
    if not _is_number(kind):
        values = [None] * len(order)
        for position, value in zip(order.tolist(), (value for part in parts for value in part), strict=True):
            values[position] = value
        return values
    joined = np.concatenate(parts)[np.argsort(order)] if parts else np.empty(0, kind.to_pandas_dtype())
    return joined.astype(np.int64) if is_label else joined
