"""One LMDB file in raypipe's own layout: its reader, and its writer.

Keys are the index as big-endian uint64, values are records (see `raypipe.stores.record`), and the key
`__raypipe__` holds a JSON record: version, count, columns, classes, fingerprint. Nothing is pickled.

The lmdb library writes; `raypipe.stores.lmdb_pages` reads, since the library trusts its files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from raypipe.errors import StoreError
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.record import NAME, FileWriter, Metadata, RecordLayout

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = NAME.encode()
KEY = struct.Struct(">Q")

_FIRST_MAP_BYTES = 1 << 30  # it doubles as often as needed
_FLUSH_BYTES = 32 << 20  # a few hundred images per commit: the cost of a commit no longer shows


def open_shard(path: Path | str, source: pa.NativeFile | None = None) -> Shard | None:
    """Open a file; None if it is sound as far as can be seen, and not raypipe's own.

    Args:
        path: a file, or an environment's folder; with `source`, its address.
        source: what is read instead of a local file.

    Raises:
        StoreError: the file is missing, damaged, truncated, or of another version.
    """
    file = LMDBFile(data_file(path), source)
    is_whole = file.num_bytes >= file.declared_bytes
    try:
        metadata = file.get(METADATA_KEY)
        if metadata is None or is_whole:
            return None if metadata is None else Shard(path, file, metadata)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    except StoreError:
        if is_whole:
            raise
    raise StoreError(
        f"{file.path} is truncated: {file.num_bytes} bytes, needs {file.declared_bytes}; copy or ingest it again"
    )


def data_file(path: Path | str) -> Path | str:
    """The file of an environment, which may be a folder."""
    return path / "data.mdb" if isinstance(path, Path) and path.is_dir() else path


class Shard:
    """One open file of raypipe's own: how many samples it has, of which columns, and their records.

    Args:
        path: for errors.
        file: the file.
        metadata: its record.

    Raises:
        StoreError: the record is damaged, of another version, or does not fit the file.
    """

    def __init__(self, path: Path | str, file: LMDBFile, metadata: memoryview) -> None:
        self.path, self._file = path, file
        found = Metadata.from_json(bytes(metadata), f"{path} has a bad {NAME} record")
        self.layout, self.types = RecordLayout(found.types), found.types
        self.count, self.classes, self.fingerprint = found.count, found.classes, found.fingerprint
        if file.num_entries != self.count + 1:
            raise StoreError(
                f"{path} holds {file.num_entries - 1} samples, but was written with {self.count}; ingest it again"
            )

    def key(self, number: int) -> str:
        """That of a sample, for errors."""
        return str(number)

    def read_into(
        self, rows: list[dict[str, Any]], positions: list[int], keys: list[int], columns: tuple[str, ...]
    ) -> None:
        """Set rows[positions[i]] to the wanted columns of record keys[i].

        A record that is not there, or that damage has made unreadable, leaves its row as it is.

        Raises:
            StoreError: the file cannot be read at all.
        """
        for position, key in zip(positions, keys, strict=True):
            try:
                value = self._file.get(KEY.pack(key))
            except StoreError:
                continue  # a bad sample like any other: its place in the file is what is damaged
            except OSError as error:
                raise StoreError(f"{self.path} cannot be read at key {key}: {error}") from error
            if value is not None:
                rows[position] = self.layout.unpack(value, columns)


class LMDBWriter(FileWriter):
    """Writes one new LMDB file in raypipe's own layout, and leaves no lock file beside it."""

    failures = (lmdb.Error, OSError)

    def _begin(self) -> None:
        # No lock: this writer has just made the file, so nobody else can be in it. No sync before
        # the end: until __exit__ the file is worth nothing anyway.
        self._map_bytes = _FIRST_MAP_BYTES
        self._env = lmdb.open(str(self._path), subdir=False, lock=False, sync=False, map_size=self._map_bytes)
        self._count = self._pending_bytes = 0
        self._pending: list[tuple[bytes, bytes]] = []

    def _add(self, sample: Mapping[str, Any], record: bytes) -> None:
        self._pending.append((KEY.pack(self._count), record))
        self._count += 1
        self._pending_bytes += len(record)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def _finish(self) -> None:
        metadata = Metadata(self._count, self._layout.types, self._classes, self._fingerprint.hexdigest())
        self._pending.append((METADATA_KEY, metadata.to_json()))
        self._flush()
        # LMDB may count a page at the end that it then had no need to write; readers take a file that is
        # shorter than its pages for truncated.
        required_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if self._path.stat().st_size < required_bytes:
            os.truncate(self._path, required_bytes)
        self._env.sync(True)

    def _close(self) -> None:
        self._env.close()

    def _flush(self) -> None:
        """Commit what is pending, in a larger map if this one is full."""
        while self._pending:
            try:
                with self._env.begin(write=True) as txn:
                    for key, value in self._pending:
                        txn.put(key, value, append=True)
                self._pending.clear()
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._env.set_mapsize(self._map_bytes)
        self._pending_bytes = 0
