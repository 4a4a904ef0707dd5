"""A folder of finished micro-batches by content, for all processes that see it.

    KEY           a micro-batch; whoever lacks it makes it
    .KEY.lock     locked by who makes it, until it is there or its maker is dead
    .KEY.xxxx     one that is being written
    .room         see `raypipe.storage.limited_folder`
    .lock-ranks   locked by the ranks that use the folder
    .streams/     see `raypipe.streaming.memory.streams`

A file that is lost costs time only: its micro-batch is made again.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import shutil
import struct
import time
import zlib
from contextlib import AbstractContextManager
from pathlib import Path

from raypipe.config import PoolConfig
from raypipe.errors import StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.storage.limited_folder import Room, TooLargeError
from raypipe.storage.local_file import (
    cache_folder,
    claimed,
    make_cache_folder,
    private_folder,
)
from raypipe.streaming.memory.stored import Finished, packed, unpacked
from raypipe.transform.nest import is_plain

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_SHARE = 0.1
_TOUCH_S = 60.0
# Others wait at most this long for one that makes a micro-batch, and then make it as well.
_MAKING_S = 10.0
# What only passes by goes first, since it looks so much older.
_PASSING_S = 365 * 86400.0
_READ_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
RANKS = ".lock-ranks"
STREAMS = ".streams"


class Folder:
    """The folder, as one process uses it.

    Args:
        path: the folder.
        num_bytes: limit of all files; None = a tenth of the free space.
        keeps_passing: whether it also keeps what does not come back for sure.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int | None = None,
        keeps_passing: bool = True,
    ) -> None:
        self.path = path
        self.keeps_passing = keeps_passing
        self._room = Room(path, num_bytes, _SHARE)
        self._is_writable = True

    def get(self, key: bytes, position: MicroBatchId, lasts: bool) -> Finished | None:
        """Return a micro-batch at a place, and its bad samples; None = it is not there.

        Args:
            lasts: it is needed again for sure.
        """
        path = self.path / key.hex()
        try:
            content = _mapped(path)
            if lasts and time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)
            return unpacked(content, key, position)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            logger.warning("%s is damaged, and is made again: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return None

    def put(self, key: bytes, finished: Finished, lasts: bool) -> None:
        """Write a micro-batch, if there is room; a disk that fails is not tried again.

        Args:
            lasts: see `get`.
        """
        batch, _ = finished
        is_kept = self._is_writable and (lasts or self.keeps_passing)
        is_kept = is_kept and is_plain(batch.fields)
        if not is_kept or (self.path / key.hex()).exists():
            return
        try:
            self._write(key, packed(finished, key), lasts)
        except TooLargeError:
            pass
        except (OSError, StoreError) as error:
            if FileNotFoundError in (type(error), type(error.__cause__)):
                return  # the folder was removed
            self._is_writable = False
            logger.warning(
                "finished micro-batches cannot be kept in %s: %s", self.path, error
            )

    def claim(self, key: bytes) -> AbstractContextManager[bool]:
        """Context manager: whether to make a micro-batch, since no other process does; others see that this one
        does. One that has had it for long does not count: it may be stopped, or on a node that is lost."""
        return claimed(self.path / f".{key.hex()}.lock", _MAKING_S)

    def _write(self, key: bytes, pieces: list[bytes | memoryview], lasts: bool) -> None:
        hidden = self.path / f".{key.hex()}.{secrets.token_hex(4)}"
        try:
            hidden.touch(exist_ok=False)
            if not self._room.take(hidden, sum(map(len, pieces))):
                return
            with hidden.open("r+b") as file:
                file.writelines(pieces)
            if not lasts:
                date = time.time() - _PASSING_S
                os.utime(hidden, (date, date))
            with self._room.locked():  # nobody counts files meanwhile
                hidden.replace(self.path / key.hex())
        finally:
            hidden.unlink(missing_ok=True)


def open_folder(pool: PoolConfig, num_bytes: int | None = None) -> Folder | None:
    """Return the folder of a pool's settings; None = nothing is remembered.

    Args:
        num_bytes: limit where the settings have none; None = a tenth of the free space.
    """
    place = pool.remember_in
    if place == "off":
        return None
    num_bytes = pool.remember_bytes or num_bytes
    try:
        if place == "memory":
            # A process with another cache has another memory.
            of_cache = zlib.crc32(str(cache_folder()).encode())
            name = f"raypipe-{os.getuid()}-{of_cache:08x}"
            parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else cache_folder()
            # its last rank removes it
            path = private_folder(parent, name)
            return Folder(path, num_bytes)
        if place == "disk":
            path = make_cache_folder("remembered")
            return Folder(path, num_bytes, keeps_passing=False)
        return Folder(private_folder(Path(place), "remembered"), num_bytes)
    except OSError as error:
        logger.warning("nothing is remembered: %s", error)
        return None


def memory_bytes(object_store_bytes: float) -> int:
    """Return the bytes that micro-batches may take in shared memory: a tenth of a node's object store.

    They are fewer where the object store leaves little of shared memory.
    """
    if not _SHARED_MEMORY.is_dir():
        return int(_SHARE * object_store_bytes)
    room: float = shutil.disk_usage(_SHARED_MEMORY).total
    if room > object_store_bytes:  # Ray has it there
        room -= object_store_bytes
    return int(min(_SHARE * object_store_bytes, room / 2))


def _mapped(path: Path) -> mmap.mmap:
    """Return the bytes of a file, to which nobody writes once it has its name."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), size, _READ_AT_ONCE, mmap.PROT_READ)
