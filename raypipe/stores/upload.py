"""A new store in an object store exists at its address whole or not at all: its manifest is written last.

write here → upload every shard under a name that none has had before → manifest → remove what was there before
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.storage.filesystem import check_bucket, explained, join, open_filesystem, split
from raypipe.storage.local_cache import cache_folder, make_cache_folder
from raypipe.storage.remote_file import digest_of_file
from raypipe.stores.remote import MANIFEST, Listed, is_complete, names_in, write_manifest

logger = logging.getLogger(__name__)

_PART_BYTES = 8 << 20


@contextlib.contextmanager
def new_remote(dst: str, overwrite: bool) -> Iterator[Path]:
    """A local path to write to, a file or a folder of shards; on success it is uploaded, and removed in any case.

    It is in the cache folder (RAYPIPE_CACHE), which must have room for the whole store.

    Raises:
        StoreError: there is a store at `dst`, or it cannot be written.
        ConfigError: the bucket cannot be used.
    """
    check_bucket(dst)
    _check_free(dst, overwrite)
    suffix = Path(split(dst)[1]).suffix
    with explained(StoreError, f"{cache_folder()} cannot be written to"):
        folder = Path(tempfile.mkdtemp(prefix="ingest-", dir=make_cache_folder()))
    try:
        path = folder / f"store{suffix}"
        yield path
        _check_free(dst, overwrite)
        _upload(sorted(path.iterdir()) if path.is_dir() else [path], dst)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_free(dst: str, overwrite: bool) -> None:
    with explained(StoreError, f"{dst} cannot be written"):
        filesystem, path = open_filesystem(dst)
        if overwrite:
            return
        is_object = filesystem.get_file_info(path).type == pyarrow.fs.FileType.File
        names = set() if is_object else names_in(filesystem, path)
        if not is_object and not names:
            return
    if MANIFEST in names and not is_complete(dst):
        raise StoreError(
            f"{dst} is not complete: another process is writing it, or was broken off. Wait for it, or overwrite "
            "it with --overwrite"
        )
    raise StoreError(f"{dst} exists: choose another destination, or overwrite it with --overwrite")


def _upload(files: list[Path], dst: str) -> None:
    with explained(StoreError, f"{dst} cannot be written"):
        filesystem, path = open_filesystem(dst)
        single = filesystem.get_file_info(path).type == pyarrow.fs.FileType.File
        old = set() if single else names_in(filesystem, path)
        token = secrets.token_hex(4)
        shards = [
            Listed(join(dst, f"{number:05d}-{token}{file.suffix}"), file.stat().st_size, digest_of_file(file))
            for number, file in enumerate(files)
        ]
        was_complete = MANIFEST in old and is_complete(dst)
        try:
            if not was_complete:
                write_manifest(dst, [], complete=False)
            for file, shard in zip(files, shards, strict=True):
                _copy(file, shard)
            write_manifest(dst, shards, complete=True)
        except BaseException:
            left = [split(shard.address)[1] for shard in shards] + ([] if was_complete else [MANIFEST])
            _remove(filesystem, [f"{path}/{name}" for name in left])
            raise
        _remove(filesystem, [f"{path}/{name}" for name in old - {MANIFEST}] + ([path] if single else []))


def _copy(file: Path, shard: Listed) -> None:
    filesystem, path = open_filesystem(shard.address)
    with file.open("rb") as source, filesystem.open_output_stream(path) as target:
        while data := source.read(_PART_BYTES):
            target.write(data)
    num_bytes = filesystem.get_file_info(path).size
    if num_bytes != shard.num_bytes:
        raise OSError(f"{shard.address} has {num_bytes} bytes, {shard.num_bytes} were written")


def _remove(filesystem: pyarrow.fs.FileSystem, paths: list[str]) -> None:
    for path in paths:
        try:
            filesystem.delete_file(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s is left over and cannot be removed: %s", path, error)
