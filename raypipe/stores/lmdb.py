"""LMDB stores: one single-file environment, or a folder of them as shards, here or in an object store.

Shards in an object store are opened by ranged reads of their metadata; records come through the node's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, opened
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.stores.addresses import list_files
from raypipe.stores.base import Columns, FileStore, image_and_label_first, part_of
from raypipe.stores.lmdb_foreign import ForeignShard
from raypipe.stores.lmdb_shard import Shard, open_shard

_NUM_THREADS = 16  # a shard's metadata take about six round trips; a store may have thousands of shards


class LMDBStore(FileStore["_Shards"]):
    """A store in one LMDB file, an LMDB environment folder, or a folder of `*.lmdb` shards, local or remote.

    Shards are sorted by name and concatenated; they must agree in columns and classes. Those of a remote store
    are read through the node's cache, see `raypipe.storage.local_cache`. Numbers of a missing or damaged record
    are 0, the rest None.

    Args:
        address: a path or URI.
        layout: of local files that are not raypipe's own: "auto" = found out, or a name, see
            `raypipe.stores.lmdb_foreign`.
    """

    def __init__(self, address: str | Path, layout: str = "auto") -> None:
        super().__init__(address, layout)

    def _open(self) -> _Shards:
        if is_remote(self.address):
            self._found = self._found or _open_remote(self.address)
            return _Shards(self._found)
        files = [RemoteFile(self.address)] if Path(self.address, "data.mdb").exists() else _files(self.address)
        paths = [Path(file.address) for file in files]
        return _Shards([open_shard(path) or ForeignShard(path, *self._options) for path in paths])

    def close(self) -> None:
        super().close()
        if self._found:
            shared_cache().close([shard.file for shard in self._found])


class _Shards:
    """Open shards. A forked child goes on with its parent's: nothing in them moves while they are read."""

    groups = None

    def __init__(self, shards: Sequence[Shard | ForeignShard | RemoteShard]) -> None:
        self._shards, self._types = shards, shards[0].types
        self.columns, self.classes = image_and_label_first(self._types), shards[0].classes
        for shard in shards[1:]:
            if (shard.types, shard.classes) != (self._types, self.classes):
                raise StoreError(
                    f"{shard.path} and {shards[0].path} differ in columns or classes; "
                    "all shards of one store have the same"
                )
        self._offsets = np.cumsum([0] + [shard.count for shard in shards], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """That of a single file, as written or as `ForeignShard` has it; for shards, the hash over theirs."""
        if len(self._shards) == 1:
            return self._shards[0].fingerprint
        return hashlib.blake2b("".join(s.fingerprint for s in self._shards).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        # Keys in ascending order walk the tree and the file forwards; results go where they were asked for.
        order = np.argsort(indices, kind="stable")
        bounds = np.searchsorted(indices[order], self._offsets)
        rows: list[dict[str, Any]] = [{}] * len(indices)
        for number, shard in enumerate(self._shards):
            positions = order[bounds[number] : bounds[number + 1]]
            if positions.size:
                keys = indices[positions] - self._offsets[number]
                shard.read_into(rows, positions.tolist(), keys.tolist(), columns)
        return {
            name: np.array([row.get(name, 0) for row in rows], self._types[name])
            if self._types[name] in ("int64", "float64")
            else [row.get(name) for row in rows]
            for name in columns
        }

    def sample_name(self, index: int) -> str:
        number, within = part_of(self._offsets, index)
        return f"{self._shards[number].path}, key {self._shards[number].key(within)}"


def _files(address: str) -> list[RemoteFile]:
    what = "data.mdb of an LMDB environment, and no *.lmdb"
    return list_files(address, lambda name: name.endswith(".lmdb"), what, folders=True)


@dataclass(frozen=True)
class RemoteShard:
    """What a Shard is, of one that is not here. Nothing of it is downloaded before its first record is read.

    Attributes:
        file: the object.
        count, types, classes, fingerprint: as its metadata have them.
    """

    file: RemoteFile
    count: int
    types: dict[str, str]
    classes: tuple[str, ...] | None
    fingerprint: str

    @property
    def path(self) -> str:
        return self.file.address

    def key(self, number: int) -> str:
        """See `Shard.key`."""
        return str(number)

    def read_into(
        self, rows: list[dict[str, Any]], positions: list[int], keys: list[int], columns: tuple[str, ...]
    ) -> None:
        """See `Shard.read_into`; the shard is fetched first, if it is not in the node's cache.

        Raises:
            StoreError: it cannot be fetched or read, or is another one by now.
        """
        shared_cache().get(self.file, self._open).read_into(rows, positions, keys, columns)

    def _open(self, path: Path) -> Shard:
        try:
            shard = open_shard(path)
        except StoreError as error:
            raise StoreError(f"{self.path}, in the cache: {error}") from error
        if shard is None or shard.fingerprint != self.fingerprint:
            raise StoreError(f"{self.path} has changed since the store was opened: start a new run")
        return shard


def _open_remote(address: str) -> list[RemoteShard]:
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        shards = list(pool.map(_look_up, _files(address)))
    # Class names that are equal are one object, so that a pickled store has them once and not once per shard.
    first = shards[0]
    return [
        replace(shard, types=first.types, classes=first.classes)
        if (shard.types, shard.classes) == (first.types, first.classes)
        else shard
        for shard in shards
    ]


def _look_up(listed: RemoteFile) -> RemoteShard:
    with opened(listed.address) as (source, found):
        file = listed.checked(found)
        shard = open_shard(listed.address, source)
    if shard is None:
        raise StoreError(
            f"{listed.address} is LMDB that raypipe did not write, which is read from a disk alone: copy it here, "
            "and ingest it to where it was"
        )
    return RemoteShard(file, shard.count, shard.types, shard.classes, shard.fingerprint)
