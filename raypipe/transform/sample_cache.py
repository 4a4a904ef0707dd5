"""Decoded samples of a store that a node keeps across epochs, on its disk; see docs/performance.md.

    ROOT/KEY     one file per store (its fingerprint), settings and versions of the decode, limit, and start of the
                 machine; its content is a pure function of these and a sample's index
        header   uint64 (3,): the limit, bytes; the store's samples, N; whether a full cache was logged
        words    uint64 (N,): where each sample's record begins; 0 = it is not here
        records  index, label, height and width, then the pixels; all processes append them
                 a shared lock on it: a process has it open; exclusive: it is being removed
    ROOT/.lock   exclusive lock: somebody opens caches, and removes those that no process has open

ROOT is RAYPIPE_CACHE/samples. A sample's word is set last and in one store of 8 bytes. So a process that dies
while it writes leaves a record that nothing points to, and two that write the same sample leave two equal
records, of which the later word shows one. A reboot starts new files, since a power failure may leave records
in part.

All actors map one file instead of using objects in Ray's store: to get an object takes 0.2 ms in a request for
many, and up to 1.5 ms by itself, but decoding a small image takes 0.1 ms; an object is lost with the actor that
made it; a process must keep all ids; and blocks in flight would compete for the store's room.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import shutil
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import raypipe
from raypipe.config import PoolConfig, TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.lookup import version_of
from raypipe.plan.places import Split
from raypipe.storage import local_file
from raypipe.stores.base import Store
from raypipe.transform.decode import decode
from raypipe.transform.samples import Decoded

logger = logging.getLogger(__name__)

# To be raised by whoever changes the files' format, or the pixels that raypipe.transform.decode makes.
_FORMAT = 3
_DECODERS = ("simplejpeg", "opencv-python-headless", "opencv-python", "pillow")
_KEY = re.compile(r"[0-9a-f]{32}(\.new)?")
_DEFAULT_SHARE, _MOST = 0.25, 0.9  # share of the free space: shards need room too
_HEADER = struct.Struct("<QQQ")  # share of the file
_RECORD = struct.Struct("<qqII")  # index, label, height, width


class SampleCache:
    """The decoded samples of one store, shared by all processes of the node. Open it with `open_caches`.

    Its file is kept as long as this object is there.

    Attributes:
        full: this process can add nothing more.
    """

    def __init__(self, path: Path, config: TransformConfig) -> None:
        self._path, self._config = path, config
        self._file = local_file.open_regular(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._file)
        local_file.wait_for_lock(self._file, exclusive=False)
        self._limit, num_samples, _ = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0))
        table = np.frombuffer(mmap.mmap(self._file, _HEADER.size + 8 * num_samples), np.uint64)
        self._header, self._words = table[:3], table[3:]
        self._records = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self.full = False

    def find(self, indices: np.ndarray) -> dict[int, Decoded]:
        """Position → sample, of those of int64 indices (n,) that are here; negative ones are padding."""
        words = np.where(indices >= 0, self._words[indices], 0)
        if words.any() and os.fstat(self._file).st_size > len(self._records):
            self._records = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        samples = {}
        for position in np.flatnonzero(words).tolist():
            at = int(words[position]) + _RECORD.size
            if at > len(self._records):
                continue
            index, label, height, width = _RECORD.unpack_from(self._records, at - _RECORD.size)
            num_values = height * width * 3
            # Else no process has written this.
            if index == indices[position] and num_values and at + num_values <= len(self._records):
                pixels = np.frombuffer(self._records, np.uint8, num_values, at)
                samples[position] = Decoded(pixels.reshape(height, width, 3), label)
        return samples

    def decoded(self, index: int, label: int, data: bytes | memoryview | None) -> Decoded | None:
        """Decode a sample, and keep it; None: there is no room for more, or it is a bad one."""
        if self.full:
            return None
        try:
            pixels = decode(data, min_side=self._config.decode_min_side, exif=self._config.apply_exif)
        except SampleError:
            return None
        self.put(index, label, pixels)
        return Decoded(pixels, label)

    def put(self, index: int, label: int, pixels: np.ndarray) -> None:
        """Keep a sample, if there is room: its pixels uint8 (H, W, 3), C-contiguous."""
        if self.full or self._words[index]:
            return
        record: list[Any] = [_RECORD.pack(index, label, *pixels.shape[:2]), pixels.data]
        num_bytes = _RECORD.size + pixels.nbytes
        status = os.fstat(self._file)
        if status.st_size + num_bytes > self._limit:  # several that look at once may pass it by an image each
            self._end(status.st_size + num_bytes)
            return
        try:
            if not status.st_nlink:
                raise OSError("it has been removed")
            # Written, not mapped: where the disk is full this is an error, and not the end of the process.
            written = os.writev(self._file, record)  # where the file ends by now
            if written != num_bytes:
                raise OSError(f"{written} of {num_bytes} bytes could be written")
        except OSError as error:
            self._give_up(str(error))
            return
        # An aligned store of 8 bytes is seen whole or not at all; and, on any CPU, not before the pixels: the
        # kernel's locks of the write, and the interpreter's behind it, lie between the two.
        self._words[index] = os.lseek(self._file, 0, os.SEEK_CUR) - num_bytes

    def _end(self, wanted: int) -> None:
        """There is no room left for what would make the file so many bytes; the first to see it tells."""
        if self._header[2]:
            self.full = True
            return
        self._header[2] = 1
        num_samples, num_kept = len(self._words), int(np.count_nonzero(self._words))
        self._give_up(
            f"it is full: its {self._limit:,} bytes hold {num_kept:,} of {num_samples:,} samples, and the others "
            "are decoded in every epoch; "
            f"pool.cache={round(1.1 * wanted * num_samples / (num_kept + 1))} would hold about all of them"
        )

    def _give_up(self, reason: str) -> None:
        self.full = True
        logger.warning("nothing more goes into the cache of decoded samples %s: %s", self._path, reason)


def check_cache(pool: PoolConfig, transform: TransformConfig) -> None:
    """Raise ConfigError where what is decoded is not the same in each epoch."""
    reason = ""
    if transform.decode_as == "array":
        reason = "transform.decode_as='array' gives none of 8 bits"
    elif transform.target_columns:
        reason = f"{transform.target_settings} names what it does not keep"
    elif transform.crop_decode == "scaled":
        reason = "with transform.crop_decode='scaled' each crop is decoded at a scale of its own"
    if reason and pool.cache != "off":
        raise ConfigError(
            f"pool.cache={pool.cache!r} keeps whole images as actors decode them, and {reason}: leave that out, "
            "or set pool.cache='off'"
        )


def open_caches(
    pool: PoolConfig, stores: Mapping[Split, Store], transform: TransformConfig, reads_class: bool = True
) -> dict[Split, SampleCache]:
    """Open the caches of a stream's stores, create missing ones, and remove unused ones.

    Args:
        pool: `cache`, whose bytes the stores share in proportion to their samples.
        stores: by split; the same store twice has one cache.
        transform: how samples are decoded; `check_cache` has passed.
        reads_class: keep labels too; a stream without labels, where they are 0, has separate caches.

    Raises:
        ConfigError: the folder does not exist, or is full.
    """
    if pool.cache == "off":
        return {}
    try:
        root = local_file.make_cache_folder("samples")
    except OSError as error:
        why = f"{local_file.cache_folder()} cannot be used: {error}"
        raise ConfigError(f"pool.cache: {why}; set RAYPIPE_CACHE to another folder, or pool.cache=off") from error
    num_samples = sum(len(store) for store in {store.fingerprint: store for store in stores.values()}.values())
    shared = (
        *(_FORMAT, local_file.boot_id(), pool.cache, num_samples),
        *(transform.decode_min_side, transform.apply_exif, reads_class),
        *(raypipe.__version__, *map(version_of, _DECODERS)),
    )
    paths = {split: root / _key(store, shared) for split, store in stores.items()}
    with local_file.locked(root / ".lock"):
        caches = {path: SampleCache(path, transform) for path in paths.values() if path.exists()}
        _sweep(root)
        missing = {path: len(stores[split]) for split, path in paths.items() if path not in caches}
        limit = _limit(root, pool) if missing else 0
        for path, num in missing.items():
            _make(path, num, limit * num // num_samples)
            caches[path] = SampleCache(path, transform)
    return {split: caches[path] for split, path in paths.items()}


def _key(store: Store, shared: tuple[object, ...]) -> str:
    # A fingerprint may ignore contents (a folder's has names and sizes), so the time of a change counts too.
    try:
        changed_ns = Path(store.address).stat().st_mtime_ns
    except OSError:
        changed_ns = 0
    parts = (store.fingerprint, len(store), store.address, changed_ns, *shared)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _sweep(root: Path) -> None:
    """Remove the caches that no process has open. The caller holds ROOT/.lock, and so nobody is about to."""
    for path in root.iterdir():
        # Nothing else: RAYPIPE_CACHE may be a folder with samples of the user's.
        if _KEY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            descriptor = local_file.open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
            if local_file.try_lock(descriptor, exclusive=True):
                path.unlink()
            os.close(descriptor)


def _limit(root: Path, pool: PoolConfig) -> int:
    free = shutil.disk_usage(root).free
    wanted = pool.cache if isinstance(pool.cache, int) else int(_DEFAULT_SHARE * free)
    limit = min(wanted, int(_MOST * free))
    if limit < wanted:
        logger.warning(
            "pool.cache is %s, and %s has %s bytes free: the cache of decoded samples takes %s at most",
            *(f"{wanted:,}", root, f"{free:,}", f"{limit:,}"),
        )
    logger.info("cache of decoded samples: up to %s bytes in %s", f"{limit:,}", root)
    return limit


def _make(path: Path, num_samples: int, limit: int) -> None:
    """Make the file of a cache. The caller holds ROOT/.lock."""
    new = path.with_suffix(".new")
    try:
        # Zeros, and no hole: a full disk is to show here, where it is an error.
        new.write_bytes(_HEADER.pack(limit, num_samples, 0) + bytes(8 * num_samples))
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; make room, or set pool.cache=off") from error
