"""Indexes of tars: the scan of each, kept so that it is made once.

    CACHE/scans/HASH-tar-9.json                        of remote and large local tars, for this node
    FOLDER/_raypipe_index/NAME.tar.HASH-9.index        next to the tars, which `raypipe index` writes
    RUN/index/NAME.tar.HASH-9.index                    in the folder of a run, for its other nodes

An index names the size and version of its tar, and is made again where they differ. Its numbers are checked as
those of any file that somebody else may have written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import (
    RemoteFile,
    open_input,
    read_json,
    write_bytes,
    write_json,
)
from raypipe.storage.filesystem import (
    is_remote,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.storage.local_cache import Unpacked
from raypipe.storage.local_file import OpenFile
from raypipe.stores.addresses import names_in
from raypipe.stores.base import hash_of_facts
from raypipe.stores.webdataset import Scan

logger = logging.getLogger(__name__)

INDEX_FOLDER = "_raypipe_index"
_VERSION = 9  # the scans' layout has this version
_SUFFIX = f"-{_VERSION}.index"
_MAX_STORED_BYTES = 256 << 20
_MAX_BYTES = 1 << 30  # an index of 14 million samples

File = OpenFile | RemoteFile | Unpacked


def version_of(file: File) -> tuple[int, str]:
    """Return size and version of a tar, which are different for different contents."""
    if isinstance(file, OpenFile):
        status = os.fstat(file.descriptor)
        return status.st_size, str(status.st_mtime_ns)
    stored = file.file if isinstance(file, Unpacked) else file
    return stored.num_bytes, stored.version


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

    def find(self, name: str, file: File) -> Scan | None:
        """Return the scan of a tar; None if there is no index of it as it is now."""
        for address in self._addresses(name):
            folder, file_name = split_address(address)
            if file_name in self._names_in(folder):
                try:
                    return _read(address, file)
                except _OutdatedError as error:
                    logger.warning(
                        "%s: %s; the tar is scanned. `raypipe index` renews the index",
                        *error.args,
                    )
        return None

    def keep_beside(self, name: str, file: File, scan: Scan) -> str:
        """Write the index of a tar next to it, and return its address."""
        address = self._addresses(name)[0]
        _write(address, name, file, scan)
        return address

    def keep_in_run(self, name: str, file: File, scan: Scan) -> None:
        """Write the index of a tar into the folder of the run, unless it has one there or next to it."""
        addresses = map(split_address, self._addresses(name))
        if self._run_folder and not any(
            file_name in self._names_in(folder) for folder, file_name in addresses
        ):
            with contextlib.suppress(ConfigError, OSError):  # it only saves time
                _write(self._addresses(name)[-1], name, file, scan)

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


class _OutdatedError(Exception):
    """An index that cannot be used: its address, and why."""


def _write(address: str, name: str, file: File, scan: Scan) -> None:
    num_bytes, version = version_of(file)
    content = {
        "tar": split_address(name)[1],
        "num_bytes": num_bytes,
        "object": version,
        "scan": scan,
    }
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    packed = packer.compress(json.dumps(content).encode()) + packer.flush()
    if not is_remote(address):
        Path(split_address(address)[0]).mkdir(parents=True, exist_ok=True)
    write_bytes(address, packed)


def _read(address: str, file: File) -> Scan:
    try:
        with open_input(*open_filesystem(address)) as source:
            if source.size() > _MAX_STORED_BYTES:
                raise ValueError(f"it has more than {_MAX_STORED_BYTES:,} bytes")
            packed = source.read()
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        text = unpacker.decompress(packed, _MAX_BYTES)
        if not unpacker.eof:
            raise ValueError(
                f"it is truncated, or unpacks to more than {_MAX_BYTES:,} bytes"
            )
        content = json.loads(text)
        num_bytes, version = version_of(file)
        if (content["num_bytes"], content["object"]) != (num_bytes, version):
            raise ValueError("it belongs to another version of the tar")
        # Places in a compressed tar are those of its content, whose size is not known yet.
        _check(content["scan"], 1 << 62 if isinstance(file, Unpacked) else num_bytes)
        return content["scan"]
    except FileNotFoundError:
        raise _OutdatedError(address, "it was removed meanwhile") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        zlib.error,
        OSError,
    ) as error:
        raise _OutdatedError(
            address, f"{type(error).__name__}: {error!s:.200}"
        ) from error


def _check(scan: Any, num_bytes: int) -> None:
    """Raise ValueError, KeyError or TypeError unless a scan has the layout of one, within a tar of this size."""
    _check_counts(scan["left_out"])
    digest = scan["digest"]
    _require(isinstance(digest, str) and len(digest) == 32, "digest")
    _check_sparse(scan["sparse"], num_bytes)
    if "files" in scan:
        _check_class_folders(scan, num_bytes)
    else:
        _check_samples(scan, num_bytes)


def _check_sparse(sparse: Mapping[str, Any], num_bytes: int) -> None:
    """Check the stored ranges of sparse members, by the position of each member."""
    for start, ranges in sparse.items():
        are_pairs = all(len(pair) == 2 for pair in ranges)
        _require(start.isdecimal() and are_pairs, "sparse")
        _require(_are_counts([number for pair in ranges for number in pair]), "sparse")
        stored_bytes = sum(length for _, length in ranges)
        _require(int(start) + stored_bytes <= num_bytes, "sparse")


def _check_class_folders(scan: Any, num_bytes: int) -> None:
    """Check what `class_tar.find_files` returns."""
    about = scan["about"]
    files = scan["files"]
    _check_texts(files, "files")
    _check_places(scan["places"], len(files), num_bytes, scan["sparse"])
    _check_counts(about["left_out"])
    classes = about["classes"]
    nums = about["nums"]
    _require(_are_counts(nums) and len(nums) == len(classes), "classes")
    _check_places(about["places"], sum(nums), num_bytes, scan["sparse"])
    _check_texts([*classes, about["root"], about["keys"]], "names")
    splits, folders, *names = about["doubts"]
    _check_texts([folders, *splits, *itertools.chain(*names)], "doubts")
    flags = about["has_images"], about["is_plain"]
    _require(all(isinstance(flag, bool) for flag in flags), "flags")
    for number, node in scan["others"].items():
        _require(number.isdecimal() and int(number) < len(files), "others")
        _require(len(node) in (0, 2), "others")
        _check_texts(node, "others")


def _check_samples(scan: Any, num_bytes: int) -> None:
    """Check what `webdataset.find_samples` returns."""
    num = scan["num"]
    labels = scan["labels"]
    _require(_are_counts([num]), "num")
    _check_texts([scan["first_key"], scan["keys"]], "keys")
    are_labels = isinstance(labels, list) and len(labels) == num
    _require(labels is None or are_labels, "labels")
    _require("" in scan["places"], "places")
    for places in scan["places"].values():
        _check_places(places, num, num_bytes, scan["sparse"])


def _check_places(
    places: Any, num: int, num_bytes: int, sparse: Mapping[str, Any]
) -> None:
    _require(isinstance(places, list) and len(places) == 2 * num, "places")
    _require(all(type(number) is int for number in places), "places")
    for start, size in zip(places[::2], places[1::2], strict=True):
        if (start, size) == (-1, -1):  # no member
            continue
        # The sizes of sparse members count their holes.
        is_inside = str(start) in sparse or start + size <= num_bytes
        _require(start >= 0 <= size and is_inside, "places")


def _check_counts(counts: Any) -> None:
    _check_texts(counts, "left_out")
    _require(_are_counts(list(counts.values())), "left_out")


def _check_texts(values: Any, field: str) -> None:
    _require(all(isinstance(value, str) for value in values), field)


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < 1 << 62 for number in numbers
    )


def _require(is_right: bool, field: str) -> None:
    if not is_right:
        raise ValueError(f"its {field} are wrong")


def read_kept(path: Path) -> Scan | None:
    """Return a scan that this node keeps; None if there is none, or it is damaged."""
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        return read_json(path)["scan"]
    return None


def keep(path: Path, scan: Scan) -> None:
    """Keep a scan for this node, if there is room."""
    with contextlib.suppress(ConfigError):
        write_json(path, {"scan": scan})
