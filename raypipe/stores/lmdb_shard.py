"""One LMDB file in raypipe's own layout, opened for reading."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.lmdb_pages import LMDBFile, RandomAccess
from raypipe.stores.metadata import NAME, Metadata
from raypipe.stores.record import RecordLayout

METADATA_KEY = NAME.encode()
KEY = struct.Struct(">Q")


def open_shard(path: Path | str, source: RandomAccess | None = None) -> Shard | None:
    """Open a file; None if it is sound as far as can be seen, and not raypipe's own.

    Args:
        path: a file, or an environment's folder; with `source`, its address.
        source: what is read instead of a local file.

    Raises:
        StoreError: the file is missing, damaged, truncated, or of another version.
    """
    file = LMDBFile(data_file(path), source)
    truncated = StoreError(
        f"{file.path} is truncated: {file.num_bytes} bytes, needs {file.declared_bytes}; copy or ingest it again"
    )
    is_whole = file.num_bytes >= file.declared_bytes
    try:
        metadata = file.get(METADATA_KEY)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    except StoreError:
        if is_whole:
            raise
        raise truncated from None
    if metadata is None:
        return None
    if not is_whole:
        raise truncated
    return Shard(path, file, metadata)


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
        self.layout = RecordLayout(found.types)
        self.count, self.classes, self.fingerprint = found.count, found.classes, found.fingerprint
        if file.num_entries != self.count + 1:
            raise StoreError(
                f"{path} holds {file.num_entries - 1} samples, but was written with {self.count}; ingest it again"
            )

    @property
    def types(self) -> dict[str, str]:
        return self.layout.types

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
