"""Atomic writing of new stores: a store is complete at its address or absent, on a disk and in an object store.

local    write to a temporary path in the same folder → rename
remote   upload every shard under a new, random name → manifest → remove the old shards

Also writes the stores of the digits, the dataset of a first run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, digest_of_file
from raypipe.storage.filesystem import (
    check_bucket,
    errors_as,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.storage.local_file import (
    cache_folder,
    locked,
    open_lock,
    try_lock,
)
from raypipe.storage.retrying_filesystem import upload
from raypipe.stores.addresses import MANIFEST, names_in, write_manifest
from raypipe.stores.png import stored_png
from raypipe.stores.writers import open_writer

logger = logging.getLogger(__name__)


# On a disk


@contextlib.contextmanager
def new_path(dst: Path, overwrite: bool) -> Iterator[Path]:
    """Context manager: a path next to `dst` to write to; renamed to `dst` on success, removed otherwise.

    If it is a folder of one file, this file becomes `dst`.
    """
    if not dst.parent.is_dir():
        raise StoreError(f"{dst.parent} is not a folder: make it first")
    lock = dst.parent / f".{dst.name}.lock"
    partial, old = (
        dst.parent / f".{dst.name}.{kind}{dst.suffix}" for kind in ("partial", "old")
    )
    with contextlib.ExitStack() as stack:
        descriptor = open_lock(lock)
        stack.callback(os.close, descriptor)
        # If another process finished between our open and our lock, the locked file has been unlinked.
        if not try_lock(descriptor) or not os.fstat(descriptor).st_nlink:
            raise StoreError(f"another process is writing {dst} at the moment")
        stack.callback(lock.unlink, missing_ok=True)
        if old.exists() and not dst.exists():
            # a process was killed between the renames below
            old.rename(dst)
        if dst.exists():
            _check_replaceable(dst, overwrite, [path.name for path in dst.glob("*")])
        _remove(partial, old)
        stack.callback(_remove, partial)
        yield partial
        files = list(partial.glob("*"))
        new = files[0] if len(files) == 1 else partial
        if dst.is_dir() or (dst.exists() and new.is_dir()):
            # a rename cannot replace a folder
            dst.rename(old)
        new.replace(dst)
        _remove(old)


def _check_replaceable(dst: Path | str, overwrite: bool, names: Iterable[str]) -> None:
    """Raise StoreError if what is at a destination must be kept, by the names of the files in its folder."""
    if not overwrite:
        raise StoreError(
            f"{dst} exists: choose another destination, or overwrite it with --overwrite"
        )
    for name in names:
        if name != MANIFEST and Path(name).suffix != Path(dst).suffix:
            raise StoreError(
                f"{dst} has {name}, which belongs to no store: it is not overwritten. Move it first"
            )


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_atomically(
    dst: str,
    samples: Iterable[dict[str, Any]],
    classes: tuple[str, ...] | None,
    overwrite: bool = False,
) -> None:
    """Write a small store from samples in memory (`image` bytes, `label` int), in this process."""
    path = Path(dst)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        new_path(path, overwrite) as partial,
        open_writer(partial, classes=classes) as writer,
    ):
        for sample in samples:
            writer.append(sample)


# In an object store


@contextlib.contextmanager
def new_remote(dst: str, overwrite: bool) -> Iterator[list[RemoteFile]]:
    """Context manager: a list for the shards that are uploaded, in order; then they replace the old objects.

    On an error the objects that are new are removed.
    """
    check_bucket(dst)
    with errors_as(StoreError, f"{dst} cannot be written"):
        filesystem, path = open_filesystem(dst)
        is_file = filesystem.get_file_info(path).type == pyarrow.fs.FileType.File
        old = {path} if is_file else _paths_in(filesystem, path)
    if old:
        names = [object_path.rpartition("/")[2] for object_path in old]
        _check_replaceable(dst, overwrite, names)
    kept = old
    shards: list[RemoteFile] = []
    try:
        yield shards
        with errors_as(StoreError, f"{dst} cannot be written"):
            write_manifest(dst, shards)
        names = [MANIFEST, *(split_address(shard.address)[1] for shard in shards)]
        kept = {f"{path}/{name}" for name in names}
    finally:
        with contextlib.suppress(OSError):  # an error matters more than what is left
            for left in (old | _paths_in(filesystem, path)) - kept:
                try:
                    filesystem.delete_file(left)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    logger.warning("cannot remove the old %s: %s", left, error)


def _paths_in(filesystem: pyarrow.fs.FileSystem, path: str) -> set[str]:
    return {f"{path}/{name}" for name in names_in(filesystem, path)}


def put_shard(file: Path, dst: str, number: int) -> RemoteFile:
    """Upload a shard under a new, random name; return what the manifest says of it."""
    address = join_address(dst, f"{number:05d}-{secrets.token_hex(4)}{file.suffix}")
    with errors_as(StoreError, f"{dst} cannot be written"):
        shard = RemoteFile(address, file.stat().st_size, digest=digest_of_file(file))
        filesystem, path = open_filesystem(address)
        upload(str(file), filesystem, path)
        num_bytes = filesystem.get_file_info(path).size
        if num_bytes != shard.num_bytes:
            raise OSError(
                f"{address} has {num_bytes} bytes after {shard.num_bytes} were written"
            )
    return shard


# The digits

_HELD_OUT = 360


def digits_stores(folder: Path | None = None) -> tuple[str, str]:
    """Return the addresses of the digits' training and validation stores, which are written on first use.

    The digits are 1,797 real scans of 8 x 8 pixels (E. Alpaydin, C. Kaynak, UCI 1998). 360 of them, an equal share
    of each class, are for validation. raypipe/digits.npz has `levels` (N, 8, 8) and `labels` (N), the training
    samples first.

    Args:
        folder: parent folder of the stores; None = the cache folder.
    """
    folder = (folder or cache_folder()) / "digits-v2"
    train = folder / "train.lmdb"
    val = folder / "val.lmdb"
    if not (train.exists() and val.exists()):
        with errors_as(
            StoreError,
            f"{folder} cannot be written to (RAYPIPE_CACHE may name another folder)",
        ):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                # the processes of torchrun all come here first
                if not (train.exists() and val.exists()):
                    _write_digits(train, val)
    return str(train), str(val)


def _write_digits(train: Path, val: Path) -> None:
    with (files("raypipe") / "digits.npz").open("rb") as file, np.load(file) as digits:
        # scanned with 17 gray levels
        pixels = np.round(digits["levels"] * (255 / 16)).astype(np.uint8)
        labels = digits["labels"].tolist()
    samples = [
        {"image": stored_png(image), "label": label}
        for image, label in zip(pixels, labels, strict=True)
    ]
    for path, split in ((train, samples[:-_HELD_OUT]), (val, samples[-_HELD_OUT:])):
        write_atomically(str(path), split, classes=tuple("0123456789"), overwrite=True)
