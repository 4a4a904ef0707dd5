"""Parquet stores: a file, or a folder of files, local or on any file system that pyarrow knows.

Two layouts are understood: flat, with the image column `binary`, and that of Hugging Face, with the
image column `struct{bytes: binary, path: string}`. A row group is the unit of reading, so a store
keeps the last ones decoded.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.files import open_input
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, FileStore, part_of
from raypipe.stores.parquet_files import Dataset, open_dataset
from raypipe.stores.parquet_pages import bounded

DEFAULT_CACHE_BYTES = 1 << 30  # more than a hundred groups of the 8 MiB that ParquetWriter makes


class ParquetStore(FileStore["_Groups"]):
    """A store in Parquet files, sorted by name, that all have one schema.

    Null images are None, text that is no UTF-8 as well; null labels raise StoreError.

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
        image_column, label_column, cache_bytes = self._options
        return _Groups(open_dataset(self.address, image_column, label_column), cache_bytes)

    @property
    def _contents(self) -> _Groups:
        if self._opened is not None and self._opened.pid != os.getpid():
            self.close()  # in a forked child, since its parent's lock may have been held
        return super()._contents

    def cached_bytes(self) -> int:
        """Return the size of the decoded row groups held now."""
        return 0 if self._opened is None else self._opened.num_bytes

    def forwards(self) -> ParquetStore:
        """The same store for one who goes through it once, from one end to the other: it keeps one row group."""
        image_column, label_column, _ = self._options
        return ParquetStore(self.address, image_column, label_column, cache_bytes=0)


class _Groups:
    """The row groups of an open dataset, the last used ones decoded."""

    def __init__(self, dataset: Dataset, cache_bytes: int) -> None:
        self._dataset, self._cache_bytes, self.num_bytes = dataset, cache_bytes, 0
        self.columns, self.classes = tuple(dataset.columns), dataset.classes
        self.groups, self.fingerprint = dataset.offsets, dataset.fingerprint
        self._cache: OrderedDict[int, dict[str, pa.ChunkedArray]] = OrderedDict()
        self._lock = threading.Lock()
        self.pid = os.getpid()

    def __len__(self) -> int:
        return int(self.groups[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        # Each group is visited once: its rows stand together in `order`.
        order = np.argsort(indices, kind="stable")
        bounds = np.searchsorted(indices[order], self.groups)
        parts: dict[str, list[Any]] = {name: [] for name in columns}
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = indices[order[bounds[group] : bounds[group + 1]]] - self.groups[group]
            decoded = self._decoded(group, columns)
            for name in columns:
                where = f"{self._dataset.groups[group].path}, column {self._dataset.columns[name].name!r}"
                parts[name].append(_take(decoded[name], rows, name == "label", where))
        places = np.argsort(order, kind="stable")  # where in `order` each asked-for sample stands
        return {
            name: _join(parts[name], places, self._dataset.columns[name].type, name == "label") for name in columns
        }

    def sample_name(self, index: int) -> str:
        number, row = part_of(self.groups, index)
        return f"{self._dataset.groups[number]}, row {row}"

    def _decoded(self, number: int, names: Iterable[str]) -> dict[str, pa.ChunkedArray]:
        """Return columns of a row group, maybe with others that were asked for earlier."""
        with self._lock:
            held = self._cache.pop(number, {})
            self.num_bytes -= _num_bytes(held)  # it comes back as the last used
            held |= self._load(number, [name for name in names if name not in held])
            self._cache[number] = held
            self.num_bytes += _num_bytes(held)
            while self.num_bytes > self._cache_bytes and len(self._cache) > 1:
                _, evicted = self._cache.popitem(last=False)
                self.num_bytes -= _num_bytes(evicted)
            return held

    def _load(self, number: int, names: list[str]) -> dict[str, pa.ChunkedArray]:
        if not names:
            return {}
        group = self._dataset.groups[number]
        fields = {name: self._dataset.columns[name] for name in names}
        # Of a Hugging Face image, the bytes alone: the paths would be decoded for nothing.
        leaves = [f"{f.name}.bytes" if _is_hf_image(name, f) else f.name for name, f in fields.items()]
        try:
            with open_input(self._dataset.filesystem, group.path) as file:
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


def _num_bytes(columns: dict[str, pa.ChunkedArray]) -> int:
    return sum(column.get_total_buffer_size() for column in columns.values())


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


def _join(parts: list[Any], places: np.ndarray, kind: pa.DataType, is_label: bool) -> Any:
    """Put the parts, one per group, together in the order asked for."""
    if not _is_number(kind):
        values = [value for part in parts for value in part]
        return [values[place] for place in places.tolist()]
    joined = np.concatenate(parts)[places] if parts else np.empty(0, kind.to_pandas_dtype())
    return joined.astype(np.int64) if is_label else joined
