"""Writers of new files in raypipe's own LMDB layout, see `raypipe.stores.lmdb`, and in flat Parquet.

Writers write directly to the path they get; `raypipe.stores.destination` makes the whole store appear atomically.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import lmdb
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.stores.base import ColumnValues
from raypipe.stores.record import (
    DEFAULT_COLUMNS,
    KEY,
    METADATA_KEY,
    Fingerprint,
    Metadata,
    RecordLayout,
    arrow_column,
    schema_of,
)

# A Parquet row group is the least that one read costs: large enough for throughput, small enough to shuffle well.
ROW_GROUP_BYTES = 8 << 20
_FIRST_MAP_BYTES = 1 << 30  # LMDB's map; it doubles as often as needed


class FileWriter(ABC):
    """Writes one new file, sample after sample.

    A writer is a context manager. Leaving it normally finishes the file; an exception removes the file.

    Args:
        path: the file to make; it must not exist.
        columns: all columns, name → int64, float64, binary, string, or an array such as `float32[512]`, in order;
            None = `image` and `label`.
        classes: class names, position = label; None = no names.

    Attributes:
        layout: layout of the records.
        num_written: samples in the file.
    """

    batch_bytes: ClassVar[int]
    """Bytes of records that are written at a time."""

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._path = Path(path)
        self.layout = RecordLayout(DEFAULT_COLUMNS if columns is None else columns)
        self._classes = None if classes is None else tuple(classes)
        self._fingerprint = Fingerprint(self.layout.types, self._classes)
        self._batch: list[bytes] = []
        self._num_bytes = 0
        self._batch_size: int | None = None
        self.num_written = 0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the samples so far."""
        return self._fingerprint.hexdigest()

    def __enter__(self) -> Self:
        with self._explained():
            self._path.open("xb").close()
            try:
                self._open()
            except BaseException:
                self._path.unlink()
                raise
        return self

    def append(self, sample: ColumnValues) -> None:
        """Add one sample with exactly the declared columns; binary and string values may be None."""
        self.append_record(self.layout.pack(sample))

    def append_record(self, record: bytes) -> None:
        """Add one sample by its record, see `raypipe.stores.record`."""
        self._fingerprint.add(record)
        self._batch.append(record)
        self._num_bytes += len(record)
        is_full = self._num_bytes >= self.batch_bytes
        if self._batch_size:
            is_full = len(self._batch) == self._batch_size
        if is_full:
            with self._explained():
                self._flush()

    def __exit__(self, *exc: object) -> None:
        finished = False
        try:
            if exc[0] is None:
                with self._explained():
                    self._flush()
                    self._finish()
                finished = True
        finally:
            self._close()
            if not finished:
                self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, pa.ArrowException, OSError) as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error

    def _flush(self) -> None:
        if self._batch:
            self._write(self._batch)
        self.num_written += len(self._batch)
        self._batch = []
        self._num_bytes = 0

    @abstractmethod
    def _open(self) -> None:
        """Open the file, which exists and is empty."""

    @abstractmethod
    def _write(self, batch: Sequence[bytes]) -> None:
        """Add records after the first `num_written`."""

    @abstractmethod
    def _finish(self) -> None:
        """Write everything to the disk."""

    @abstractmethod
    def _close(self) -> None:
        """Close the file, finished or not."""


class LMDBWriter(FileWriter):
    """Writes one new LMDB file in raypipe's own layout, without a lock file."""

    batch_bytes = 32 << 20  # a few hundred images per commit make its cost negligible

    def _open(self) -> None:
        # No lock, since this writer has just made the file and nobody else can have it open. No sync before the
        # end, since the file is useless until then.
        self._env = lmdb.open(
            str(self._path),
            subdir=False,
            lock=False,
            sync=False,
            map_size=_FIRST_MAP_BYTES,
        )

    def _write(self, batch: Sequence[bytes]) -> None:
        self._put(
            [
                (KEY.pack(number), record)
                for number, record in enumerate(batch, self.num_written)
            ]
        )

    def _finish(self) -> None:
        metadata = Metadata(
            self.num_written, self.layout.types, self._classes, self.fingerprint
        )
        self._put([(METADATA_KEY, metadata.to_json())])
        # LMDB may count a page at the end that it never wrote, and readers would consider the file truncated.
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
                    txn.cursor().putmulti(entries, append=True)
                return
            except lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])


class ParquetWriter(FileWriter):
    """Writes one new Parquet file in the flat layout.

    The schema's metadata contains the class names as a Hugging Face ClassLabel. The footer contains a hash of all
    samples.

    Args:
        path, columns, classes: see `FileWriter`.
        row_group_size: samples per row group; None = about 8 MiB of samples.
    """

    batch_bytes = ROW_GROUP_BYTES

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
        self._batch_size = row_group_size
        self._schema = schema_of(self.layout.types, classes)

    def _open(self) -> None:
        # Images, mostly JPEGs, do not compress, and their statistics would repeat whole images.
        small = [name for name in self._schema.names if name != "image"]
        self._file = self._path.open("wb")
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression={
                name: "none" if name == "image" else "zstd"
                for name in self._schema.names
            },
            use_dictionary=small,
            write_statistics=small,
        )

    def _write(self, batch: Sequence[bytes]) -> None:
        names = self._schema.names
        samples = [self.layout.unpack(memoryview(record), names) for record in batch]
        columns = {
            name: arrow_column(kind, [sample.get(name) for sample in samples])
            for name, kind in self.layout.types.items()
        }
        self._writer.write_table(pa.table(columns, schema=self._schema))

    def _finish(self) -> None:
        self._writer.add_key_value_metadata({"raypipe.fingerprint": self.fingerprint})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _close(self) -> None:
        # An unfinished file is about to be removed, so errors in flushing it do not matter.
        with contextlib.suppress(pa.ArrowException, OSError):
            self._writer.close()
        self._file.close()


_WRITERS: dict[str, type[FileWriter]] = {".lmdb": LMDBWriter, ".parquet": ParquetWriter}
WRITTEN_SUFFIXES = tuple(_WRITERS)
"""Suffixes of the files that `open_writer` makes."""


def open_writer(path: str | Path, *args: Any, **options: Any) -> FileWriter:
    """Return the writer, not yet entered, for a new file `.lmdb` or `.parquet`; the writer takes the arguments."""
    suffix = Path(path).suffix
    if suffix not in _WRITERS:
        raise StoreError(
            f"{path} cannot be written: the suffix must be one of {', '.join(_WRITERS)}"
        )
    return _WRITERS[suffix](path, *args, **options)
