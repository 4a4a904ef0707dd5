"""A rank's use of the folder of finished micro-batches: it takes those that actors have left there for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import replace

from raypipe.errors import StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.storage.local_file import open_lock, try_lock
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory.content import Contents
from raypipe.streaming.memory.made_folder import RANKS, open_folder
from raypipe.streaming.memory.recall import streams_of
from raypipe.streaming.memory.streams import Streams
from raypipe.streaming.sample_makers import SampleMakers
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch
from raypipe.transform.user_code import copied


class RankMemory:
    """The folder, as a rank uses it. The last rank of a node to leave removes what is in memory.

    Args:
        spec: the stream.
        stream: its name.
    """

    def __init__(self, spec: StreamSpec, stream: str) -> None:
        self._spec = spec
        self._stream = stream
        self._maker: MicroBatchMaker | None = None
        self._streams: Streams | None = None
        self._folder = open_folder(spec.pool)
        self._descriptor = -1
        if self._folder:
            with contextlib.suppress(OSError, StoreError):
                self._descriptor = open_lock(self._folder.path / RANKS)
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    @property
    def folder(self) -> str:
        """The folder's identity; "" = unknown, or there is none."""
        return self._folder.identity if self._folder else ""

    def are_others(self) -> bool:
        """Return whether other streams make the same training; show them that this one begins."""
        if self._folder is None:
            return False
        recipes = SampleMakers(self._own_spec()).recipes
        contents = Contents(self._spec, recipes, self._stream)
        self._streams = streams_of(contents, self._folder, self._stream)
        return self._streams is not None and self._streams.are_others()

    def __call__(self, position: MicroBatchId) -> MicroBatch:
        """Return a micro-batch that an actor has left; one that is gone, or damaged, is made here."""
        if self._folder:
            finished = self._folder.take(self._stream, position)
            if finished is not None:
                return finished[0]
        if self._maker is None:
            self._maker = MicroBatchMaker(self._own_spec())
        if self._folder:
            recipes = self._maker.sample_makers.recipes
            (key,) = Contents(self._spec, recipes, self._stream).keys([position])
            self._folder.remove(key)
        return self._maker.batch(position)

    def _own_spec(self) -> StreamSpec:
        # other threads of this process may have the stream's own objects
        return replace(self._spec, transforms=copied(self._spec.transforms))

    def close(self) -> None:
        """Leave the folder."""
        if self._streams:
            self._streams.close()
        if self._folder is None or self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if try_lock(self._descriptor):
                if self._spec.pool.remember_in == "memory":
                    shutil.rmtree(self._folder.path, ignore_errors=True)
                else:
                    self._folder.remove_links()
        os.close(self._descriptor)
        self._descriptor = -1
