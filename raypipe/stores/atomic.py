"""A new store exists at its address whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_lock, try_lock
from raypipe.stores import open_writer


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
                raise StoreError(f"{dst} exists: choose another destination, or overwrite it with --overwrite")
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
