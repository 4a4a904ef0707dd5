"""A rank's use of the folder of finished micro-batches of its node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_lock, try_lock
from raypipe.streaming.memory.content import Contents
from raypipe.streaming.memory.made_folder import RANKS, open_folder
from raypipe.streaming.memory.recall import streams_of
from raypipe.streaming.memory.streams import Streams
from raypipe.streaming.sample_makers import SampleMakers
from raypipe.streaming.spec import StreamSpec


class RankMemory:
    """The folder, as a rank uses it. The last rank of a node to leave removes what is in memory.

    Args:
        spec: the stream.
        stream: its name.
    """

    def __init__(self, spec: StreamSpec, stream: str) -> None:
        self._spec = spec
        self._stream = stream
        self._streams: Streams | None = None
        self._folder = open_folder(spec.pool)
        self._descriptor = -1
        if self._folder:
            with contextlib.suppress(OSError, StoreError):
                self._descriptor = open_lock(self._folder.path / RANKS)
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def are_others(self) -> bool:
        """Return whether other streams make the same training; show them that this one begins."""
        if self._folder is None:
            return False
        # other threads of this process may have the stream's own objects
        makers = SampleMakers(self._spec.with_own_code())
        contents = Contents(makers, self._stream)
        self._streams = streams_of(contents, self._folder, self._stream)
        return self._streams is not None and self._streams.are_others()

    def close(self) -> None:
        """Leave the folder."""
        if self._streams:
            self._streams.close()
        if self._folder is None or self._descriptor < 0:
            return
        if self._spec.pool.remember_in == "memory" and try_lock(self._descriptor):
            shutil.rmtree(self._folder.path, ignore_errors=True)
        os.close(self._descriptor)
        self._descriptor = -1
