"""Writers of new files in raypipe's own LMDB layout, see `raypipe.stores.lmdb`, and in flat Parquet.

Writers write where they are told; `raypipe.stores.destination` makes sure that a store is whole or not there.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.stores.record import (
    DEFAULT_COLUMNS,
    KEY,
    METADATA_KEY,
    ColumnValues,
    Fingerprint,
    Metadata,
    RecordLayout,
    array_type,
)

# A group of Parquet is what one read costs at least: big enough for throughput, small enough to shuffle well.
GROUP_BYTES = 8 << 20
_FIRST_MAP_BYTES = 1 << 30  # of LMDB: it doubles as often as needed


class FileWriter(ABC):
    """Writes one new file, sample after sample.

    A writer is a context manager. Leaving it normally finishes the file; leaving it by an exception removes it.

    Args:
        path: the file to make; it must not exist.
        columns: all columns, name → int64, float64, binary, string, or an array's `float32[512]`, in order; None
            for `image` and `label`.
        classes: class names, position = label; None where there are none.
    """

    batch_bytes: ClassVar[int]
    """Records of so many bytes are written at a time."""

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._path = Path(path)
        self._layout = RecordLayout(DEFAULT_COLUMNS if columns is None else columns)
        self._classes = None if classes is None else tuple(classes)
        self._fingerprint = Fingerprint(self._layout.types, self._classes)
        self._batch: list[tuple[ColumnValues, bytes]] = []
        self._num_bytes = self._count = 0

    @property
    def fingerprint(self) -> str:
        """Of what has been written so far."""
        return self._fingerprint.hexdigest()

    def __enter__(self) -> Self:
        with self._explained("made"):
            self._path.open("xb").close()
            try:
                self._open()
            except BaseException:
                self._path.unlink()
                raise
        return self

    def append(self, sample: ColumnValues) -> None:
        """Add one sample with exactly the declared columns; None is allowed in binary and string ones."""
        record = self._layout.pack(sample)
        self._fingerprint.add(record)
        self._batch.append((dict(sample), record))
        self._num_bytes += len(record)
        if self._is_full():
            with self._explained("written"):
                self._flush()

    def __exit__(self, *exc: object) -> None:
        finished = False
        try:
            if exc[0] is None:
                with self._explained("written"):
                    self._flush()
                    self._finish()
                finished = True
        finally:
            self._close()
            if not finished:
                self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, pa.ArrowException, OSError) as error:
            raise StoreError(f"{self._path} cannot be {what}: {error}") from error

    def _is_full(self) -> bool:
        return self._num_bytes >= self.batch_bytes

    def _flush(self) -> None:
        if self._batch:
            self._write(self._batch)
        self._count += len(self._batch)
        self._batch, self._num_bytes = [], 0

    @abstractmethod
    def _open(self) -> None:
        """Open the file, which is there and empty."""

    @abstractmethod
    def _write(self, batch: Sequence[tuple[ColumnValues, bytes]]) -> None:
        """Add samples, each with its record, behind the `_count` that are there."""

    @abstractmethod
    def _finish(self) -> None:
        """Put all on the disk."""

    @abstractmethod
    def _close(self) -> None:
        """Close the file, finished or not."""


class LMDBWriter(FileWriter):
    """Writes one new LMDB file in raypipe's own layout, and leaves no lock file beside it."""

    batch_bytes = 32 << 20  # a few hundred images per commit: the cost of a commit no longer shows

    def _open(self) -> None:
        # No lock: this writer has just made the file, so nobody else can be in it. No sync before
        # the end: until then the file is worth nothing anyway.
        self._env = lmdb.open(str(self._path), subdir=False, lock=False, sync=False, map_size=_FIRST_MAP_BYTES)

    def _write(self, batch: Sequence[tuple[ColumnValues, bytes]]) -> None:
        self._put([(KEY.pack(number), record) for number, (_, record) in enumerate(batch, self._count)])

    def _finish(self) -> None:
        metadata = Metadata(self._count, self._layout.types, self._classes, self.fingerprint)
        self._put([(METADATA_KEY, metadata.to_json())])
        # LMDB may count a page at the end that it then had no need to write; readers take a file that is
        # shorter than its pages for truncated.
        required_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if self._path.stat().st_size < required_bytes:
            os.truncate(self._path, required_bytes)
        self._env.sync(True)

    def _close(self) -> None:
        self._env.close()

    def _put(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Commit entries, in a larger map if this one is full."""
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    for key, value in entries:
                        txn.put(key, value, append=True)
                return
            except lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])


class ParquetWriter(FileWriter):
    """Writes one new Parquet file in the flat layout.

    The class names go into the schema's metadata as a Hugging Face ClassLabel, and a hash of all
    samples into the footer.

    Args:
        path, columns, classes: see `FileWriter`.
        row_group_size: samples per row group; None for as many as make up about 8 MiB.
    """

    batch_bytes = GROUP_BYTES

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
        types = self._layout.types
        self._schema = pa.schema([(name, _arrow_type(kind)) for name, kind in types.items()])
        if classes is not None and types.get("label") == "int64":
            features: dict[str, Any] = {
                name: {"dtype": kind, "_type": "Value"} for name, kind in types.items() if array_type(kind) is None
            }
            features["label"] = {"names": list(classes), "_type": "ClassLabel"}
            about = json.dumps({"info": {"features": features}})
            self._schema = self._schema.with_metadata({"huggingface": about})

    def _is_full(self) -> bool:
        return len(self._batch) == self._row_group_size if self._row_group_size else super()._is_full()

    def _open(self) -> None:
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

    def _write(self, batch: Sequence[tuple[ColumnValues, bytes]]) -> None:
        columns = {name: [_listed(sample[name]) for sample, _ in batch] for name in self._schema.names}
        self._writer.write_table(pa.table(columns, schema=self._schema))

    def _finish(self) -> None:
        self._writer.add_key_value_metadata({"raypipe.fingerprint": self.fingerprint})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _close(self) -> None:
        # What is still buffered goes into a file that is about to be removed.
        with contextlib.suppress(pa.ArrowException, OSError):
            self._writer.close()
        self._file.close()


def _arrow_type(kind: str) -> Any:
    """Arrow's type of a column; it calls all but arrays the same."""
    if (array := array_type(kind)) is None:
        return kind
    dtype, shape = array
    arrow_type = pa.from_numpy_dtype(dtype.newbyteorder("="))
    for side in reversed(shape):
        arrow_type = pa.list_(arrow_type, side)
    return arrow_type


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


_WRITERS: dict[str, type[FileWriter]] = {".lmdb": LMDBWriter, ".parquet": ParquetWriter}
WRITTEN_SUFFIXES = tuple(_WRITERS)
"""Of the files that `open_writer` makes."""


def open_writer(path: str | Path, *args: Any, **options: Any) -> FileWriter:
    """Return the writer, not yet entered, for a new file, `.lmdb` or `.parquet`; see there for arguments."""
    suffix = Path(path).suffix
    if suffix not in _WRITERS:
        raise StoreError(f"{path} cannot be written: the suffix must be one of {', '.join(_WRITERS)}")
    return _WRITERS[suffix](path, *args, **options)
