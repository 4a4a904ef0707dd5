"""An object in an object store: what identifies it, ranged reads of it, and its copy on this machine's disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import pyarrow as pa

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.file_lock import progress
from raypipe.storage.filesystem import explained, open_filesystem, open_input
from raypipe.storage.local_file import boot_id

_NUM_REQUESTS = 16  # under way at a time; a store may have thousands of objects
# A ranged read of a download: times _NUM_AHEAD, it is what a process that dies has read for nothing.
PART_BYTES = 8 << 20
# Reads of a download under way at a time: object stores give a connection some 50 to 100 MB/s.
_NUM_AHEAD = 4


@dataclass(frozen=True)
class RemoteFile:
    """An object as it was when its store was opened, or, before it was looked up, as a list of objects has it.

    Attributes:
        address: its URI.
        num_bytes: its size; -1 where that is not known.
        version: the object store's ETag, or the time of its last change: equal as long as the object is the same;
            "" before it was looked up.
        digest: `digest_of_file` of its content, where whoever wrote it has recorded that; else "".
    """

    address: str
    num_bytes: int = -1
    version: str = ""
    digest: str = ""

    def checked(self, found: RemoteFile) -> RemoteFile:
        """What is there, with the digest that it should have; raises StoreError where it has another size."""
        if self.num_bytes not in (-1, found.num_bytes):
            raise StoreError(
                f"{self.address} has {found.num_bytes} bytes, and was written with {self.num_bytes}: ingest it "
                "again"
            )
        return replace(found, digest=self.digest)

    def check_same(self, found: RemoteFile) -> None:
        """Raise StoreError if what is found at the address now is another object."""
        if (found.num_bytes, found.version) != (self.num_bytes, self.version):
            raise StoreError(
                f"{self.address} has changed since the store was opened: {self.num_bytes} bytes of version "
                f"{self.version} then, {found.num_bytes} of {found.version} now. Start a new run, or put the old "
                "object back"
            )


def look_up(address: str) -> RemoteFile:
    """What is at an address: one request.

    Raises:
        StoreError: nothing, or it cannot be reached.
    """
    with opened(address) as (_, found):
        return found


def look_up_all(addresses: list[str]) -> list[RemoteFile]:
    """What is at each address: one request each, many at a time; see `look_up`."""
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        return list(pool.map(look_up, addresses))


@contextlib.contextmanager
def opened(address: str) -> Iterator[tuple[pa.NativeFile, RemoteFile]]:
    """An object, open for ranged reads, and what it is; within, errors of the file system are StoreErrors."""
    with explained(StoreError, f"{address} cannot be read"):
        filesystem, path = open_filesystem(address)
        try:
            file = open_input(filesystem, path)
        except FileNotFoundError:
            raise StoreError(f"{address} does not exist, or its bucket does not") from None
        with file:
            metadata = {name.lower(): value.decode() for name, value in (file.metadata() or {}).items()}
            version = metadata.get("etag") or str(filesystem.get_file_info(path).mtime_ns)
            yield file, RemoteFile(address, file.size(), version.strip('"'))


def _download(wanted: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield an object's bytes from `start` to its end, in order, while those that follow are being read.

    Raises:
        StoreError: it is gone, is another one now, or cannot be read.
    """
    ranges = ((at, min(PART_BYTES, wanted.num_bytes - at)) for at in range(start, wanted.num_bytes, PART_BYTES))
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    with opened(wanted.address) as (source, found):
        wanted.check_same(found)
        pool = ThreadPoolExecutor(_NUM_AHEAD)
        try:
            while True:
                for at, num_bytes in itertools.islice(ranges, _NUM_AHEAD - len(under_way)):
                    under_way.append((num_bytes, pool.submit(source.read_at, num_bytes, at)))
                if not under_way:
                    break
                num_bytes, part = under_way.popleft()
                data = part.result()
                if len(data) != num_bytes:
                    raise OSError("it has become shorter while it was read")
                yield data
                progress()
        finally:
            pool.shutdown(cancel_futures=True)
    wanted.check_same(look_up(wanted.address))  # ranges of two objects would make a third


def _digest_of(file: BufferedReader | BufferedRandom) -> hashlib._Hash:
    """The hash of what follows in a file."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))


def digest_of_file(path: Path) -> str:
    """blake2b of a file's content, 32 hex digits."""
    with path.open("rb") as file:
        return _digest_of(file).hexdigest()


class LocalCopy:
    """What the node's cache keeps of one object. What it does is to be done by one process at a time.

    Args:
        path: the folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.use_lock = path, path / "use.lock"
        self.data, self.partial = path / "data", path / "partial"
        self._data_note, self._partial_note = path / "data.json", path / "partial.json"

    def num_bytes(self) -> int:
        """What it takes on the disk; while it is being downloaded, what it will take."""
        note = _note(self._partial_note)
        if note:
            return int(note["num_bytes"])
        return self.data.stat().st_size if self.data.exists() else 0

    def reserve(self, file: RemoteFile) -> None:
        """Note that an object is about to be downloaded, so that others leave room for it.

        What is there of an earlier download stays, if it was of the same object, and the machine was not started
        since: what it had written when its power failed may be missing, in whatever place.
        """
        note = {**vars(file), "boot": boot_id()}
        if _note(self._partial_note) != note:
            self.partial.unlink(missing_ok=True)
            self._partial_note.write_text(json.dumps(note))

    def holds(self, file: RemoteFile) -> bool:
        """Whether the whole object is there, as far as can be told without reading it."""
        note = _note(self._data_note)
        if not note or not self.data.exists() or self.data.stat().st_size != file.num_bytes:
            return False
        return note == _state(self.data, file, note.get("digest", ""))

    def check(self, file: RemoteFile) -> bool:
        """Whether the whole object is there, with the digest that it was written or arrived with; reads it."""
        note, digest = _note(self._data_note), digest_of_file(self.data)
        if digest != (file.digest or note.get("digest")) or file.version != note.get("version"):
            return False
        self._data_note.write_text(json.dumps(_state(self.data, file, digest)))
        return True

    def fetch(self, file: RemoteFile) -> None:
        """Download an object to `data`; what is there of it is not asked for again.

        It is written in order, so that its length tells how far it came, and hashed as it arrives.

        Raises:
            StoreError: it is gone, is another one now, cannot be read, or does not have the digest that was
                recorded; or the disk is full. What has arrived stays, for the next one who tries.
        """
        try:
            self.reserve(file)
            with self.partial.open("ab+") as target:
                target.seek(0)
                digest = _digest_of(target)
                for data in _download(file, target.tell()):
                    target.write(data)
                    target.flush()
                    digest.update(data)
                os.fsync(target.fileno())
            if file.digest and digest.hexdigest() != file.digest:
                self.clear()
                raise StoreError(
                    f"{file.address} has the checksum {digest.hexdigest()}, and was written with {file.digest}: "
                    "it is damaged; ingest it again"
                )
            self._data_note.write_text(json.dumps(_state(self.partial, file, digest.hexdigest())))
            self.partial.replace(self.data)
            self._partial_note.unlink()
        except (OSError, ConfigError) as error:
            raise StoreError(
                f"{self.path} cannot be written to: {error}; make room, lower RAYPIPE_CACHE_BYTES, or set "
                "RAYPIPE_CACHE to another disk"
            ) from error

    def clear(self) -> None:
        """Remove the object, or what is there of it."""
        for path in (self._data_note, self.data, self._partial_note, self.partial):
            path.unlink(missing_ok=True)


def _state(path: Path, file: RemoteFile, digest: str) -> dict[str, Any]:
    """What a whole object's note says, while its file at `path` is as it was when it was hashed."""
    mtime_ns = path.stat().st_mtime_ns
    return {**vars(file), "digest": file.digest or digest, "boot": boot_id(), "mtime_ns": mtime_ns}


def _note(path: Path) -> dict[str, Any]:
    """What a note says; nothing where it is not there, or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
