"""LMDB stores: one single-file environment, or a folder of them as shards; the writer of raypipe's own layout.

In raypipe's own layout keys are the index as big-endian uint64, values are records (see
`raypipe.stores.record`), and the key `__raypipe__` holds a JSON record: version, count, columns, classes,
fingerprint. Nothing is pickled. The layouts of others are in `raypipe.stores.lmdb_layouts`.

The lmdb library writes; `raypipe.stores.lmdb_pages` reads, since the library trusts its files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.stores.addresses import is_pattern, list_files
from raypipe.stores.base import Columns
from raypipe.stores.checks import check_columns, check_indices, image_and_label_first, part_of
from raypipe.stores.lmdb_foreign import ForeignShard
from raypipe.stores.lmdb_remote import RemoteShard, open_shards
from raypipe.stores.lmdb_shard import KEY, METADATA_KEY, Shard, open_shard
from raypipe.stores.metadata import Metadata
from raypipe.stores.record import DEFAULT_COLUMNS, Fingerprint, RecordLayout

_FLUSH_BYTES = 32 << 20  # a few hundred images per commit: the cost of a commit no longer shows


class LMDBStore:
    """A store in one LMDB file, an LMDB environment folder, or a folder of `*.lmdb` shards, local or remote.

    Shards are sorted by name and concatenated; they must agree in columns and classes. Those of a remote store
    are read through the node's cache, see `raypipe.storage.local_cache`.

    Args:
        address: a path or URI; a relative path is made absolute, since other processes have other folders.
        layout: of files that are not raypipe's own: "auto" = found out, or "image", "scene-text", "pickle" or
            `module:function`, see `raypipe.stores.lmdb_layouts`.
        shards: of a remote store, as they were found by who opened it first; None = they are looked for.
    """

    def __init__(self, address: str | Path, layout: str = "auto", shards: list[RemoteShard] | None = None) -> None:
        self.address = str(address) if is_remote(address) else str(Path(address).absolute())
        self._layout, self._shards = layout, shards
        self._opened: _Opened | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes need not ask for what this one has found, and are told if it has changed.
        return type(self), (self.address, self._layout, self._shards)

    @property
    def columns(self) -> tuple[str, ...]:
        return image_and_label_first(self._open().shards[0].types)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self._open().shards[0].classes

    @property
    def groups(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        """That of a single file, as written or as `ForeignShard` has it; for shards, the hash over theirs."""
        shards = self._open().shards
        if len(shards) == 1:
            return shards[0].fingerprint
        return hashlib.blake2b("".join(s.fingerprint for s in shards).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._open().offsets[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`. Numbers of a missing or damaged record are 0, the rest None."""
        opened = self._open()
        types = opened.shards[0].types
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, types, self.address)
        # Keys in ascending order walk the tree and the file forwards; results go where they were asked for.
        order = np.argsort(wanted, kind="stable")
        bounds = np.searchsorted(wanted[order], opened.offsets)
        rows: list[dict[str, Any]] = [{}] * len(wanted)
        for number, shard in enumerate(opened.shards):
            positions = order[bounds[number] : bounds[number + 1]]
            if positions.size:
                keys = wanted[positions] - opened.offsets[number]
                shard.read_into(rows, positions.tolist(), keys.tolist(), columns)
        return {name: _column(rows, name, types[name]) for name in columns}

    def sample_name(self, index: int) -> str:
        """A sample's file, and its key in it."""
        opened = self._open()
        number, within = part_of(opened.offsets, index)
        return f"{opened.shards[number].path}, key {opened.shards[number].key(within)}"

    def close(self) -> None:
        self._opened = None
        if self._shards:
            shared_cache().close([shard.file for shard in self._shards])

    def _open(self) -> _Opened:
        if self._opened is None:
            shards: Sequence[Shard | ForeignShard | RemoteShard]
            if is_remote(self.address):
                shards = self._shards = self._shards or open_shards(self.address, self._layout)
            else:
                shards = [open_shard(path) or ForeignShard(path, self._layout) for path in self._shard_paths()]
            for shard in shards[1:]:
                if (shard.types, shard.classes) != (shards[0].types, shards[0].classes):
                    raise StoreError(
                        f"{shard.path} and {shards[0].path} differ in columns or classes; "
                        "all shards of one store have the same"
                    )
            offsets = np.cumsum([0] + [shard.count for shard in shards], dtype=np.int64)
            self._opened = _Opened(shards, offsets)
        return self._opened

    def _shard_paths(self) -> list[Path]:
        path = Path(self.address)
        if not path.exists() and not is_pattern(path.name):
            raise StoreError(f"{path} does not exist")
        if (path / "data.mdb").exists():
            return [path]
        what = "data.mdb of an LMDB environment, and no *.lmdb"
        files = list_files(self.address, lambda name: name.endswith(".lmdb"), what, folders=True)
        return [Path(file) for file in files]


def _column(rows: list[dict[str, Any]], name: str, kind: str) -> Any:
    if kind == "int64" or kind == "float64":
        return np.array([row.get(name, 0) for row in rows], dtype=kind)
    return [row.get(name) for row in rows]


@dataclass(frozen=True)
class _Opened:
    """What a store holds while it is open; `offsets` int64 of shape (num_shards + 1,).

    A forked child goes on with its parent's: nothing in it moves while it is read.
    """

    shards: Sequence[Shard | ForeignShard | RemoteShard]
    offsets: np.ndarray


class LMDBWriter:
    """Writes one new LMDB file in raypipe's own layout, and leaves no lock file beside it.

    Args:
        path: the file to make; it must not exist.
        columns: all columns, name → one of `raypipe.stores.record.COLUMN_TYPES`, in order; None for
            `image` and `label` alone.
        classes: class names, position = label; None where there are none.
        map_bytes: first size of the map; it doubles as often as needed.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        map_bytes: int = 1 << 30,
    ) -> None:
        self._path = Path(path)
        self._layout = RecordLayout(DEFAULT_COLUMNS if columns is None else columns)
        self._classes = None if classes is None else tuple(classes)
        self._map_bytes = map_bytes
        self._count = 0
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0

    def __enter__(self) -> LMDBWriter:
        try:
            self._path.open("xb").close()  # LMDB takes an empty file for a new environment
        except OSError as error:
            raise StoreError(f"{self._path} cannot be made: {error}") from error
        self._fingerprint = Fingerprint(self._layout.types, self._classes)
        try:
            # No lock: this writer has just made the file, so nobody else can be in it. No sync before
            # the end: until __exit__ the file is worth nothing anyway.
            self._env = lmdb.open(str(self._path), subdir=False, lock=False, sync=False, map_size=self._map_bytes)
        except lmdb.Error as error:
            self._path.unlink()
            raise StoreError(f"{self._path} cannot be made: {error}") from error
        return self

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one sample with exactly the declared columns; None is allowed in binary and string ones."""
        record = self._layout.pack(sample)
        self._fingerprint.add(record)
        self._put(KEY.pack(self._count), record)
        self._count += 1

    def __exit__(self, *exc: object) -> None:
        finished = False
        try:
            if exc[0] is None:
                self._finish()
                finished = True
        except (lmdb.Error, OSError) as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        finally:
            self._env.close()
            if not finished:
                self._path.unlink(missing_ok=True)

    def _finish(self) -> None:
        metadata = Metadata(self._count, self._layout.types, self._classes, self._fingerprint.hexdigest())
        self._put(METADATA_KEY, metadata.to_json())
        self._flush()
        # LMDB may count a page at the end that it then had no need to write; readers take a file that is
        # shorter than its pages for truncated.
        required_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if self._path.stat().st_size < required_bytes:
            os.truncate(self._path, required_bytes)
        self._env.sync(True)

    def _put(self, key: bytes, value: bytes) -> None:
        self._pending.append((key, value))
        self._pending_bytes += len(value)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Commit what is pending, in a larger map if this one is full."""
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    for key, value in self._pending:
                        txn.put(key, value, append=True)
                break
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._env.set_mapsize(self._map_bytes)
            except lmdb.Error as error:
                raise StoreError(f"{self._path} cannot be written: {error}") from error
        self._pending.clear()
        self._pending_bytes = 0
