"""A new store exists at its address whole or not at all, here and in an object store.

here     write beside it → rename
remote   write here → upload every shard under a name that none has had before → manifest → remove what was there
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.storage.file_lock import open_lock, try_lock
from raypipe.storage.filesystem import check_bucket, explained, join, open_filesystem, split
from raypipe.storage.local_file import cache_folder, make_cache_folder
from raypipe.storage.remote_file import RemoteFile, digest_of_file
from raypipe.stores.addresses import MANIFEST, is_complete, names_in, write_manifest
from raypipe.stores.record import FileWriter

logger = logging.getLogger(__name__)

# Suffix → the module and the class of its writer.
_WRITERS = {
    ".lmdb": ("lmdb_shard", "LMDBWriter"),
    ".parquet": ("parquet_files", "ParquetWriter"),
}
WRITTEN_SUFFIXES = tuple(_WRITERS)
"""Of the files that `open_writer` makes."""
_PART_BYTES = 8 << 20


def open_writer(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> FileWriter:
    """Return the writer, not yet entered, for a new file: `.lmdb` or `.parquet`.

    Args:
        path: the file to make.
        columns: all columns, name → int64, float64, binary or string; None for `image` and `label`.
        classes: class names, position = label.
        options: further arguments of the writer's class.
    """
    suffix = Path(path).suffix
    if suffix not in _WRITERS:
        raise StoreError(f"{path} cannot be written: the suffix must be one of {', '.join(_WRITERS)}")
    module, name = _WRITERS[suffix]
    return getattr(import_module(f"raypipe.stores.{module}"), name)(path, columns, classes, **options)


# Here


@contextlib.contextmanager
def new_path(dst: Path, overwrite: bool) -> Iterator[Path]:
    """A path beside `dst` to write to; renamed to `dst` on success, removed otherwise.

    Raises:
        StoreError: `dst` exists, its folder does not, or another process is writing it.
    """
    if not dst.parent.is_dir():
        raise StoreError(f"{dst.parent} is not a folder: make it first")
    lock = dst.parent / f".{dst.name}.lock"
    held = open_lock(lock)
    try:
        if not try_lock(held, exclusive=True):
            raise StoreError(f"another process is writing {dst} at the moment")
        if not os.fstat(held).st_nlink:
            # Opened before, and locked after, another process finished and removed the file.
            raise StoreError(f"another process has written {dst} at this moment")
        try:
            if dst.exists() and not overwrite:
                raise StoreError(_exists(dst))
            _remove_partials(dst)  # of a process that was killed
            partial = dst.parent / f".{dst.name}.partial-{secrets.token_hex(4)}{dst.suffix}"
            try:
                yield partial
                _move(partial, dst)
            finally:
                _remove(partial)
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(held)


def _exists(dst: Path | str) -> str:
    return f"{dst} exists: choose another destination, or overwrite it with --overwrite"


def _move(partial: Path, dst: Path) -> None:
    if dst.exists() and (dst.is_dir() or partial.is_dir()):  # which no rename replaces
        old = partial.with_name(partial.name.replace(".partial-", ".partial-old-"))
        dst.rename(old)
        partial.rename(dst)
        _remove(old)
    else:
        partial.replace(dst)


def _remove_partials(dst: Path) -> None:
    # The whole name counts: train.parquet, written beside train.lmdb, has partials of its own.
    name = re.compile(re.escape(f".{dst.name}.partial-") + "(old-)?[0-9a-f]{8}" + re.escape(dst.suffix))
    for path in dst.parent.iterdir():
        if name.fullmatch(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_atomically(
    dst: str, samples: Iterable[dict[str, Any]], classes: tuple[str, ...] | None, overwrite: bool = False
) -> None:
    """Write a small store from samples in memory (`image` bytes, `label` int), in this process."""
    path = Path(dst)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_path(path, overwrite) as partial, open_writer(partial, classes=classes) as writer:
        for sample in samples:
            writer.append(sample)


# In an object store


@contextlib.contextmanager
def new_remote(dst: str, overwrite: bool) -> Iterator[Path]:
    """A local path to write to, a file or a folder of shards; on success it is uploaded, and removed in any case.

    It is in the cache folder (RAYPIPE_CACHE), which must have room for the whole store.

    Raises:
        StoreError: there is a store at `dst`, or it cannot be written.
        ConfigError: the bucket cannot be used.
    """
    check_bucket(dst)
    _there(dst, overwrite)
    with explained(StoreError, f"{cache_folder()} cannot be written to"):
        folder = Path(tempfile.mkdtemp(prefix="ingest-", dir=make_cache_folder()))
    try:
        path = folder / f"store{Path(split(dst)[1]).suffix}"
        yield path
        with explained(StoreError, f"{dst} cannot be written"):
            _upload(sorted(path.iterdir()) if path.is_dir() else [path], dst, _there(dst, overwrite))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _there(dst: str, overwrite: bool) -> set[str]:
    """Paths of the objects of the store at an address; raises StoreError unless there are none, or they may go."""
    with explained(StoreError, f"{dst} cannot be written"):
        filesystem, path = open_filesystem(dst)
        if filesystem.get_file_info(path).type == pyarrow.fs.FileType.File:
            found = {path}
        else:
            found = {f"{path}/{name}" for name in names_in(filesystem, path)}
    if found and not overwrite:
        if f"{path}/{MANIFEST}" in found and not is_complete(dst):
            raise StoreError(
                f"{dst} is not complete: another process is writing it, or was broken off. Wait for it, or "
                "overwrite it with --overwrite"
            )
        raise StoreError(_exists(dst))
    return found


def _upload(files: list[Path], dst: str, old: set[str]) -> None:
    filesystem, path = open_filesystem(dst)
    manifest, token = f"{path}/{MANIFEST}", secrets.token_hex(4)
    shards = [
        RemoteFile(
            join(dst, f"{number:05d}-{token}{file.suffix}"), file.stat().st_size, digest=digest_of_file(file)
        )
        for number, file in enumerate(files)
    ]
    was_complete = manifest in old and is_complete(dst)
    try:
        if not was_complete:
            write_manifest(dst, [], complete=False)
        for file, shard in zip(files, shards, strict=True):
            _copy(file, shard)
        write_manifest(dst, shards, complete=True)
    except BaseException:
        left = {open_filesystem(shard.address)[1] for shard in shards}
        _remove_objects(filesystem, left if was_complete else left | {manifest})
        raise
    _remove_objects(filesystem, old - {manifest})


def _copy(file: Path, shard: RemoteFile) -> None:
    filesystem, path = open_filesystem(shard.address)
    with file.open("rb") as source, filesystem.open_output_stream(path) as target:
        shutil.copyfileobj(source, target, _PART_BYTES)
    num_bytes = filesystem.get_file_info(path).size
    if num_bytes != shard.num_bytes:
        raise OSError(f"{shard.address} has {num_bytes} bytes, {shard.num_bytes} were written")


def _remove_objects(filesystem: pyarrow.fs.FileSystem, paths: Iterable[str]) -> None:
    for path in paths:
        try:
            filesystem.delete_file(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s is left over and cannot be removed: %s", path, error)
