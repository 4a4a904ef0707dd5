"""The limit on the bytes of a folder's files: those used longest ago make room for new ones.

NAME      a whole file; last used when it was modified or, if that is at time 0, when it was accessed
.NAME     one that a process writes, with the size that it may reach; no longer, if it has not changed for an hour
.room     the bytes of all; locked by who makes room
.lock*    locks, which stay
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from contextlib import AbstractContextManager
from pathlib import Path

from raypipe.storage.local_file import locked

_RECORD = ".room"
_STAYS = (_RECORD, ".lock")
_POLL_S = 0.001
_WRITTEN_S = 3600.0
# Share of the limit that is freed at once, since finding the oldest files looks at all of them.
_FREED_SHARE = 0.05


class TooLargeError(Exception):
    """A file is larger than the limit of its folder; the argument is the limit."""


class Room:
    """The room in a folder, for all processes that see it.

    Args:
        folder: it may not exist yet.
        limit_bytes: limit of all files; None = a share of the free space.
        share: see above.
    """

    def __init__(self, folder: Path, limit_bytes: int | None, share: float) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._share = share

    def locked(self) -> AbstractContextManager[None]:
        """Context manager: nobody makes room, or counts files."""
        return locked(self._folder / _RECORD, _POLL_S)

    def take(self, path: Path, num_bytes: int, is_exact: bool = False) -> bool:
        """Let a file that exists grow to so many bytes, for which others are removed.

        Args:
            is_exact: all files are counted, since a user may have emptied the folder; no more are removed than
                is needed; and the file keeps its size, which it reaches by and by.

        Returns:
            Whether there is room; if not, others are writing too much.

        Raises:
            TooLargeError: the limit is below that.
        """
        with self.locked():
            record = self._folder / _RECORD
            text = record.read_text()
            is_counted = text.isdecimal() and not is_exact
            used = int(text) if is_counted else self._count()
            limit = self._limit_bytes
            if limit is None:
                limit = int(self._share * (shutil.disk_usage(self._folder).free + used))
            if num_bytes > limit:
                raise TooLargeError(limit)
            more = num_bytes - path.stat().st_size
            if used + more > limit:
                freed = 0 if is_exact else int(_FREED_SHARE * limit)
                used = self._count(limit - freed - more, path)
            # first, since a process that is killed here must not count too little
            record.write_text(str(used + more))
            if not is_exact:
                os.truncate(path, num_bytes)
        return used + more <= limit

    def _count(self, kept: int | None = None, spared: Path | None = None) -> int:
        """Return the bytes of all files; first remove those used longest ago until so many are kept."""
        files = []
        used = 0
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # it is gone
                status = path.stat(follow_symlinks=False)
                last_s = status.st_mtime or status.st_atime
                if path.name.startswith(_STAYS) or not stat.S_ISREG(status.st_mode):
                    continue
                if not path.name.startswith("."):
                    files.append((last_s, status.st_size, path))
                elif time.time() - status.st_ctime > _WRITTEN_S:
                    path.unlink()
                    continue
                used += status.st_size
        for _, size, path in sorted(files):
            if kept is None or used <= kept:
                break
            if path != spared:
                with contextlib.suppress(OSError):
                    path.unlink()
                    used -= size
        return used
