"""What the node's cache keeps of one object, in a folder of its own.

data, data.json          the whole object; what it is, its digest, and since which start of the machine
partial, partial.json    its first bytes, while it is being downloaded; what it will be
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from raypipe.storage.remote_file import RemoteFile

_HASHED_BYTES = 4 << 20


class ShardFolder:
    """The folder of one object. What it does is to be done by one process at a time.

    Args:
        path: the folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data, self.partial = path / "data", path / "partial"
        self._data_note, self._partial_note = path / "data.json", path / "partial.json"

    def num_bytes(self) -> int:
        """What it takes on the disk; while it is being downloaded, what it will take."""
        note = _read(self._partial_note)
        if note is not None:
            return int(note["num_bytes"])
        try:
            return self.data.stat().st_size
        except OSError:
            return 0

    def reserve(self, file: RemoteFile) -> None:
        """Note that an object is about to be downloaded, so that others leave room for it.

        What is there of an earlier download stays, if it was of the same object, and the machine was not started
        since: what it had written when its power failed may be missing, in whatever place.
        """
        note = {**vars(file), "boot": boot_id()}
        if _read(self._partial_note) != note:
            self.partial.unlink(missing_ok=True)
            _write(self._partial_note, note)

    def finish(self, file: RemoteFile, digest: str) -> None:
        """Make of the whole partial the object's data."""
        self._note(file, self.partial, digest)
        self.partial.replace(self.data)
        self._partial_note.unlink()

    def holds(self, file: RemoteFile) -> bool:
        """Whether the whole object is there, as far as can be told without reading it."""
        note = _read(self._data_note)
        try:
            stat = self.data.stat()
        except OSError:
            return False
        if note is None:
            return False
        expected = (file.version, boot_id(), file.num_bytes, stat.st_mtime_ns, file.digest or note.get("digest"))
        return expected == (
            note.get("version"),
            note.get("boot"),
            stat.st_size,
            note.get("mtime_ns"),
            note.get("digest"),
        )

    def check(self, file: RemoteFile) -> bool:
        """Whether the whole object is there, with the digest that it was written or arrived with; reads it."""
        note = _read(self._data_note) or {}
        try:
            digest = digest_of_file(self.data)
        except OSError:
            return False
        if digest != (file.digest or note.get("digest")) or file.version != note.get("version"):
            return False
        self._note(file, self.data, digest)
        return True

    def clear(self) -> None:
        """Remove the object, or what is there of it."""
        for path in (self._data_note, self.data, self._partial_note, self.partial):
            path.unlink(missing_ok=True)

    def _note(self, file: RemoteFile, data: Path, digest: str) -> None:
        mtime_ns = data.stat().st_mtime_ns
        _write(self._data_note, {**vars(file), "digest": digest, "boot": boot_id(), "mtime_ns": mtime_ns})


def digest_of_file(path: Path) -> str:
    """blake2b of a file's content, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        hash_into(digest, file)
    return digest.hexdigest()


def hash_into(digest: Any, file: BinaryIO) -> None:
    """Add what follows in a file to a hash."""
    while data := file.read(_HASHED_BYTES):
        digest.update(data)


def boot_id() -> str:
    """Another one after each start of the machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""  # not Linux: a start goes unnoticed


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".new")
    with partial.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
