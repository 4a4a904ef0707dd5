"""The objects that make up a store in an object store.

    s3://bucket/train.lmdb                one object, or a folder: all in it of the right suffix, sorted by name
    s3://bucket/train-{0000..0099}.tar    a hundred
    s3://bucket/data/train-*.parquet      those in the folder whose names fit

A folder that `raypipe ingest` wrote has a manifest, `_raypipe.json`, which is written last and names its shards:

    {"version": 1, "complete": true, "shards": [{"name": "…", "num_bytes": n, "digest": 32 hex digits}, …]}

Until then it says that it is not complete, so that no half of a store is read. A store that is written over
stays the old one until the manifest is another.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import pyarrow.fs

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.filesystem import explained, join, open_filesystem, split
from raypipe.storage.remote_file import RemoteFile
from raypipe.storage.whole_file import read_json, write_json
from raypipe.stores.addresses import check_one_split, expand

MANIFEST = "_raypipe.json"
VERSION = 1


def list_shards(address: str, suffix: str) -> list[RemoteFile]:
    """The objects of the store at a remote address, as far as a listing or a manifest tells of them.

    Args:
        address: an object, several of them, or a folder.
        suffix: of the objects in a folder, such as ".lmdb".

    Raises:
        StoreError: there is nothing, a folder is not complete or holds several splits, or it cannot be reached.
    """
    expanded = expand(address)
    if expanded != [address]:
        return [RemoteFile(name) for name in expanded]
    folder, pattern = split(address)
    if "*" in pattern:
        with explained(StoreError, f"{address} cannot be opened"):
            found = sorted(names_in(*open_filesystem(folder)))
        found = [name for name in found if fnmatchcase(name, pattern)]
        if not found:
            raise StoreError(f"{address} finds no files")
        return [RemoteFile(join(folder, name)) for name in found]
    names = _names_at(address)
    if names is None:
        return [RemoteFile(address)]
    if MANIFEST in names:
        return _of_manifest(address)
    found = sorted(name for name in names if name.endswith(suffix))
    if not found:
        raise StoreError(f"{address} has no *{suffix} files")
    check_one_split(address, found)
    return [RemoteFile(join(address, name)) for name in found]


def kind_of_folder(address: str) -> str:
    """The suffix of the shards in a remote folder, without its dot; "" where there is no one such.

    Raises:
        StoreError: it cannot be reached.
    """
    suffixes = {name.rpartition(".")[2] for name in _names_at(address) or ()} & {"lmdb", "parquet", "tar"}
    return suffixes.pop() if len(suffixes) == 1 else ""


def _names_at(address: str) -> set[str] | None:
    """`names_in` the folder at an address; None where an object is."""
    with explained(StoreError, f"{address} cannot be opened"):
        filesystem, path = open_filesystem(address)
        kind = filesystem.get_file_info(path).type
        if kind == pyarrow.fs.FileType.NotFound:
            raise StoreError(f"{address} does not exist, or its bucket does not")
        return None if kind == pyarrow.fs.FileType.File else names_in(filesystem, path)


def names_in(filesystem: pyarrow.fs.FileSystem, path: str) -> set[str]:
    """Names of the files in a folder, without hidden ones."""
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
    names = {info.base_name for info in found if info.type == pyarrow.fs.FileType.File}
    return {name for name in names if name == MANIFEST or name[0] not in "._"}


def is_complete(address: str) -> bool:
    """Whether the folder at an address, which has a manifest, is a whole store."""
    try:
        return read_json(join(address, MANIFEST))["complete"] is True
    except (ConfigError, KeyError, TypeError):
        return False


def _of_manifest(address: str) -> list[RemoteFile]:
    where = join(address, MANIFEST)
    try:
        content = read_json(where)
        if content["version"] != VERSION:
            raise StoreError(f"{where} has version {content['version']}; this raypipe reads version {VERSION}")
        if content["complete"] is not True:
            raise StoreError(
                f"{address} is not complete: it is being written, or its ingest was broken off. Wait for it, or "
                "ingest it again with --overwrite"
            )
        return [
            RemoteFile(join(address, str(shard["name"])), int(shard["num_bytes"]), digest=str(shard["digest"]))
            for shard in content["shards"]
        ]
    except ConfigError as error:
        raise StoreError(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{where} is no manifest ({type(error).__name__}: {error}): ingest the store again"
        ) from None


def write_manifest(address: str, shards: Iterable[RemoteFile], complete: bool) -> None:
    """Write a folder's manifest over the one that is there.

    Raises:
        ConfigError: it cannot be written.
    """
    entries = [
        {"name": split(shard.address)[1], "num_bytes": shard.num_bytes, "digest": shard.digest} for shard in shards
    ]
    write_json(join(address, MANIFEST), {"version": VERSION, "complete": complete, "shards": entries})
