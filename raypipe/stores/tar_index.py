"""Indexes of tars: the scan of each, kept so that it is made once.

    CACHE/scans/HASH.arrow                             of remote and large local tars, for this node
    FOLDER/_raypipe_index/NAME.tar.HASH-11.index       next to the tars, which `raypipe index` writes
    RUN/index/NAME.tar.HASH-11.index                   in the folder of a run, for its other nodes

An index names the size and version of its tar, and is made again where they differ. Its numbers are checked as
those of any file that somebody else may have written.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa

from raypipe.errors import ConfigError, StoreError
from raypipe.section import Limits, check
from raypipe.storage.files import RemoteFile, open_input, write_bytes
from raypipe.storage.filesystem import (
    is_remote,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.storage.local_cache import Unpacked
from raypipe.storage.local_file import OpenFile
from raypipe.stores.addresses import names_in
from raypipe.stores.arrow_messages import check_batches
from raypipe.stores.arrow_values import array_type, to_arrow
from raypipe.stores.base import hash_of_facts
from raypipe.stores.kept import UNUSABLE, table_bytes, table_of
from raypipe.stores.webdataset import Scan

logger = logging.getLogger(__name__)

INDEX_FOLDER = "_raypipe_index"
VERSION = 11  # the scans' form has this version
_SUFFIX = f"-{VERSION}.index"
_MAX_BYTES = 1 << 30  # an index of 14 million samples
_KEYS = pa.large_binary()
_PAIRS = array_type(np.int64, (2,))


@dataclass(frozen=True)
class Archive:
    """A tar. A local tar stays open, so that reads and scan see the same file; others are in the node's cache."""

    name: str
    file: OpenFile | RemoteFile | Unpacked

    @property
    def version(self) -> tuple[int, str]:
        """Return the tar's size and version, which are different for different contents."""
        if isinstance(self.file, OpenFile):
            status = os.fstat(self.file.descriptor)
            return status.st_size, str(status.st_mtime_ns)
        return self.file.written

    @property
    def num_bytes(self) -> int:
        return self.version[0]


class Indexes:
    """The indexes of a store's tars that are next to them, or in the folder of a run.

    Args:
        options: names of the image and target columns, on which a scan depends.
        run_folder: an address; empty = none.
    """

    def __init__(self, options: Sequence[Any], run_folder: str = "") -> None:
        self._options = list(options)
        self._run_folder = run_folder
        self._names: dict[str, set[str]] = {}

    def are_of(self, name: str) -> bool:
        """Return whether there is an index with the name that a tar's index has."""
        addresses = map(split_address, self._addresses(name))
        return any(index in self._names_in(folder) for folder, index in addresses)

    def find(self, tar: Archive) -> Scan | None:
        """Return the scan of a tar; None if there is no index of it as it is now."""
        for address in self._addresses(tar.name):
            folder, file_name = split_address(address)
            if file_name in self._names_in(folder):
                try:
                    return _read(address, tar)
                except (*UNUSABLE, StoreError, struct.error) as error:
                    logger.warning(
                        "%s: %s: %.200s; the tar is scanned. `raypipe index` renews the index",
                        *(address, type(error).__name__, error),
                    )
        return None

    def keep_beside(self, tar: Archive, scan: Scan) -> str:
        """Write the index of a tar next to it, and return its address."""
        address = self._addresses(tar.name)[0]
        _write(address, tar, scan)
        return address

    def keep_in_run(self, tar: Archive, scan: Scan) -> None:
        """Write the index of a tar into the folder of the run, unless it has one there or next to it."""
        if self._run_folder and not self.are_of(tar.name):
            with contextlib.suppress(ConfigError, OSError):  # it only saves time
                _write(self._addresses(tar.name)[-1], tar, scan)

    def _addresses(self, name: str) -> list[str]:
        folder, tar = split_address(name)
        options = hash_of_facts(self._options)
        beside = join_address(folder, INDEX_FOLDER, f"{tar}.{options[:8]}{_SUFFIX}")
        if not self._run_folder:
            return [beside]
        facts = hash_of_facts((name, self._options))
        in_run = join_address(self._run_folder, f"{tar}.{facts[:16]}{_SUFFIX}")
        return [beside, in_run]

    def _names_in(self, folder: str) -> set[str]:
        """Return the names of the indexes in a folder, which is listed once."""
        if folder not in self._names:
            try:
                self._names[folder] = names_in(*open_filesystem(folder))
            except (OSError, ConfigError, StoreError):  # listing may be forbidden
                self._names[folder] = set()
        return self._names[folder]


def _write(address: str, tar: Archive, scan: Scan) -> None:
    if not is_remote(address):
        Path(split_address(address)[0]).mkdir(parents=True, exist_ok=True)
    write_bytes(address, gzip.compress(index_bytes(tar, scan), 6, mtime=0))


def _read(address: str, tar: Archive) -> Scan:
    """Return a scan; raise StoreError, struct.error, or one of `UNUSABLE` for an index that is not of this tar."""
    with (
        open_input(*open_filesystem(address)) as source,
        pa.CompressedInputStream(source, "gzip") as stream,
    ):
        content = stream.read_buffer(_MAX_BYTES)
    for _ in check_batches(address, pa.BufferReader(content)):
        pass
    return scan_of(content, tar)


_Count = Annotated[int, Limits(0, 1 << 62)]
_Counts = dict[str, _Count]
# Facts of a scan, which are JSON. Samples have `labels`, class folders have `about`.
_FACTS = {
    "digest": str,
    "left_out": _Counts,
    "sparse": dict[str, list[list[_Count]]],
    "labels": list[Any] | None,
    "about": dict[str, Any] | None,
}
_ABOUT = {
    "root": str,
    "classes": list[str],
    "nums": list[_Count],
    "has_images": bool,
    "is_plain": bool,
    "left_out": _Counts,
    "splits": list[str],
    "reasons": list[str],
    "labels": str,
    "links": dict[str, str],
    "others": list[str],
}


def index_bytes(tar: Archive, scan: Scan) -> bytes:
    """Return a scan as a table of its samples: their keys, and the places of their members by suffix."""
    columns = {"keys": scan["keys"]}
    for number, pairs in enumerate(scan["places"].values()):
        columns[str(number)] = to_arrow(pairs)
    facts = {name: scan.get(name) for name in _FACTS}
    suffixes = list(scan["places"])
    return table_bytes(columns, {**facts, "suffixes": suffixes, "tar": tar.version})


def scan_of(content: pa.Buffer, tar: Archive) -> Scan:
    """Return the scan of a tar, whose numbers are checked; raise one of `UNUSABLE` for another tar, or damage."""
    batch, facts = table_of(content)
    if facts["tar"] != list(tar.version):
        raise ValueError("it belongs to another version of the tar")
    kinds = [_KEYS, *[_PAIRS] * len(facts["suffixes"])]
    _require(batch.schema.types == kinds and not batch["keys"].null_count, "columns")
    places = [column.flatten().to_numpy() for column in batch.columns[1:]]
    scan: Scan = {
        **_checked(facts, _FACTS),
        "keys": batch["keys"],
        "places": {
            suffix: pairs.reshape(-1, 2)
            for suffix, pairs in zip(facts["suffixes"], places, strict=True)
        },
    }
    # Places in a compressed tar are those of its content, whose size is not known yet.
    num_bytes = 1 << 62 if isinstance(tar.file, Unpacked) else tar.num_bytes
    _check(scan, num_bytes, batch.num_rows)
    return scan


def _checked(facts: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: check(name, facts[name], kind) for name, kind in kinds.items()}


def _check(scan: Scan, num_bytes: int, num: int) -> None:
    """Raise ValueError or KeyError unless a scan of so many samples fits itself, and a tar of this size."""
    stored_ends = [
        int(start) + sum(length for _, length in ranges)
        for start, ranges in scan["sparse"].items()
    ]
    _require(max(stored_ends, default=0) <= num_bytes, "sparse members")
    if scan["about"] is None:
        _require(scan["labels"] is None or len(scan["labels"]) == num, "labels")
    else:
        about = scan["about"] = _checked(scan["about"], _ABOUT)
        are_classes = len(about["nums"]) == len(about["classes"])
        _require(are_classes and sum(about["nums"]) == num, "classes")
    starts, sizes = np.concatenate([scan["places"][""], *scan["places"].values()]).T
    # The sizes of sparse members count their holes.
    are_sparse = np.isin(starts, list(map(int, scan["sparse"])))
    are_inside = (starts >= 0) & (are_sparse | (sizes <= num_bytes - starts))
    are_right = (are_inside & (sizes >= 0)) | ((starts == -1) & (sizes == -1))
    _require(bool(are_right.all()), "places")


def _require(is_right: bool, field: str) -> None:
    if not is_right:
        raise ValueError(f"its {field} are wrong")
