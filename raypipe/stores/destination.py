"""A new store exists at its address whole or not at all, here and in an object store; and how samples are kept.

here     write beside it → rename
remote   write here → upload every shard under a name that none has had before → manifest → remove what was there
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.storage.file_lock import open_lock, try_lock
from raypipe.storage.filesystem import check_bucket, explained, join, open_filesystem, split
from raypipe.storage.local_file import cache_folder, make_cache_folder
from raypipe.storage.remote_file import RemoteFile, digest_of_file
from raypipe.stores.addresses import MANIFEST, names_in, write_manifest
from raypipe.stores.record import Sample, column_types, plain
from raypipe.stores.writers import open_writer

logger = logging.getLogger(__name__)

_CHUNK = 64  # samples that are encoded at a time
_NUM_VAL = 360  # digits held out for validation, the same share of each class


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
    partial, old = (dst.parent / f".{dst.name}.{kind}{dst.suffix}" for kind in ("partial", "old"))
    held = open_lock(lock)
    try:
        # A lock that was opened before, and taken after, another process finished is on a file that is gone.
        if not try_lock(held, exclusive=True) or not os.fstat(held).st_nlink:
            raise StoreError(f"another process is writing {dst} at the moment")
        try:
            if old.exists() and not dst.exists():  # a process was killed between the renames below
                old.rename(dst)
            if dst.exists() and not overwrite:
                raise StoreError(_exists(dst))
            _remove(partial, old)
            try:
                yield partial
                if dst.is_dir() or (dst.exists() and partial.is_dir()):  # which no rename replaces
                    dst.rename(old)
                partial.replace(dst)
                _remove(old)
            finally:
                _remove(partial)
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(held)


def _exists(dst: Path | str) -> str:
    return f"{dst} exists: choose another destination, or overwrite it with --overwrite"


def _remove(*paths: Path) -> None:
    for path in paths:
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


def digits_stores(folder: Path | None = None) -> tuple[str, str]:
    """Addresses of the training and the validation store of the digits; written on first use.

    They are the 1,797 that scikit-learn ships: real scans of 8 x 8 pixels (E. Alpaydin, C. Kaynak, UCI 1998).

    Args:
        folder: where they are kept; None = the cache folder.
    """
    folder = (folder or cache_folder()) / "digits-v1"
    train, val = folder / "train.lmdb", folder / "val.lmdb"
    if not (train.exists() and val.exists()):
        _write_digits(train, val)
    return str(train), str(val)


def _write_digits(train: Path, val: Path) -> None:
    import cv2
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)  # scanned with 17 grey levels
    samples = [
        {"image": cv2.imencode(".png", image)[1].tobytes(), "label": int(label)}
        for image, label in zip(pixels, data.target, strict=True)
    ]
    chosen = train_test_split(samples, test_size=_NUM_VAL, random_state=0, stratify=data.target)
    for path, part in zip((train, val), chosen, strict=True):
        write_atomically(str(path), part, classes=tuple("0123456789"), overwrite=True)


# Of samples that can be read once


@contextlib.contextmanager
def kept_samples(samples: Iterator[Sample], classes: Sequence[str] | None, short_side: int) -> Iterator[Path]:
    """Within, the file of a store in the cache folder that has the samples, in their order.

    Args:
        samples: see `raypipe.ingest`; each is taken once. One whose image is None may lack the other columns.
        classes: names, position = label.
        short_side: see `column_types`.
    """
    folder = Path(tempfile.mkdtemp(prefix="samples-", dir=make_cache_folder()))
    try:
        with ThreadPoolExecutor() as pool:  # pixels are encoded, a chunk at a time
            chunks = iter(lambda: list(pool.map(_encoded, itertools.islice(samples, _CHUNK))), [])
            first = next(chunks, [])
            if not first:
                raise StoreError("there are no samples")
            values: dict[str, list[Any]] = {}
            for sample in first:
                for name, value in sample.items():
                    values.setdefault(name, []).append(value)
            columns = column_types(values, "the samples", short_side)
            blank = {name: 0 if kind in ("int64", "float64") else None for name, kind in columns.items()}
            file = folder / "samples.lmdb"
            with open_writer(file, columns, classes) as writer:
                for sample in itertools.chain(first, itertools.chain.from_iterable(chunks)):
                    writer.append(plain({**blank, **sample} if sample["image"] is None else sample))
        yield file
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _encoded(sample: Sample) -> dict[str, Any]:
    """A sample whose image is bytes, or None."""
    import cv2

    if not isinstance(sample, Mapping) or "image" not in sample:
        raise StoreError(f"a sample is a mapping of columns, `image` among them, not {sample!r:.200}")
    image = sample["image"]
    if image is None or isinstance(image, bytes | bytearray | memoryview):
        return {**sample, "image": None if image is None else bytes(image)}
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3))):
        raise StoreError(
            f"an image is {pixels.dtype} of {pixels.shape}; images are encoded bytes, or uint8 (H, W, 3), "
            "(H, W, 1) or (H, W)"
        )
    # OpenCV has blue first.
    ok, png = cv2.imencode(".png", pixels[..., ::-1] if pixels.shape[2:] == (3,) else pixels)
    assert ok
    return {**sample, "image": png.tobytes()}


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
    """Paths of the objects at an address; raises StoreError unless there are none, or they may go."""
    with explained(StoreError, f"{dst} cannot be written"):
        filesystem, path = open_filesystem(dst)
        if filesystem.get_file_info(path).type == pyarrow.fs.FileType.File:
            found = {path}
        else:
            found = {f"{path}/{name}" for name in names_in(filesystem, path)}
    if found and not overwrite:
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
    try:
        for file, shard in zip(files, shards, strict=True):
            _copy(file, shard)
        write_manifest(dst, shards)
    except BaseException:
        _remove_objects(filesystem, ({open_filesystem(shard.address)[1] for shard in shards} | {manifest}) - old)
        raise
    _remove_objects(filesystem, old - {manifest})


def _copy(file: Path, shard: RemoteFile) -> None:
    filesystem, path = open_filesystem(shard.address)
    pyarrow.fs.copy_files(str(file), path, destination_filesystem=filesystem)
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
