"""Decoded samples of a store that a node keeps across epochs, in its memory or on its disk.

    ROOT/KEY/      one folder per store (its fingerprint), settings and versions of the decode, limit, and start of
                   the machine; what is in it is a pure function of these and of a sample's index
        use.lock   shared lock: a process has it open; exclusive: it is being removed
        slots      uint64 (1 + N,): the limit, bytes; then one word per sample, 0 = it is not here
        pixels     parts of equal size, holes at first; each is written by one process, and all are mapped by all
        part-0, …  somebody has taken this part
        full       somebody has told that there is no part left
    ROOT/.lock     exclusive lock: somebody opens caches, and removes those that no process has open

ROOT is /dev/shm/raypipe-UID/samples, or RAYPIPE_CACHE/samples. A sample's record is its index, its label and its
pixels. Its word, which says where the record begins and how large the image is, is set last and in one store of
8 bytes. So a process that dies while it writes leaves a record that nothing points to, and two that write the same
sample leave two equal records, of which the later word shows one. After a start of the machine everything is new:
what was written before a failure of its power may be there in part.

When there is no room left, later samples are decoded as without a cache. Nothing is evicted: an epoch takes each
sample once, so what would be evicted is wanted before what takes its place is wanted again.

Why a file that all actors map, and no objects in Ray's store: to get one takes 0.2 ms in a request for many,
and up to 1.5 ms alone, where a small image is decoded in 0.1 ms; it is lost with the actor that made it;
somebody must know the ids of all; and what is in flight could no longer count on the store's room.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypipe.config import Cache, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.lookup import version_of
from raypipe.plan.schedule import Split
from raypipe.storage.file_lock import locked, open_lock, try_lock, wait_for_lock
from raypipe.storage.local_file import boot_id, cache_folder, is_own_folder, make_cache_folder, make_own_folder
from raypipe.stores.base import Store
from raypipe.transform.decode import decode

logger = logging.getLogger(__name__)

# To be raised by whoever changes the files' format, or the pixels that raypipe.transform.decode makes.
_FORMAT = 2
_DECODERS = ("raypipe", "simplejpeg", "opencv-python-headless", "opencv-python", "pillow")
_MEMORY = Path("/dev/shm")
_KEY = re.compile("[0-9a-f]{32}")
# Ray's object store lies in /dev/shm as well, where it takes 3/5 of it as it fills; on a disk there are shards.
_DEFAULT_SHARE, _MOST = 0.25, 0.9
# A process that ends leaves what it has not filled of its part: little, where there are many.
_NUM_PARTS, _LEAST_PART_BYTES = 256, 4 << 20
_HEADER = struct.Struct("<qq")  # index, label
# A word: where the record begins, in units of 64 bytes, 34 bits; height and width, 15 bits each.
_ALIGN, _SIDE_BITS = 64, 15
_MAX_SIDE = (1 << _SIDE_BITS) - 1
_MAX_BYTES = _ALIGN << (64 - 2 * _SIDE_BITS)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A sample that needs no decoding.

    Attributes:
        pixels: uint8 RGB (H, W, 3), as `decode.decode` gives them; where they lie in a cache, read-only.
        label: of the sample.
    """

    pixels: np.ndarray
    label: int


class SampleCache:
    """The decoded samples of one store, shared by all processes of the node. Open it with `open_caches`.

    Args:
        folder: with its slots.
        lock: descriptor of its use.lock, held; closed with this object.
        config: how samples are decoded.

    Attributes:
        full: this process can add nothing more.
    """

    def __init__(self, folder: Path, lock: int, config: TransformConfig) -> None:
        self._folder, self._config = folder, config
        self._slots = np.asarray(np.memmap(folder / "slots", np.uint64, "r+"))
        self._num_parts, self._part_bytes = _parts_of(int(self._slots[0]), len(self._slots) - 1)
        self._file = os.open(folder / "pixels", os.O_RDWR | os.O_CLOEXEC)
        self._pixels = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        for descriptor in (lock, self._file):
            weakref.finalize(self, os.close, descriptor)
        self._number, self._at, self._end = -1, 0, 0  # of the part that this process writes
        self.full = False

    def find(self, indices: np.ndarray) -> dict[int, Decoded]:
        """Position → sample, of those that are here.

        Args:
            indices: int64 (n,); negative ones are padding.
        """
        words = np.where(indices >= 0, self._slots[indices + 1], 0)
        found = {}
        for position in np.flatnonzero(words).tolist():
            sample = self._sample(int(indices[position]), int(words[position]))
            if sample is not None:
                found[position] = sample
        return found

    def decoded(self, index: int, label: int, data: bytes | None) -> Decoded | None:
        """Decode a sample, and keep it; None: there is no room for more, or it is a bad one."""
        if self.full:
            return None
        try:
            pixels = decode(data, min_side=self._config.decode_min_side, exif=self._config.exif)
        except SampleError:
            return None
        self.put(index, label, pixels)
        return Decoded(pixels, label)

    def put(self, index: int, label: int, pixels: np.ndarray) -> None:
        """Keep a sample, if there is room.

        Args:
            index: of the sample.
            label: int64.
            pixels: uint8 (H, W, 3), C-contiguous.
        """
        height, width, _ = pixels.shape
        num_bytes = _HEADER.size + pixels.nbytes
        if self.full or self._slots[1 + index]:
            return
        if max(height, width) > _MAX_SIDE or num_bytes > self._part_bytes:
            if self._number < 0:  # the first that there is to keep: most are as large
                self._give_up(
                    f"an image of {height}x{width} takes more than its parts of {self._part_bytes:,} bytes; "
                    f"pool.cache_bytes={_NUM_PARTS * num_bytes} would do"
                )
            return
        try:
            if self._at + num_bytes > self._end and not self._take_part():
                return
            # Written, not mapped: where the disk is full this is an error, and not the end of the process.
            written = os.pwritev(self._file, [_HEADER.pack(index, label), pixels.data], self._at)
        except OSError as error:
            self._give_up(str(error))
            return
        if written != num_bytes:
            self._give_up(f"{written} of {num_bytes} bytes could be written")
            return
        # An aligned store of 8 bytes is seen whole or not at all; and, on any CPU, not before the pixels: the
        # kernel's locks of the write, and the interpreter's behind it, lie between the two.
        self._slots[1 + index] = self._at // _ALIGN << 2 * _SIDE_BITS | height << _SIDE_BITS | width
        self._at += -(-num_bytes // _ALIGN) * _ALIGN

    def _sample(self, index: int, word: int) -> Decoded | None:
        height, width = word >> _SIDE_BITS & _MAX_SIDE, word & _MAX_SIDE
        at = (word >> 2 * _SIDE_BITS) * _ALIGN
        num_values = height * width * 3
        if not num_values or at + _HEADER.size + num_values > len(self._pixels):
            return None
        found, label = _HEADER.unpack_from(self._pixels, at)
        if found != index:  # no process has written this
            return None
        pixels = np.frombuffer(self._pixels, np.uint8, num_values, at + _HEADER.size)
        return Decoded(pixels.reshape(height, width, 3), label)

    def _take_part(self) -> bool:
        """Take the next part that nobody has taken; whether there was one."""
        for number in range(self._number + 1, self._num_parts):
            if self._is_first(f"part-{number}"):
                self._number, self._at = number, number * self._part_bytes
                self._end = self._at + self._part_bytes
                return True
        self._give_up("")
        return False

    def _is_first(self, name: str) -> bool:
        """Whether no process has asked this of the name before."""
        try:
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        return True

    def _give_up(self, error: str) -> None:
        self.full = True
        num_samples, num_kept = len(self._slots) - 1, int(np.count_nonzero(self._slots[1:]))
        if error:
            logger.warning("nothing more goes into the cache of decoded samples in %s: %s", self._folder, error)
        elif self._is_first("full"):
            limit = int(self._slots[0])
            logger.warning(
                "the cache of decoded samples in %s is full: its %s bytes hold %s of %s samples, and the others"
                " are decoded in every epoch; pool.cache_bytes=%s would hold about all of them",
                self._folder,
                f"{limit:,}",
                f"{num_kept:,}",
                f"{num_samples:,}",
                round(1.1 * limit * num_samples / max(1, num_kept)),
            )


def check_cache(pool: PoolConfig, transform: TransformConfig) -> None:
    """Raise ConfigError where what is decoded is not the same in each epoch."""
    if pool.cache == "off":
        return
    if transform.decode == "gpu":
        raise ConfigError(
            f"pool.cache={pool.cache!r} keeps what actors decode, and with transform.decode='gpu' the training "
            "device decodes: set pool.cache='off'"
        )
    if transform.target_columns:
        raise ConfigError(
            f"pool.cache={pool.cache!r} keeps images, and neither masks nor boxes: set pool.cache='off', or leave "
            "transform.mask_column and transform.boxes_column out"
        )
    if transform.crop_decode == "scaled":
        raise ConfigError(
            f"pool.cache={pool.cache!r} keeps whole images, and with transform.crop_decode='scaled' each crop is "
            "decoded at a scale of its own, to other pixels: set transform.crop_decode='exact' or pool.cache='off'"
        )


def open_caches(
    pool: PoolConfig, stores: Mapping[Split, Store], transform: TransformConfig
) -> dict[Split, SampleCache]:
    """Open the caches of a stream's stores, make those that are not there, and remove those that nobody uses.

    A stream without a cache removes what ended ones have left in memory.

    Args:
        pool: `cache`, and `cache_bytes`, which the stores share in proportion to their samples.
        stores: by split; the same store twice has one cache.
        transform: how samples are decoded; `check_cache` has passed.

    Raises:
        ConfigError: there is no such place, or no room at all in it.
    """
    if pool.cache == "off":
        if is_own_folder(_memory_folder()):
            root = _root("memory")
            with locked(root / ".lock"):
                _sweep(root)
        return {}
    root = _root(pool.cache)
    num_samples = sum(len(store) for store in {store.fingerprint: store for store in stores.values()}.values())
    shared = (
        *(_FORMAT, boot_id(), pool.cache_bytes, num_samples, transform.decode_min_side, transform.exif),
        *(version_of(name) for name in _DECODERS),
    )
    keys = {split: _key(store, shared) for split, store in stores.items()}
    caches: dict[str, SampleCache] = {}
    with locked(root / ".lock"):
        locks = {key: _use(root / key) for key in keys.values()}
        _sweep(root)
        limit = 0
        for split, key in keys.items():
            if key in caches:
                continue
            if not (root / key / "slots").exists():
                limit = limit or _limit(root, pool)
                _make(root / key, len(stores[split]), limit * len(stores[split]) // num_samples)
            caches[key] = SampleCache(root / key, locks[key], transform)
    return {split: caches[key] for split, key in keys.items()}


def _key(store: Store, shared: tuple[object, ...]) -> str:
    # A fingerprint need not see contents (a folder's is of names and sizes), so the time of a change counts too.
    try:
        changed_ns = Path(store.address).stat().st_mtime_ns
    except OSError:
        changed_ns = 0
    parts = (store.fingerprint, len(store), store.address, changed_ns, *shared)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _memory_folder() -> Path:
    return _MEMORY / f"raypipe-{os.getuid()}"


def _root(cache: Cache) -> Path:
    """The folder of all caches in one place, which is made if it is not there."""
    in_memory = cache == "memory"
    folder = _memory_folder() if in_memory else cache_folder()
    instead = "pool.cache=disk or off" if in_memory else "RAYPIPE_CACHE to another folder, or pool.cache=off"
    try:
        if not in_memory:
            return make_cache_folder("samples")
        # Anybody may write into /dev/shm, and what somebody else has put there is not to be read.
        make_own_folder(folder)
        make_own_folder(folder / "samples")
        return folder / "samples"
    except OSError as error:
        raise ConfigError(f"pool.cache={cache}: {folder} cannot be used: {error}; set {instead}") from error


def _use(folder: Path) -> int:
    """The descriptor of the lock that keeps a folder, which is made if it is not there."""
    folder.mkdir(exist_ok=True)
    descriptor = open_lock(folder / "use.lock")
    wait_for_lock(descriptor, exclusive=False)
    return descriptor


def _sweep(root: Path) -> None:
    """Remove the caches that no process has open. The caller holds ROOT/.lock, and so nobody is about to."""
    for folder in root.iterdir():
        if _KEY.fullmatch(folder.name):  # nothing else: RAYPIPE_CACHE may be a folder with samples of the user's
            descriptor = open_lock(folder / "use.lock")
            if try_lock(descriptor, exclusive=True):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _limit(root: Path, pool: PoolConfig) -> int:
    free = shutil.disk_usage(root).free
    wanted = pool.cache_bytes or int(_DEFAULT_SHARE * free)
    limit = min(wanted, int(_MOST * free), _MAX_BYTES)
    if limit < wanted and pool.cache_bytes:
        logger.warning(
            "pool.cache_bytes is %s, and %s has %s bytes free: the cache of decoded samples takes %s at most",
            *(f"{wanted:,}", root, f"{free:,}", f"{limit:,}"),
        )
    logger.info("cache of decoded samples: up to %s bytes in %s", f"{limit:,}", root)
    return limit


def _make(folder: Path, num_samples: int, limit: int) -> None:
    """Make the files of a cache. The caller holds ROOT/.lock."""
    table = 8 * (1 + num_samples)
    if table > limit:
        raise ConfigError(
            f"a cache of decoded samples in {folder.parent} may take {limit:,} bytes, and where {num_samples:,} "
            f"samples lie takes {table:,}: raise pool.cache_bytes, or set pool.cache=off"
        )
    slots = np.zeros(1 + num_samples, np.uint64)
    slots[0] = limit
    num_parts, part_bytes = _parts_of(limit, num_samples)
    try:
        with (folder / "pixels").open("wb") as pixels:
            pixels.truncate(max(num_parts * part_bytes, 1))  # what is empty cannot be mapped
        slots.tofile(folder / "slots.new")  # not a hole: a full disk is to show here, where it is an error
        (folder / "slots.new").replace(folder / "slots")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; make room, or set pool.cache=off") from error


def _parts_of(limit: int, num_samples: int) -> tuple[int, int]:
    """How many parts a cache may have, and how many bytes each, a multiple of pages."""
    room = max(0, limit - 8 * (1 + num_samples))
    part_bytes = max(room // _NUM_PARTS, min(_LEAST_PART_BYTES, room)) // mmap.PAGESIZE * mmap.PAGESIZE
    return (room // part_bytes, part_bytes) if part_bytes else (0, 0)
