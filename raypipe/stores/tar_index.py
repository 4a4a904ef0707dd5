"""Indexes of tars: their scans, kept so that each is made once.

    CACHE/tars/HASH.arrow                              of a store's remote or large tars, for this node
    FOLDER/_raypipe_index/NAME.tar.HASH-16.index       of one tar, next to it, which `raypipe index` writes
    RUN/index/HASH-16.index                            of a store's tars, for the other nodes of a run

The index of a tar names its size and version, and is made again where they differ. Its numbers are checked as
those of any file that somebody else may have written.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

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
from raypipe.stores.arrow_messages import check_batches
from raypipe.stores.base import hash_of_facts
from raypipe.stores.kept import UNUSABLE, packed, unpacked
from raypipe.stores.webdataset import Indexed, Scan

logger = logging.getLogger(__name__)

INDEX_FOLDER = "_raypipe_index"
VERSION = 16  # the scans' form has this version
SUFFIX = f"-{VERSION}.index"
_MAX_BYTES = 1 << 30  # an index of 14 million samples
_WRONG = (*UNUSABLE, StoreError, ConfigError, struct.error)


Tar = OpenFile | RemoteFile | Unpacked
"""A local tar stays open, so that reads and scan see the same file; others are in the node's cache."""


def find_scan(tar: Tar, options: Sequence[str]) -> Scan | None:
    """Return the scan in a tar's index; None if there is no index of it as it is now.

    Args:
        options: names of the image and target columns, on which a scan depends.
    """
    address = _address_of(tar, options)
    try:
        return _checked(unpacked(Scan, _read(address)), tar)
    except (FileNotFoundError, PermissionError):
        return None
    except _WRONG as error:
        logger.warning(
            "%s: %s: %.200s; the tar is scanned. `raypipe index` renews the index",
            *(address, type(error).__name__, error),
        )
        return None


def keep_scan(tar: Tar, options: Sequence[str], scan: Scan) -> str:
    """Write the index of a tar next to it, and return its address."""
    address = _address_of(tar, options)
    _write(address, packed(scan._replace(tar=_version_of(tar))))
    return address


def _address_of(tar: Tar, options: Sequence[str]) -> str:
    folder, name = split_address(tar.address)
    hashed = hash_of_facts(list(options))[:8]
    return join_address(folder, INDEX_FOLDER, f"{name}.{hashed}{SUFFIX}")


def _write(address: str, content: bytes) -> None:
    if not is_remote(address):
        Path(split_address(address)[0]).mkdir(parents=True, exist_ok=True)
    write_bytes(address, gzip.compress(content, 6, mtime=0))


def _read(address: str) -> pa.Buffer:
    """Return the content of an index; raise one of `_WRONG` for one that somebody else wrote."""
    with (
        open_input(*open_filesystem(address)) as source,
        pa.CompressedInputStream(source, "gzip") as stream,
    ):
        content = stream.read_buffer(_MAX_BYTES)
    for _ in check_batches(address, pa.BufferReader(content)):
        pass
    return content


def _version_of(tar: Tar) -> list[int | str]:
    """Return a tar's size and version, which are different for different contents, also of a copy."""
    return list(tar.written[:2])


_Count = Annotated[int, Limits(0, 1 << 62)]


def _checked(scan: Scan, tar: Tar) -> Scan:
    """Return a scan; raise one of `_WRONG` unless it describes the tar as it is now, and fits itself."""
    if scan.tar != _version_of(tar):
        raise ValueError("it belongs to another version of the tar")
    check("sparse", scan.sparse, dict[str, list[list[_Count]]])
    check("left_out", scan.left_out, dict[str, _Count])
    texts = [scan.keys, scan.keys if scan.kinds is None else scan.kinds]
    fit = [
        *(each.type == pa.large_binary() and not each.null_count for each in texts),
        *(each.dtype == np.int64 for each in scan.places.values()),
        *(each.shape == (len(scan.keys), 3) for each in scan.places.values()),
        scan.labels is None or len(list(scan.labels)) == len(scan.keys),
    ]
    if not (all(fit) and _are_inside(scan, tar)):
        raise ValueError("its columns are wrong")
    return scan


def _are_inside(scan: Scan, tar: Tar) -> bool:
    """Return whether all places of a scan are in its tar."""
    # Places in a compressed tar are those of its content, whose size is not known yet.
    num_bytes = 1 << 62 if isinstance(tar, Unpacked) else tar.written[0]
    starts, sizes, _ = np.concatenate([scan.places[""], *scan.places.values()]).T
    # The sizes of sparse members count their holes.
    are_sparse = np.isin(starts, list(map(int, scan.sparse)))
    are_inside = (starts >= 0) & (are_sparse | (sizes <= num_bytes - starts))
    are_right = (are_inside & (sizes >= 0)) | ((starts == -1) & (sizes == -1))
    stored = [sum(length for _, length in parts) for parts in scan.sparse.values()]
    return bool(are_right.all()) and max(stored, default=0) <= num_bytes


# Of a whole store


def find_in_run(address: str) -> Indexed | None:
    """Return the samples of a store's tars that another node has indexed for the run; None if none has."""
    try:
        return unpacked(Indexed, _read(address))
    except _WRONG:
        return None


def keep_in_run(address: str, indexed: Indexed) -> None:
    """Write the samples of a store's tars for the run's other nodes, once."""
    if find_in_run(address) is not None:
        return
    with contextlib.suppress(ConfigError, OSError):  # it only saves time
        _write(address, packed(indexed))
