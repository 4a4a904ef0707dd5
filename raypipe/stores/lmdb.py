"""LMDB stores: one LMDB or several as shards, local or in an object store, that raypipe or other programs wrote.

`raypipe.stores.lmdb_foreign` reads those of other programs. In raypipe's own, keys are the index as big-endian
uint64, values are records (see `raypipe.stores.record`), and the key `__raypipe__` has a JSON record: version,
count, columns, classes, fingerprint. Nothing is pickled. The lmdb library writes the files, and
`raypipe.stores.lmdb_file` reads them.

Opening a shard in an object store reads only its metadata, by ranges; records come through the node's cache.
Without the extension, opening fetches the whole shard into the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, open_object
from raypipe.storage.filesystem import errors_as, is_remote, join_address, split_address
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.retries import in_threads
from raypipe.stores.addresses import (
    MANIFEST,
    check_one_split,
    expand,
    folders_at,
    folders_matching,
    list_files,
    names_at,
)
from raypipe.stores.arrow_columns import TableColumns
from raypipe.stores.arrow_values import is_number
from raypipe.stores.base import (
    Columns,
    FileStore,
    gathered,
    join_fingerprints,
    part_of,
)
from raypipe.stores.lmdb_file import LMDBFile, Shard, Shards, why_not_compiled
from raypipe.stores.lmdb_foreign import (
    DATA_FILE,
    ForeignShards,
    open_foreign,
)
from raypipe.stores.lmdb_listing import Options
from raypipe.stores.record import (
    KEY,
    METADATA_KEY,
    Metadata,
    RecordLayout,
    arrow_column,
    schema_of,
)


class LMDBStore(FileStore["_Shards | ForeignShards"]):
    """A store in one LMDB, a file or a folder with `data.mdb`, or in a folder of them as shards, local or remote.

    Shards are sorted by name and concatenated; they must agree in columns and classes. Remote shards are read
    through the node's cache, see `raypipe.storage.local_cache`. Values of a missing or damaged record are None.

    Args:
        address: see above.
        target_column: in raypipe's own LMDB, the column of numbers, or arrays, that becomes `label`; integers are
            classes; empty = `label`, if there is one. In others: "label" = by content; "folder" = the folders in
            the keys; `NAME.txt` = a list of keys and labels, next to the LMDB; empty = no label is needed; else
            the label's name in values that are dicts.
        trust_pickles: open values that are pickles, see `raypipe.stores.lmdb_values`.
    """

    def __init__(
        self,
        address: str | Path,
        target_column: str = "label",
        trust_pickles: bool = False,
    ) -> None:
        super().__init__(address, target_column, trust_pickles)

    def _open(self) -> _Shards | ForeignShards:
        shards = self._listing
        if shards is None:
            shards = in_threads(_open_file, find_lmdbs(self.address))
            if is_remote(self.address):
                self._listing = shards
        opened = [shard for shard in shards if isinstance(shard, _Shard)]
        foreign = [shard for shard in shards if isinstance(shard, RemoteFile)]
        target_column, trust_pickles = self._options
        if not opened:
            return open_foreign(foreign, Options(target_column, trust_pickles))
        if foreign:
            raise StoreError(
                f"{foreign[0].address} is LMDB from another program, and {opened[0].path} is raypipe's: a store "
                "has one kind, so put them into two folders"
            )
        return _Shards(opened, target_column)

    def close(self) -> None:
        super().close()
        if self._listing:
            files: list[Any] = [
                shard.file if isinstance(shard, _Shard) else shard
                for shard in self._listing
            ]
            shared_cache().close(files)


def find_lmdbs(address: str) -> list[RemoteFile]:
    """Return the files of an LMDB store: a file, a folder's `data.mdb`, or those of a folder or a pattern.

    Raises:
        StoreError: there is none, or a folder has LMDBs of several splits.
    """
    if matches := folders_matching(address):
        return [RemoteFile(join_address(folder, DATA_FILE)) for folder in matches]
    is_one = "*" not in split_address(address)[1] and expand(address) == [address]
    names = names_at(address) if is_one else None
    if names is not None and DATA_FILE in names:
        return [RemoteFile(join_address(address, DATA_FILE))]
    if (
        names is None
        or MANIFEST in names
        or any(name.endswith(".lmdb") for name in names)
    ):
        files = list_files(address, lambda name: name.endswith(".lmdb"), "*.lmdb")
        return [
            RemoteFile(join_address(file.address, DATA_FILE))
            if not is_remote(file.address) and Path(file.address).is_dir()
            else file
            for file in files
        ]
    folders = sorted(
        name
        for name in folders_at(address)
        if DATA_FILE in (names_at(join_address(address, name)) or ())
    )
    check_one_split(address, folders)
    if not folders:
        raise StoreError(
            f"{address} has no *.lmdb files, and no folder in it has {DATA_FILE}"
        )
    return [RemoteFile(join_address(address, name, DATA_FILE)) for name in folders]


@dataclass(frozen=True)
class _Shard(Shard):
    """A file of a store, with its JSON record."""

    metadata: Metadata


class _Shards(Shards[_Shard], TableColumns):
    """The shards of an open store."""

    def __init__(self, shards: Sequence[_Shard], target_column: str = "label") -> None:
        Shards.__init__(self, shards, [shard.metadata.count for shard in shards])
        schemas = [
            (shard.path, schema_of(shard.metadata.types, shard.metadata.classes))
            for shard in shards
        ]
        TableColumns.__init__(self, schemas, "image", target_column)
        if target_column in ("", "label"):  # also of labels that are arrays
            self.classes = shards[0].metadata.classes
        # Only damaged records lack a number.
        self.schema = pa.schema(
            [field.with_nullable(not is_number(field.type)) for field in self.schema]
        )
        self._layout = RecordLayout(shards[0].metadata.types)
        self.fingerprint = join_fingerprints(
            [shard.metadata.fingerprint for shard in shards]
        )
        if target_column not in ("", "label"):  # other labels make other contents
            self.fingerprint = join_fingerprints([self.fingerprint, target_column])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return gathered(indices, self.offsets, self.schema, columns, self._read)

    def _read(
        self, number: int, keys: np.ndarray, columns: Sequence[str]
    ) -> dict[str, Any]:
        """Read a file's samples; those that are missing or damaged have no values."""
        shard = self.shards[number]
        file = shard.open()
        stored = {name: self.fields[name].name for name in columns}
        wanted = set(stored.values())
        fixed, variable, done = file.records(keys, self._layout.native(wanted))
        values = self._layout.columns(fixed, variable, wanted)
        is_missing = ~done
        with errors_as(StoreError, f"{shard.path} cannot be read"):
            for number in np.flatnonzero(~done).tolist():
                record = None
                # a damaged place in the file is one bad sample
                with contextlib.suppress(StoreError):
                    record = file.get(KEY.pack(int(keys[number])))
                row = self._layout.unpack(record, wanted) if record is not None else {}
                is_missing[number] = not row
                for name, value in row.items():
                    values[name][number] = value
        are_numbers = not is_missing.any()
        found = dict[str, Any]()
        for name, column in stored.items():
            found[name] = values[column]
            is_done = are_numbers and isinstance(found[name], np.ndarray)
            if name != "image" and not is_done:
                kind = self._layout.types[column]
                found[name] = arrow_column(kind, found[name], is_missing)
        return found

    def sample_name(self, index: int) -> str:
        number, within = part_of(self.offsets, index)
        return f"{self.shards[number].path}, key {within}"


def _shard(file: LMDBFile) -> _Shard | None:
    """Return a file with its metadata; None if raypipe did not write it."""
    path = file.path
    with errors_as(StoreError, f"{path} cannot be read"):
        record = file.get(METADATA_KEY)
    if record is None:
        return None
    if file.num_bytes < file.declared_bytes:
        raise file.truncated()
    metadata = Metadata.from_json(
        bytes(record), f"{path} has a bad {METADATA_KEY.decode()} record"
    )
    if file.num_entries != metadata.count + 1:
        raise StoreError(
            f"{path} has {file.num_entries - 1} samples, but was written with {metadata.count}; convert it again"
        )
    return _Shard(str(path), file, metadata)


def _open_file(listed: RemoteFile) -> _Shard | RemoteFile:
    """Return a file with its metadata, or only the file if raypipe did not write it."""
    if not is_remote(listed.address):
        return _shard(LMDBFile(listed.address)) or listed
    with open_object(listed.address) as (source, current):
        file = listed.checked(current)
        if why_not_compiled():
            shard = _shard(shared_cache().get(file, LMDBFile))
        else:
            shard = _shard(LMDBFile(listed.address, source))
    return file if shard is None else replace(shard, path=listed.address, file=file)
