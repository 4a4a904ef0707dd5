"""LMDB as a `ray.data.Dataset`, which Ray Data itself does not read.

store → ranges of its samples → one ReadTask for each, a generator of blocks of a few MB
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.data.extensions import ArrowTensorArray

from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.stores import open_store, store_options
from raypipe.stores.base import Columns, missing, name_of
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.scan import SIZE_COLUMNS, mean_image_bytes
from raypipe.transform.decode.array import header_size

if TYPE_CHECKING:
    from ray.data import Dataset

MADE_COLUMNS = ("index", "name", "class_name", *SIZE_COLUMNS)
"""Columns that need not be stored: the sample's index in the store, its file and key, the name of its class, and
the image's size in pixels by its header, -1 if the header cannot be read."""

# Made column → the stored one that it is made of.
_NEEDS = {"class_name": "label", "width": "image", "height": "image"}
_BLOCK_BYTES = 32 << 20
_MAX_ROWS = 1 << 16  # a block without images has up to so many


def read_lmdb(
    path: str | Path | LMDBStore,
    *,
    columns: Sequence[str] | None = None,
    target_column: str = "label",
    trust_pickles: bool = False,
    override_num_blocks: int | None = None,
    **read_options: Any,
) -> Dataset:
    """Return an LMDB store, raypipe's own or of another program, as a `ray.data.Dataset`, read in parallel.

    Args:
        path: its address, as `raypipe.open_store` takes it; or the open store.
        columns: names of columns: those of the store, and `index`, `name` (file and key), `class_name`, `width`
            and `height`; None = those of the store.
        target_column, trust_pickles: see `StoreConfig`, of a store that is given by its address.
        override_num_blocks: number of read tasks; None = Ray Data's choice, by the size of the store.
        read_options: others of `ray.data.read_datasource`, such as `concurrency` or `ray_remote_args`.

    Raises:
        StoreError, ConfigError: the store or a column is wrong.
    """
    source = LMDBDatasource(
        path, columns=columns, target_column=target_column, trust_pickles=trust_pickles
    )
    return ray.data.read_datasource(
        source, override_num_blocks=override_num_blocks, **read_options
    )


class LMDBDatasource(Datasource):
    """An LMDB store for `ray.data.read_datasource`; the arguments are those of `read_lmdb`."""

    def __init__(
        self,
        path: str | Path | LMDBStore,
        *,
        columns: Sequence[str] | None = None,
        target_column: str = "label",
        trust_pickles: bool = False,
    ) -> None:
        super().__init__()
        options = store_options(
            target_column=target_column, trust_pickles=trust_pickles
        )
        store = path if isinstance(path, LMDBStore) else open_store(path, **options)
        if not isinstance(store, LMDBStore):
            raise ConfigError(
                f"{path} is not LMDB: see ray.data.read_parquet, read_webdataset and read_images"
            )
        self._store = store
        stored = self._store.stored.names
        self._columns = tuple(stored if columns is None else columns)
        available = (*stored, *MADE_COLUMNS)
        for name in self._columns:
            if name not in available:
                raise ConfigError(missing(self._store.address, name, available))
        if "class_name" in self._columns and not self._store.classes:
            raise ConfigError(
                f"{self._store.address} has no class names: leave class_name out of the columns"
            )
        self._row_bytes = 16 * max(1, len(self._columns))
        if "image" in self._columns:
            with contextlib.suppress(StoreError):
                self._row_bytes += mean_image_bytes(self._store)

    def estimate_inmemory_data_size(self) -> int:
        return len(self._store) * self._row_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        num = max(1, min(parallelism, len(self._store)))
        bounds = np.linspace(0, len(self._store), num + 1).astype(np.int64).tolist()
        rows = max(1, min(_MAX_ROWS, _BLOCK_BYTES // self._row_bytes))
        schema = self._table(np.arange(min(1, len(self._store)))).schema
        return [
            ReadTask(
                functools.partial(_blocks, self._table, start, stop, rows),
                BlockMetadata(
                    num_rows=stop - start,
                    size_bytes=(stop - start) * self._row_bytes,
                    input_files=(self._store.address,),
                    exec_stats=None,
                ),
                schema=schema,
                per_task_row_limit=per_task_row_limit,
            )
            for start, stop in pairwise(bounds)
        ]

    def _table(self, indices: np.ndarray) -> pa.Table:
        stored = self._store.stored.names
        needed = [
            name if name in stored else _NEEDS.get(name) for name in self._columns
        ]
        read = self._store.read(indices, tuple(dict.fromkeys(filter(None, needed))))
        return pa.table(
            {name: self._column(name, read, indices) for name in self._columns}
        )

    def _column(self, name: str, read: Columns, indices: np.ndarray) -> Any:
        """Return a column of a block, which is stored or made."""
        if name in self._store.stored.names:
            return _arrow(read, name)
        if name == "index":
            return indices
        if name == "name":
            names = [name_of(self._store, index) for index in indices.tolist()]
            return pa.array(names, pa.string())
        if name == "class_name":
            classes = dict(enumerate(self._store.classes or ()))
            return pa.array(map(classes.get, read["label"]), pa.string())
        number = SIZE_COLUMNS.index(name)
        return np.array([_size_of(image)[number] for image in read["image"]], np.int64)


def _blocks(table: Any, start: int, stop: int, rows: int) -> Iterator[pa.Table]:
    for first in range(start, stop, rows):
        yield table(np.arange(first, min(stop, first + rows)))


def _size_of(image: bytes | memoryview | None) -> tuple[int, int]:
    """Return width and height of an encoded image; -1 if its header cannot be read."""
    with contextlib.suppress(SampleError, ConfigError):
        return header_size(image, False)[::-1]
    return -1, -1


def _arrow(columns: Columns, name: str) -> pa.Array | pa.ChunkedArray:
    """Return a column of a block; arrays of one shape become tensors."""
    if name == "image":
        return pa.array(columns.images, pa.large_binary())
    column = columns.table[name]
    if pa.types.is_string(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_binary(column.type):
        return column.cast(pa.large_binary())
    values = columns[name] if pa.types.is_fixed_size_list(column.type) else None
    if isinstance(values, np.ndarray):
        return ArrowTensorArray.from_numpy(values)
    return column
