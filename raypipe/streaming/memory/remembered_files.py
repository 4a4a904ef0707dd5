"""Finished micro-batches as files in the node's cache folder, for later runs, and for more than memory holds.

    CACHE/remembered/KEY     one micro-batch; modified when it was last used
    CACHE/remembered/.room   its text = bytes of all; lock of the process that makes room
    CACHE/remembered/.name   a random name, by which two processes see that they have the same folder

    magic | checksum and length of the header | header, JSON, with each array's checksum | arrays, each at 64 bytes

The folder belongs to its user, and no file of it is executed or unpickled. A file that is damaged is removed, and
the micro-batch made again. Files are evicted for new ones, least recently used first. Where all ranks have the
folder of a transform actor, it reads only the heads of large files, and the ranks read the others' arrays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.storage.local_file import locked, make_cache_folder
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.memory.stored import Stored, is_collectable
from raypipe.transform.fields import Ragged

logger = logging.getLogger(__name__)

_MAGIC = b"raypipe2"
_HEAD = struct.Struct("<8sQQ")
_ALIGNED = 64
_PAGE = 4096
_SHARE = 0.1
# Share of the limit that is freed at once, since finding the oldest files looks at all of them.
_FREED_SHARE = 0.05
# A hidden file belongs to a process that writes it, or was killed so long ago.
_WRITTEN_S = 3600.0
_TOUCH_S = 60.0
_READ_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
_HEAD_ARRAYS = ("index", "weight")
_ROOM = ".room"
_NAME = ".name"


class RememberedFiles:
    """Micro-batches of the node's cache folder, as one transform actor uses them.

    Args:
        num_bytes: limit of all files; None = a tenth of the disk's free space.
        folder: the folder; None = the one of the cache.
        ranks_folder: name of the folder that all ranks have, see `name_of_folder`; "" = there may be several.
    """

    def __init__(
        self,
        num_bytes: int | None = None,
        folder: Path | None = None,
        ranks_folder: str = "",
    ) -> None:
        self._folder = folder or make_cache_folder("remembered")
        self._hands_over = ranks_folder != "" and ranks_folder == _name(self._folder)
        self._num_bytes = num_bytes
        self._is_writable = True

    def find(
        self, keys: Sequence[bytes], limit: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        """Return the micro-batches that are there, and the keys of all others: nobody knows what others make."""
        read = {key: self._read(key, self._hands_over) for key in keys}
        stored = {key: value for key, value in read.items() if value is not None}
        return stored, [key for key in keys if key not in stored]

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> dict[bytes, Stored]:
        """Write micro-batches that come back for sure; a disk that fails is not tried again."""
        handed_over: dict[bytes, Stored] = {}
        if not (comes_back and self._is_writable):
            return handed_over
        try:
            for key, stored in finished.items():
                is_written = self._write(key, stored)
                if is_written and self._hands_over and stored.is_collectable:
                    handed_over[key] = stored.outline()
        except (OSError, StoreError) as error:
            self._is_writable = False
            logger.warning(
                "finished micro-batches cannot be kept in %s: %s", self._folder, error
            )
        return handed_over

    def _read(self, key: bytes, hands_over: bool) -> Stored | None:
        path = self._folder / key.hex()
        flags = mmap.MAP_SHARED if hands_over else _READ_AT_ONCE
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                # Nobody writes to a file once it has its name. To copy it would take most of the time.
                content = mmap.mmap(
                    file.fileno(), status.st_size, flags, mmap.PROT_READ
                )
            stored = _unpacked(content, key, hands_over)
            if time.time() - status.st_mtime > _TOUCH_S:
                os.utime(path)
            return stored
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            logger.warning("%s is damaged, and is made again: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def _write(self, key: bytes, stored: Stored) -> bool:
        """Write a micro-batch; return whether it is there."""
        path = self._folder / key.hex()
        if path.exists():
            return True
        pieces = _packed(stored, key)
        num_bytes = sum(len(piece) for piece in pieces)
        hidden = self._folder / f".{key.hex()}.{secrets.token_hex(4)}"
        try:
            if not self._has_room(num_bytes, hidden):
                return False
            with hidden.open("r+b") as file:
                file.writelines(pieces)
            with locked(self._folder / _ROOM):  # nobody counts files meanwhile
                hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
        return True

    def _has_room(self, num_bytes: int, hidden: Path) -> bool:
        """Reserve bytes by a file of that size, after evicting others if need be; return whether they fit."""
        record = self._folder / _ROOM
        with locked(record):
            text = record.read_text()
            used = int(text) if text.isdecimal() else self._evicted(-1)
            limit = self._num_bytes
            if limit is None:
                free = shutil.disk_usage(self._folder).free
                limit = int(_SHARE * (free + used))
            if num_bytes > limit:
                return False
            if used + num_bytes > limit:
                used = self._evicted(int(limit * (1 - _FREED_SHARE)) - num_bytes)
            if used + num_bytes > limit:  # others are writing too much
                record.write_text(str(used))
                return False
            hidden.touch(exist_ok=False)
            os.truncate(hidden, num_bytes)
            record.write_text(str(used + num_bytes))
        return True

    def _evicted(self, kept: int) -> int:
        """Remove the files used longest ago until so many bytes are kept, -1 = all; return the rest's bytes.

        Those that are being written count, and are kept.
        """
        files = []
        used = 0
        now = time.time()
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith("."):
                    files.append((status.st_mtime, status.st_size, entry.path))
                elif entry.name.startswith((_ROOM, _NAME)):
                    continue
                elif now - status.st_mtime > _WRITTEN_S:
                    Path(entry.path).unlink(missing_ok=True)
                else:
                    used += status.st_size
        used += sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if kept < 0 or used <= kept:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


def name_of_folder() -> str:
    """Return the name of this process's folder, which no other folder has; "" = it cannot be written."""
    with contextlib.suppress(OSError):
        return _name(make_cache_folder("remembered"))
    return ""


def _name(folder: Path) -> str:
    path = folder / _NAME
    if not path.exists():
        hidden = folder / f"{_NAME}.{secrets.token_hex(4)}"
        hidden.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(hidden, path)
        hidden.unlink()
    return path.read_text()


def _packed(stored: Stored, key: bytes) -> list[bytes | memoryview]:
    """Return a file's content, in pieces."""
    arrays: dict[str, np.ndarray] = {
        name: getattr(stored, name) for name in _HEAD_ARRAYS
    }
    kinds: dict[str, str] = {}
    for name, values in stored.fields.items():
        if isinstance(values, Ragged):
            kinds[name] = values.kind
            arrays[f"{name}:values"] = values.values
            arrays[f"{name}:offsets"] = values.offsets
        else:
            arrays[f"field:{name}"] = values
    header = {
        "key": key.hex(),
        "kinds": kinds,
        "fields": list(stored.fields),
        "arrays": [
            [name, array.dtype.str, array.shape, _checksum(_bytes_of(array))]
            for name, array in arrays.items()
        ],
        "bad": [asdict(sample) for sample in stored.bad],
    }
    text = json.dumps(header).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGNED)
    head = _HEAD.pack(_MAGIC, zlib.crc32(text), len(text))
    pieces: list[bytes | memoryview] = [head, text]
    for array in arrays.values():
        pieces.append(_bytes_of(array).data)
        pieces.append(bytes(-array.nbytes % _ALIGNED))
    return pieces


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checksum(content: np.ndarray) -> int:
    """Return the CRC of the sums of an array's pages, which costs a tenth of the CRC of all bytes.

    Args:
        content: uint8 (n,).
    """
    end = len(content) // _PAGE * _PAGE
    words = content[:end].view(np.uint64).reshape(-1, _PAGE // 8)
    checksum = zlib.crc32(words.sum(axis=1).data)
    return zlib.crc32(content[end:].data, checksum)


def _unpacked(content: bytes | mmap.mmap, key: bytes, hands_over: bool) -> Stored:
    """Return the micro-batch of a file; raise ValueError or KeyError if it is damaged, or of another key.

    Args:
        hands_over: return its outline, if its rank can collect it, after a look at the head.
    """
    magic, checksum, length = _HEAD.unpack_from(content)
    body = memoryview(content)[_HEAD.size :]
    text = bytes(body[:length])
    if magic != _MAGIC or zlib.crc32(text) != checksum:
        raise ValueError("its header's checksum is wrong")
    header = json.loads(text)
    if header["key"] != key.hex():
        raise ValueError("it has the content of another key")
    if hands_over:
        of_fields = header["arrays"][len(_HEAD_ARRAYS) :]
        num_bytes = sum(
            _count(shape) * np.dtype(dtype).itemsize for _, dtype, shape, _ in of_fields
        )
        if is_collectable(num_bytes, header["bad"]):
            if length + num_bytes > len(body):
                raise ValueError("its end is missing")
            index, weight = _arrays(
                body, length, header["arrays"][: len(_HEAD_ARRAYS)]
            ).values()
            return Stored(index, weight, {}, [], num_bytes)
    arrays = _arrays(body, length, header["arrays"])
    fields: dict[str, np.ndarray | Ragged] = {}
    for name in header["fields"]:
        if kind := header["kinds"].get(name):
            fields[name] = Ragged(
                kind, arrays[f"{name}:values"], arrays[f"{name}:offsets"]
            )
        else:
            fields[name] = arrays[f"field:{name}"]
    return Stored(
        arrays["index"], arrays["weight"], fields, list(map(_bad, header["bad"]))
    )


def _arrays(
    body: memoryview, start: int, listed: Sequence[tuple[str, str, list[int], int]]
) -> dict[str, np.ndarray]:
    """Return arrays by name; raise ValueError if one is damaged.

    Args:
        start: where the first one begins.
        listed: name, dtype, shape and checksum of each.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape, checksum in listed:
        array = np.frombuffer(body, np.dtype(dtype), _count(shape), start)
        if _checksum(array.view(np.uint8)) != checksum:
            raise ValueError(f"the checksum of {name} is wrong")
        arrays[name] = array.reshape(shape)
        start += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return arrays


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _bad(record: dict[str, Any]) -> BadSample:
    position = MicroBatchId(**record.pop("position"))
    return BadSample(position, **record)
