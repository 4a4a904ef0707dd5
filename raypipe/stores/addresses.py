"""Which files an address means, here or in an object store: one, those of a folder, or those that a pattern finds.

train.parquet                 itself
data                          all in it of the right names, sorted
data/train-*.parquet          those that the pattern finds; only the last part of a path is a pattern
train-{00000..01023}-of-01024.tar

Data sets come in files named by their split, `train-00000-of-00002.parquet`, which often lie in one folder. A
folder is one store, so it must hold one split, whole.

A folder in an object store that `raypipe convert` wrote has a manifest, `_raypipe.json`, which is written last and
names its shards, so that no half-written store is read; a store that is overwritten stays the old one until then:

    {"version": 1, "shards": [{"name": "00000-8 hex digits.lmdb", "num_bytes": n, "digest": 32 hex digits}, …]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import pyarrow.fs

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, read_json, write_json
from raypipe.storage.filesystem import explained, is_remote, join, open_filesystem, split

MANIFEST = "_raypipe.json"
VERSION = 1

PART_OF = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<num>\d{5,})(?![^.\-])")
"""train-00000-of-00002.parquet, train-00000-of-00002-0123456789abcdef.parquet, train-00000-of-01024"""
_SPLIT = re.compile(r"(train|training|test|testing|val|valid|validation|eval|dev)(?![a-z])", re.IGNORECASE)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_UPLOADED = re.compile(r"\d{5}-[0-9a-f]{8}\.\w+")  # what a conversion calls its shards in an object store
_MAX_SHARDS = 100_000


def expand(address: str) -> list[str]:
    """The addresses that an address with `{0000..0099}` stands for, up to 100,000; any other stands for itself."""
    num_shards = 1
    for span in _RANGE.finditer(address):
        num_shards *= max(0, int(span[2]) - int(span[1]) + 1)
    if not 0 < num_shards <= _MAX_SHARDS:
        raise StoreError(f"{address} stands for {num_shards:,} shards; a store has from 1 to {_MAX_SHARDS:,}")
    addresses = [address]
    while (match := _RANGE.search(addresses[0])) is not None:
        numbers = range(int(match[1]), int(match[2]) + 1)
        addresses = [_RANGE.sub(f"{n:0{len(match[1])}}", name, count=1) for name in addresses for n in numbers]
    return addresses


def list_files(
    address: str, is_one: Callable[[str], bool], what: str, *, folders: bool = False
) -> list[RemoteFile]:
    """The files of a local address, or the objects of a remote one, as a listing or a manifest tells of them.

    Args:
        address: an absolute path or a URI.
        is_one: whether a file of this name in a folder is one of the store's; hidden ones are not.
        what: they are, for the error.
        folders: count local folders as files, as LMDB has environments.

    Raises:
        StoreError: there are none, or the files of a folder belong to several splits or are incomplete.
    """
    expanded = expand(address)
    if expanded != [address]:
        return [RemoteFile(name) for name in expanded]
    folder, pattern = split(address)
    if "*" in pattern:
        files = [name for name in names_at(folder, folders) or () if fnmatchcase(name, pattern)]
    else:
        folder, names = address, names_at(address, folders)
        if names is None:
            return [RemoteFile(address)]
        if MANIFEST in names:
            return _of_manifest(join(address, MANIFEST))
        if is_remote(address) and any(map(_UPLOADED.fullmatch, names)):
            raise StoreError(
                f"{address} is not complete: it is being written, or the conversion was broken off. Wait for it, "
                "or convert it again with --overwrite"
            )
        files = [name for name in names if is_one(name)]
        check_one_split(address, files)
    if not files:
        raise StoreError(f"{address} has no {what} files")
    return [RemoteFile(join(folder, name)) for name in sorted(files)]


def names_at(address: str, folders: bool = False) -> set[str] | None:
    """Names of the files in a folder, with a local one's folders or without, but not of hidden ones.

    None where no folder is; raises StoreError where it cannot be listed, or nothing is at a remote address.
    """
    with explained(StoreError, f"{address} cannot be opened"):
        if not is_remote(address):
            path = Path(address or "/")
            if not path.is_dir():
                return None
            visible = [child for child in path.iterdir() if child.name[0] not in "._"]
            return {child.name for child in visible if folders or not child.is_dir()}
        filesystem, place = open_filesystem(address)
        kind = filesystem.get_file_info(place).type
        if kind == pyarrow.fs.FileType.NotFound:
            raise StoreError(f"{address} does not exist, or its bucket does not")
        return None if kind == pyarrow.fs.FileType.File else names_in(filesystem, place)


def has_folders(address: str) -> bool:
    """Whether there is a folder in one of an object store; raises StoreError where it cannot be listed."""
    with explained(StoreError, f"{address} cannot be opened"):
        filesystem, path = open_filesystem(address)
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(path))
        return any(info.type == pyarrow.fs.FileType.Directory for info in infos)


def names_in(filesystem: pyarrow.fs.FileSystem, path: str) -> set[str]:
    """Names of the files in a folder of a file system, without hidden ones, but with the manifest."""
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
    names = {info.base_name for info in infos if info.type == pyarrow.fs.FileType.File}
    return {name for name in names if name == MANIFEST or name[0] not in "._"}


def check_one_split(address: str, names: Iterable[str]) -> None:
    """Raise StoreError unless a folder's files are all files of one split, as far as their names tell."""
    splits: dict[str, list[str]] = {}
    for name in sorted(names):
        if match := PART_OF.match(name):
            splits.setdefault(match["split"], []).append(name)
        elif match := _SPLIT.match(name):
            splits.setdefault(match[0].lower(), []).append(name)
    if len(splits) > 1:
        listed = ", ".join(f"{split} ({len(files)})" for split, files in sorted(splits.items()))
        split, files = max(splits.items())
        example = files[0] if len(files) == 1 else f"{split}*{PurePosixPath(files[0]).suffix}, in quotes"
        raise StoreError(
            f"{address} holds files of several splits: {listed}. A store is one of them: give "
            f"{address.rstrip('/')}/{example}"
        )
    for split, files in splits.items():
        parts = [match for name in files if (match := PART_OF.match(name))]
        if parts and len({match["number"] for match in parts}) < int(parts[0]["num"]):
            raise StoreError(
                f"{address} holds {len(parts)} of the {int(parts[0]['num'])} files of {split}: fetch the others, "
                "or say by a pattern, such as train-0*, that you mean those"
            )


def _of_manifest(where: str) -> list[RemoteFile]:
    try:
        content = read_json(where)
        if content["version"] != VERSION:
            raise StoreError(f"{where} has version {content['version']}; this raypipe reads version {VERSION}")
        shards = [content["shards"][0], *content["shards"][1:]]  # one at least
        folder, _ = split(where)
        return [
            RemoteFile(join(folder, str(shard["name"])), int(shard["num_bytes"]), digest=str(shard["digest"]))
            for shard in shards
        ]
    except ConfigError as error:
        raise StoreError(str(error)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise StoreError(
            f"{where} is no manifest ({type(error).__name__}: {error}): convert the store again"
        ) from None


def write_manifest(address: str, shards: Iterable[RemoteFile]) -> None:
    """Write a folder's manifest over the one that is there."""
    entries = [
        {"name": split(shard.address)[1], "num_bytes": shard.num_bytes, "digest": shard.digest} for shard in shards
    ]
    write_json(join(address, MANIFEST), {"version": VERSION, "shards": entries})
