"""One LMDB file in raypipe's own layout, opened for reading."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.record import RecordLayout

METADATA_KEY = b"__raypipe__"
VERSION = 1
KEY = struct.Struct(">Q")

# What parsing damaged metadata raises: OverflowError for a count of 1e999, RecursionError for a thousand brackets.
_BAD_METADATA = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, StoreError)


class Shard:
    """One open file: how many samples it has, of which columns, and their records.

    Args:
        path: a file, or an environment's folder.

    Raises:
        StoreError: the file is missing, damaged, truncated, of another layout or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = file = LMDBFile(path / "data.mdb" if path.is_dir() else path)
        if file.num_bytes < file.declared_bytes:
            raise StoreError(
                f"{file.path} is truncated: {file.num_bytes} bytes, needs {file.declared_bytes}; "
                "copy or ingest it again"
            )
        try:
            metadata = file.get(METADATA_KEY)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        if metadata is None:
            raise StoreError(
                f"{path} has no {METADATA_KEY.decode()} record: its layout is not raypipe's. LSUN and other "
                "layouts are not read yet, and pickled values are never unpickled; ingest it from its source"
            )
        try:
            self._parse(json.loads(bytes(metadata)))
        except _BAD_METADATA as error:
            raise StoreError(f"{path} has a bad {METADATA_KEY.decode()} record: {error}") from error
        if file.num_entries != self.count + 1:
            raise StoreError(
                f"{path} holds {file.num_entries - 1} samples, but was written with {self.count}; ingest it again"
            )

    def _parse(self, metadata: dict[str, Any]) -> None:
        if metadata["version"] != VERSION:
            raise StoreError(f"version {metadata['version']}; this raypipe reads version {VERSION}")
        self.count = int(metadata["count"])
        self.layout = RecordLayout({str(column["name"]): column["type"] for column in metadata["columns"]})
        classes = metadata["classes"]
        self.classes = None if classes is None else tuple(str(name) for name in classes)
        self.fingerprint = str(metadata["fingerprint"])

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
