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
from raypipe.stores.base import FileStore, join_fingerprints
from raypipe.stores.lmdb_file import LMDBFile, Shard, Shards, why_not_compiled
from raypipe.stores.lmdb_foreign import ForeignShards
from raypipe.stores.record import (
    KEY,
    METADATA_KEY,
    Metadata,
    RecordLayout,
    arrow_column,
    schema_of,
)

DATA_FILE = "data.mdb"
"""Name of the file in an LMDB that is a folder."""


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
        found = self._listing
        if found is None:
            found = in_threads(_open_file, find_lmdbs(self.address))
            if is_remote(self.address):
                self._listing = found
        own = [shard for shard, metadata in found if metadata]
        foreign = [shard for shard, metadata in found if not metadata]
        target_column, trust_pickles = self._options
        if not own:
            return ForeignShards(foreign, target_column, trust_pickles)
        if foreign:
            raise StoreError(
                f"{foreign[0].path} is LMDB from another program, and {own[0].path} is raypipe's: a store "
                "has one kind, so put them into two folders"
            )
        return _Shards(own, [metadata for _, metadata in found], target_column)

    def close(self) -> None:
        super().close()
        if self._listing:
            shared_cache().close([shard.file for shard, _ in self._listing])


def find_lmdbs(address: str) -> list[RemoteFile]:
    """Return the files of an LMDB store: a file, a folder's `data.mdb`, or those of a folder or a pattern.

    Raises:
        StoreError: there is none, or a folder has LMDBs of several splits.
    """
    folders = folders_matching(address)
    is_one = "*" not in split_address(address)[1] and expand(address) == [address]
    names = names_at(address) if is_one else None
    if names is not None and DATA_FILE in names:
        folders = [address]
    elif names is not None and not any(
        name == MANIFEST or name.endswith(".lmdb") for name in names
    ):
        inside = [join_address(address, name) for name in sorted(folders_at(address))]
        folders = [folder for folder in inside if DATA_FILE in (names_at(folder) or ())]
        check_one_split(address, [split_address(folder)[1] for folder in folders])
        if not folders:
            raise StoreError(
                f"{address} has no *.lmdb files, and no folder in it has {DATA_FILE}"
            )
    if folders:
        return [RemoteFile(join_address(folder, DATA_FILE)) for folder in folders]
    files = list_files(address, lambda name: name.endswith(".lmdb"), "*.lmdb")
    return [
        RemoteFile(join_address(file.address, DATA_FILE))
        if not is_remote(file.address) and Path(file.address).is_dir()
        else file
        for file in files
    ]


class _Shards(Shards, TableColumns):
    """The shards of an open store."""

    def __init__(
        self, shards: Sequence[Shard], metadata: Sequence[Metadata], target_column: str
    ) -> None:
        Shards.__init__(self, shards, [each.count for each in metadata])
        schemas = [
            (shard.path, schema_of(each.types, each.classes))
            for shard, each in zip(shards, metadata, strict=True)
        ]
        TableColumns.__init__(self, schemas, "image", target_column)
        self._layout = RecordLayout(metadata[0].types)
        self.fingerprint = join_fingerprints([each.fingerprint for each in metadata])
        if target_column in ("", "label"):
            self.classes = metadata[0].classes  # also of labels that are arrays
        else:  # other labels make other contents
            self.fingerprint = join_fingerprints([self.fingerprint, target_column])
        # Only damaged records lack a number.
        self.schema = pa.schema(
            [field.with_nullable(not is_number(field.type)) for field in self.schema]
        )

    def _read(
        self, number: int, rows: np.ndarray, columns: Sequence[str]
    ) -> dict[str, Any]:
        """Read all records at once; or one by one, if some are missing or damaged, or without the extension."""
        shard = self.shards[number]
        file = shard.open()
        stored = {name: self.fields[name].name for name in columns}
        wanted = set(stored.values())
        with errors_as(StoreError, f"{shard.path} cannot be read"):
            records = file.records(rows, self._layout.native(wanted))
            if records is not None and records[-1].all():
                values = self._layout.columns(*records[:-1], wanted)
            else:
                read = [self._record(file, row, wanted) for row in rows.tolist()]
                values = {name: [row.get(name) for row in read] for name in wanted}
        found = dict[str, Any]()
        for name, column in stored.items():
            found[name] = values[column]
            if name != "image" and not isinstance(found[name], np.ndarray):
                kind = self._layout.types[column]
                found[name] = arrow_column(kind, found[name])
        return found

    def _record(self, file: LMDBFile, row: int, wanted: set[str]) -> dict[str, Any]:
        # a damaged place in the file is one bad sample
        with contextlib.suppress(StoreError):
            record = file.get(KEY.pack(row))
            if record is not None:
                return self._layout.unpack(record, wanted)
        return {}

    def _key(self, number: int, row: int) -> str:
        return str(row)


def _metadata_in(file: LMDBFile) -> Metadata | None:
    """Return a file's metadata; None if raypipe did not write it."""
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
    return metadata


def _open_file(listed: RemoteFile) -> tuple[Shard, Metadata | None]:
    """Return a file, and its metadata if raypipe wrote it."""
    address = listed.address
    path = address.removesuffix(f"/{DATA_FILE}")
    if not is_remote(address):
        local = LMDBFile(address)
        return Shard(path, local), _metadata_in(local)
    with open_object(address) as (source, current):
        shard = Shard(path, listed.checked(current))
        if why_not_compiled():
            file = shard.open()
        else:
            file = LMDBFile(address, source)
        return shard, _metadata_in(file)
