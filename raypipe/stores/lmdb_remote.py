"""LMDB shards in an object store: metadata come by a few ranged reads, records through the node's cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.remote_file import RemoteFile, opened
from raypipe.stores.lmdb_foreign import ForeignShard
from raypipe.stores.lmdb_shard import Shard, open_shard
from raypipe.stores.remote import Listed, list_shards

_NUM_THREADS = 16  # a shard's metadata take about six round trips; a store may have thousands of shards


@dataclass(frozen=True)
class RemoteShard:
    """What a Shard is, of one that is not here. Nothing of it is downloaded before its first record is read.

    Attributes:
        file: the object.
        layout: of a file that is not raypipe's own, see `raypipe.stores.lmdb_layouts`; "" of one that is.
        count, types, classes, fingerprint: as its metadata have them.
    """

    file: RemoteFile
    layout: str
    count: int
    types: dict[str, str]
    classes: tuple[str, ...] | None
    fingerprint: str

    @property
    def path(self) -> str:
        return self.file.address

    def key(self, number: int) -> str:
        """See `Shard.key`, `ForeignShard.key`."""
        with shared_cache().use(self.file, _Cached) as cached:
            return self._checked(cached).key(number)

    def read_into(
        self, rows: list[dict[str, Any]], positions: list[int], keys: list[int], columns: tuple[str, ...]
    ) -> None:
        """See `Shard.read_into`; the shard is fetched first, if it is not in the node's cache.

        Raises:
            StoreError: it cannot be fetched or read, or is another one by now.
        """
        with shared_cache().use(self.file, _Cached) as cached:
            self._checked(cached).read_into(rows, positions, keys, columns)

    def _checked(self, cached: _Cached) -> Shard | ForeignShard:
        try:
            shard = cached.shard(self.layout)
        except StoreError as error:
            raise StoreError(f"{self.path}, in the cache: {error}") from error
        same = shard.count == self.count
        if isinstance(shard, Shard):  # of another's file the cache knows whether it is the same
            same = same and shard.fingerprint == self.fingerprint
        if not same:
            raise StoreError(f"{self.path} has changed since the store was opened: start a new run")
        return shard


class _Cached:
    """A file in the node's cache, open in the layouts in which it is read. They may be several in one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shards: dict[str, Shard | ForeignShard] = {}

    def shard(self, layout: str) -> Shard | ForeignShard:
        """The shard; `layout` as `RemoteShard` has it.

        Raises:
            StoreError: it cannot be opened so.
        """
        if layout not in self._shards:
            shard = ForeignShard(self._path, layout) if layout else open_shard(self._path)
            if shard is None:
                raise StoreError(f"{self._path} is not raypipe's own any more")
            self._shards[layout] = shard
        return self._shards[layout]


def open_shards(address: str, layout: str = "auto") -> list[RemoteShard]:
    """The shards of the LMDB store at a remote address. Those that are not raypipe's own are downloaded for it.

    Args:
        address: of one shard or of a folder.
        layout: of shards that are not raypipe's own.

    Raises:
        StoreError: there are none, one is damaged, or is in no layout that is known.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        shards = list(pool.map(lambda listed: _open_shard(listed, layout), list_shards(address, ".lmdb")))
    # Class names that are equal are one object, so that a pickled store has them once and not once per shard.
    first = shards[0]
    return [
        replace(shard, types=first.types, classes=first.classes)
        if (shard.types, shard.classes) == (first.types, first.classes)
        else shard
        for shard in shards
    ]


def _open_shard(listed: Listed, layout: str) -> RemoteShard:
    with opened(listed.address) as (source, found):
        file = listed.checked(found)
        own = open_shard(listed.address, source)
    if own is not None:
        return RemoteShard(file, "", own.count, own.types, own.classes, own.fingerprint)
    # Ranged reads would take a round trip for every page of the index.
    with shared_cache().use(file, _Cached) as cached:
        shard = cached.shard(layout)
        return RemoteShard(file, layout, shard.count, shard.types, None, shard.fingerprint)
