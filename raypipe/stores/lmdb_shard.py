"""One LMDB file in raypipe's own layout, opened for reading.

LMDB maps its file into memory, and that has consequences here:

- One process may open a file once only, and a fork must not use its parent's environments. So open
  shards are shared by all stores of a process, and a forked child forgets those it inherited.
- Reading a page beyond the end of a truncated file kills the process (SIGBUS). So the size of the
  file is checked before the first read.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import lmdb

from raypipe.errors import StoreError
from raypipe.stores.record import RecordLayout

METADATA_KEY = b"__raypipe__"
VERSION = 1
KEY = struct.Struct(">Q")

# A freed read transaction is kept for the next read; more than a few threads per process never read.
MAX_SPARE_TXNS = 4


class Shard:
    """One open environment. It closes when the last store that holds it lets go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._env = _open_environment(path)
        try:
            with self._env.begin() as txn:
                metadata = txn.get(METADATA_KEY)
                num_entries = txn.stat()["entries"]
        except lmdb.Error as error:
            raise StoreError(f"{path} is damaged: {error}; copy or ingest it again") from error
        if metadata is None:
            raise StoreError(
                f"{path} has no {METADATA_KEY.decode()} record: its layout is not raypipe's. LSUN and other "
                "layouts are not read yet, and pickled values are never unpickled; ingest it from its source"
            )
        try:
            self._parse(json.loads(metadata))
        except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
            raise StoreError(f"{path} has a bad {METADATA_KEY.decode()} record: {error}") from error
        if num_entries != self.count + 1:
            raise StoreError(
                f"{path} holds {num_entries - 1} samples, but was written with {self.count}; ingest it again"
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
        """Set rows[positions[i]] to the wanted columns of record keys[i], in one transaction."""
        key = keys[0]
        try:
            with self._env.begin(buffers=True) as txn:
                for position, key in zip(positions, keys, strict=True):
                    value = txn.get(KEY.pack(key))
                    if value is not None:
                        rows[position] = self.layout.unpack(value, columns)
        except lmdb.Error as error:
            raise StoreError(f"{self.path} is damaged at key {key}: {error}; ingest it again") from error

    def close(self) -> None:
        self._env.close()


def _open_environment(path: Path) -> lmdb.Environment:
    """Open an environment for reading, and make sure that the file holds all of its pages."""
    file = path / "data.mdb" if path.is_dir() else path
    try:
        num_bytes = file.stat().st_size
        env = lmdb.open(
            str(path),
            subdir=path.is_dir(),
            create=False,
            readonly=True,
            lock=False,  # stores are never written again, so readers need no table of readers
            readahead=False,  # neighbours in the file are not neighbours in a shuffled epoch
            meminit=False,
            max_spare_txns=MAX_SPARE_TXNS,
        )
        required_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{file} cannot be opened as LMDB: {error}; copy or ingest it again") from error
    if num_bytes < required_bytes:
        env.close()
        raise StoreError(
            f"{file} is truncated: {num_bytes} bytes, needs {required_bytes}; copy or ingest it again"
        )
    return env


_open_shards: weakref.WeakValueDictionary[tuple[int, ...], Shard] = weakref.WeakValueDictionary()
_open_lock = threading.Lock()


def open_shard(path: Path) -> Shard:
    """Return the process's shard for the file that is at this path now."""
    file = path / "data.mdb" if path.is_dir() else path
    try:
        status = file.stat()
    except OSError as error:
        raise StoreError(f"{file} cannot be opened as LMDB: {error}") from error
    # Not the path: it may lead to another file by now, when the store was ingested again.
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    with _open_lock:
        shard = _open_shards.get(identity)
        if shard is None:
            shard = _open_shards[identity] = Shard(path)
        return shard


def _forget_inherited_shards() -> None:
    """In a forked child: close the environments that are the parent's, so that they can be opened anew."""
    global _open_lock
    _open_lock = threading.Lock()  # another thread of the parent may have held the old one
    for shard in list(_open_shards.values()):
        shard.close()
    _open_shards.clear()


os.register_at_fork(after_in_child=_forget_inherited_shards)
