"""The files of an address, local or in an object store: one file, the files of a folder, or a pattern's matches.

train.parquet                 the file itself
data                          all files in the folder with the right suffix, sorted
data/train-*.parquet          all files that match; only the last part of a path may be a pattern
train-{00000..01023}-of-01024.tar

The files of a dataset are named by their split, `train-00000-of-00002.parquet`, and several splits often share a
folder. A folder is one store, so it must contain all files of one split, and no others.

`raypipe convert` writes a manifest, `_raypipe.json`, into a folder in an object store. The manifest names the
shards and is written last, so readers never see a half-written store; until then, an overwritten store stays the
old one:

    {"version": 1, "shards": [{"name": "00000-8 hex digits.lmdb", "num_bytes": n, "digest": 32 hex digits}, …]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow.fs

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, read_json, write_json
from raypipe.storage.filesystem import (
    errors_as,
    is_remote,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.stores.splits import split_of

MANIFEST = "_raypipe.json"
MANIFEST_VERSION = 1

PART_OF = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<num>\d{5,})(?![^.\-])")
"""train-00000-of-00002.parquet, train-00000-of-00002-0123456789abcdef.parquet, train-00000-of-01024"""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# name of a shard that a conversion uploaded
_UPLOADED = re.compile(r"\d{5}-[0-9a-f]{8}\.\w+")
_MAX_SHARDS = 100_000
_SYSTEM_NAMES = frozenset(
    {"__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir"}
)


def expand(address: str) -> list[str]:
    """Return the addresses that `{0000..0099}` in an address stands for, up to 100,000, or the address itself."""
    num_shards = 1
    for span in _RANGE.finditer(address):
        num_shards *= max(0, int(span[2]) - int(span[1]) + 1)
    if not 0 < num_shards <= _MAX_SHARDS:
        raise StoreError(
            f"{address} stands for {num_shards:,} shards; a store has from 1 to {_MAX_SHARDS:,}"
        )
    addresses = [address]
    while (match := _RANGE.search(addresses[0])) is not None:
        numbers = range(int(match[1]), int(match[2]) + 1)
        addresses = [
            _RANGE.sub(f"{n:0{len(match[1])}}", name, count=1)
            for name in addresses
            for n in numbers
        ]
    return addresses


def list_files(
    address: str, is_one: Callable[[str], bool], kind: str
) -> list[RemoteFile]:
    """Return the files of a local address, or the objects of a remote one, from a listing or a manifest.

    Args:
        address: an absolute path or a URI.
        is_one: whether a name in a folder is a file of the store; hidden files are skipped before.
        kind: the kind of files, for the error.

    Raises:
        StoreError: there are no files, or a folder's files belong to several splits or are incomplete.
    """
    expanded = expand(address)
    if expanded != [address]:
        return [RemoteFile(name) for name in expanded]
    folder, pattern = split_address(address)
    if "*" in pattern:
        files = [name for name in names_at(folder) or () if fnmatchcase(name, pattern)]
    else:
        folder = address
        names = names_at(address)
        if names is None:
            return [RemoteFile(address)]
        if MANIFEST in names:
            return _of_manifest(join_address(address, MANIFEST))
        if is_remote(address) and any(map(_UPLOADED.fullmatch, names)):
            raise StoreError(
                f"{address} is not complete: a conversion is still running or was interrupted. Wait for it, or "
                "convert again with --overwrite"
            )
        files = [name for name in names if is_one(name)]
        check_one_split(address, files)
    if not files:
        raise StoreError(f"{address} has no {kind} files")
    return [RemoteFile(join_address(folder, name)) for name in sorted(files)]


def names_at(address: str) -> set[str] | None:
    """Return the names of a folder's visible files; None if the address is not a folder.

    Raises:
        StoreError: the folder cannot be listed, or a remote address does not exist.
    """
    with errors_as(StoreError, f"{address} cannot be opened"):
        if not is_remote(address):
            path = Path(address or "/")
            if not path.is_dir():
                return None
            visible = [child for child in path.iterdir() if child.name[0] not in "._"]
            return {child.name for child in visible if not child.is_dir()}
        filesystem, remote_path = open_filesystem(address)
        kind = filesystem.get_file_info(remote_path).type
        if kind == pyarrow.fs.FileType.NotFound:
            raise StoreError(f"{address} or its bucket does not exist")
        if kind == pyarrow.fs.FileType.File:
            return None
        return names_in(filesystem, remote_path)


def is_left_out(name: str) -> bool:
    """Return whether a file or folder of this name never counts: it is hidden, or its system made it."""
    return name.startswith(".") or name in _SYSTEM_NAMES


def folders_at(address: str) -> set[str]:
    """Return the names of a folder's visible folders; raises StoreError if it cannot be listed."""
    with errors_as(StoreError, f"{address} cannot be opened"):
        if not is_remote(address):  # names that are not UTF-8 are unknown to pyarrow
            names = {child.name for child in Path(address).iterdir() if child.is_dir()}
        else:
            filesystem, path = open_filesystem(address)
            infos = filesystem.get_file_info(pyarrow.fs.FileSelector(path))
            names = {
                info.base_name
                for info in infos
                if info.type == pyarrow.fs.FileType.Directory
            }
        return {name for name in names if not is_left_out(name)}


def folders_matching(address: str) -> list[str]:
    """Return the addresses of the folders that a pattern matches, sorted; none if the address is not a pattern."""
    folder, pattern = split_address(address)
    if "*" not in pattern:
        return []
    return [
        join_address(folder, name)
        for name in sorted(folders_at(folder or "."))
        if fnmatchcase(name, pattern)
    ]


def names_in(filesystem: pyarrow.fs.FileSystem, path: str) -> set[str]:
    """Return the names of the files in a folder of a file system: the visible ones, and the manifest."""
    infos = filesystem.get_file_info(
        pyarrow.fs.FileSelector(path, allow_not_found=True)
    )
    names = {info.base_name for info in infos if info.type == pyarrow.fs.FileType.File}
    return {name for name in names if name == MANIFEST or name[0] not in "._"}


def check_one_split(address: str, names: Iterable[str]) -> None:
    """Raise StoreError unless the names show exactly the files of one split, or no split at all."""
    splits: dict[str, list[str]] = {}
    parts: list[re.Match[str]] = []
    for name in sorted(names):
        match = PART_OF.match(name)
        if match is not None:
            parts.append(match)
        if split := match["split"] if match else split_of(name)[0]:
            splits.setdefault(split, []).append(name)
    if len(splits) > 1:
        listed = ", ".join(
            f"{split} ({len(files)})" for split, files in sorted(splits.items())
        )
        example = max(splits.items())[1][0]
        raise StoreError(
            f"{address} has files of several splits: {listed}. A store is one split: choose it, such as "
            f"{address.rstrip('/')}/{example}, or a pattern of its files, in quotes"
        )
    name_of: dict[str, str] = {}
    for part in parts:
        before = name_of.setdefault(part["number"], part.string)
        if before != part.string:
            raise StoreError(
                f"{address} has part {part['number']} of {part['split']} twice, {before} and {part.string}: "
                "remove the files of one version, or choose those of the other with a pattern"
            )
    if parts and len(parts) < int(parts[0]["num"]):
        raise StoreError(
            f"{address} has only {len(parts)} of the {int(parts[0]['num'])} files of {parts[0]['split']}: fetch "
            "the rest, or choose these with a pattern such as train-0*"
        )


def _of_manifest(where: str) -> list[RemoteFile]:
    try:
        content = read_json(where)
        if content["version"] != MANIFEST_VERSION:
            raise StoreError(
                f"{where} has version {content['version']}; this raypipe reads version {MANIFEST_VERSION}"
            )
        folder, _ = split_address(where)
        files = [
            RemoteFile(
                join_address(folder, str(shard["name"])),
                int(shard["num_bytes"]),
                digest=str(shard["digest"]),
            )
            for shard in content["shards"]
        ]
        if not files:
            raise ValueError("it names no shard")
        return files
    except ConfigError as error:
        raise StoreError(str(error)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise StoreError(
            f"{where} is not a manifest ({type(error).__name__}: {error}): convert the store again"
        ) from None


def write_manifest(address: str, shards: Iterable[RemoteFile]) -> None:
    """Write a folder's manifest, replacing an old one."""
    entries = [
        {
            "name": split_address(shard.address)[1],
            "num_bytes": shard.num_bytes,
            "digest": shard.digest,
        }
        for shard in shards
    ]
    write_json(
        join_address(address, MANIFEST),
        {"version": MANIFEST_VERSION, "shards": entries},
    )
