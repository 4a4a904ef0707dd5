"""The memory of the cluster, as its users see it; see `raypipe.streaming.memory.remembered`.

Connection      calls it: each call has a limit, and after a failure the caller works without it for a while
ClusterMemory   a transform actor's, in which it looks for micro-batches, and keeps them
Collector       a rank's, from which it gets the micro-batches whose keys an actor has handed over
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from raypipe.plan.places import MicroBatchId
from raypipe.rayext.cluster_state import object_store_of
from raypipe.rayext.processes import this_process
from raypipe.rayext.ray_thread import answer
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory.remembered import (
    Found,
    Parcel,
    Reply,
    User,
    keeper,
    memory,
    running_memory,
)
from raypipe.streaming.memory.remembered_files import RememberedFiles
from raypipe.streaming.memory.stored import Stored
from raypipe.streaming.row import Fields
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.user_code import copied

logger = logging.getLogger(__name__)

# "auto" takes this share of the object store; the memory gives back room when less than that is free.
_SHARE = 0.1
_LEAST_FREE = 0.3
_START_S = 60.0
_ANSWER_S = 5.0
_FETCH_S = 10.0
_WITHOUT_S = 10.0  # after a failure
_ASK_S = 0.5  # a question is answered after so long, even if nothing has changed
_LOOK_EVERY = 6  # check-ins: the object store of the node is looked at
# What an actor has handed over is on its way to the memory for some milliseconds.
_ARRIVES_S = 2.0
# Objects that its keeper has not taken yet.
_MOST_PUTS = 4


class Connection:
    """Connection of one process to the memory."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._failed_at = -_WITHOUT_S

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the memory; None = it does not answer."""
        handle = self._memory
        if handle is None:
            return None
        try:
            return ray.get(
                getattr(handle, method).remote(*arguments), timeout=_ANSWER_S
            )
        except ray.exceptions.RayError as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        logger.warning(
            "the memory of finished micro-batches does not answer (%s): they are made again for a while",
            type(error).__name__,
        )
        self._memory = None
        self._failed_at = time.monotonic()

    def _fetched(self, locations: dict[bytes, Found]) -> dict[bytes, Stored]:
        """Return the micro-batches at places, read-only; those that are missing are lost, and are made again."""
        if not locations:
            return {}
        refs = list({location.ref for location in locations.values()})
        try:
            objects = dict(zip(refs, ray.get(refs, timeout=_FETCH_S), strict=True))
        except ray.exceptions.RayError:
            objects = {}
            for ref in refs:
                # a dead keeper's objects fail after a second each
                with contextlib.suppress(ray.exceptions.RayError):
                    objects[ref] = ray.get(ref, timeout=_ASK_S)
        stored = {
            key: objects[location.ref][location.number]
            for key, location in locations.items()
            if location.ref in objects
        }
        lost = [key for key in locations if key not in stored]
        if lost and self._memory is not None:
            self._memory.lost.remote(lost)
        return stored


class ClusterMemory(Connection):
    """The memory of the cluster, as one transform actor uses it; a RayThread calls `check_in`.

    Args:
        stream: name of the stream.
        num_bytes: limit of the node; None = a tenth of its object store.
        training: see `User`.
        hands_over: whether the actor gives its ranks only the keys of large micro-batches, which they collect.

    Attributes:
        checked_in_at: time of the last sign of life.
    """

    def __init__(
        self,
        stream: str,
        num_bytes: int | None,
        training: str,
        hands_over: bool = False,
    ) -> None:
        super().__init__()
        context = ray.get_runtime_context()
        self._user = User(
            f"{os.getpid()}-{secrets.token_hex(4)}",
            context.get_actor_id() or "",
            stream,
            context.get_node_id(),
            training,
            hands_over,
        )
        self._process = this_process("transform actor")
        self._num_bytes = num_bytes
        self._room = num_bytes or 0
        self._num_check_ins = 0
        self.checked_in_at = -math.inf
        self._keeper: Any = None
        self._puts: dict[Any, list[bytes]] = {}
        self._bytes_each = 0  # the latest micro-batches had so many
        self._bytes_claimed = (
            0  # each of those that were to be made last has room for so many
        )
        self._is_kept = False  # those that were to be made last

    def check_in(self) -> None:
        """Give a sign of life; connect, if need be."""
        if self._memory is None and time.monotonic() - self._failed_at < _WITHOUT_S:
            return
        try:
            is_full = self._is_full()
            handle = self._memory or memory()
            connected = None
            if self._memory is None:
                connected = self._keeper = keeper()
                watched = connected.watch.remote(self._user.name, self._process)
                answer(watched, _START_S)
            answer(
                handle.check_in.remote(self._user, self._room, is_full, connected),
                _START_S,
            )
            self._memory = handle
        except ray.exceptions.RayError as error:
            self._fail(error)

    def _is_full(self) -> bool:
        """Return whether the node's object store is short of room, at a look now and then; set the limit."""
        self._num_check_ins += 1
        if self._num_check_ins % _LOOK_EVERY != 1:
            return False
        total, free = object_store_of(self._user.node)
        if self._num_bytes is None:
            self._room = int(_SHARE * total)
        return free < _LEAST_FREE * total

    def find(
        self, keys: Sequence[bytes], limit: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        """See `BatchCache`."""
        self._bytes_claimed = self._bytes_each
        reply: Reply | None = self._ask(
            "ask", self._user, list(keys), limit, self._bytes_each, comes_back, _ASK_S
        )
        if reply is None:
            self._is_kept = False
            return {}, list(keys)
        self._is_kept = reply.is_kept
        outlines = {
            key: location.outline
            for key, location in reply.finished.items()
            if location.outline
        }
        stored = outlines | self._fetched(
            {
                key: location
                for key, location in reply.finished.items()
                if not location.outline
            }
        )
        lost = [key for key in reply.finished if key not in stored]
        return stored, [*reply.to_make, *lost]

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> dict[bytes, Stored]:
        """See `BatchCache`."""
        if self._memory is None or not self._is_kept:
            return {}
        handed_over: dict[bytes, Stored] = {}
        self._look_at_puts()
        if finished and self._memory is not None and len(self._puts) < _MOST_PUTS:
            handed_over = self._put(finished, comes_back)
        else:
            dropped = [*dropped, *finished]
        if dropped and self._memory is not None:
            self._memory.give_up.remote(self._user, dropped)
        return handed_over

    def _put(
        self, finished: dict[bytes, Stored], comes_back: bool
    ) -> dict[bytes, Stored]:
        """Give micro-batches to the keeper, and return outlines of those that surely have room."""
        outlines = {
            key: stored.outline()
            for key, stored in finished.items()
            if stored.is_collectable
        }
        handed_over: dict[bytes, Stored] = {}
        if self._user.hands_over:
            handed_over = {
                key: outline
                for key, outline in outlines.items()
                if outline.collected_bytes <= self._bytes_claimed
            }
        num_bytes = sum(stored.num_bytes for stored in finished.values())
        keys = list(finished)
        self._bytes_each = num_bytes // len(keys)
        parcel = Parcel(keys, num_bytes, comes_back, outlines, list(handed_over))
        put = self._keeper.keep.remote(self._user, parcel, list(finished.values()))
        self._puts[put] = keys
        return handed_over

    def _look_at_puts(self) -> None:
        """Look for puts that have ended; if one has failed, the keeper is dead, and others wait for its keys."""
        if not self._puts:
            return
        ended, _ = ray.wait(list(self._puts), num_returns=len(self._puts), timeout=0)
        for put in ended:
            keys = self._puts.pop(put)
            try:
                ray.get(put)
            except ray.exceptions.RayError as error:
                if self._memory is not None:
                    self._memory.give_up.remote(self._user, keys)
                    self._fail(error)


class Collector(Connection):
    """Collects micro-batches for a rank, without a copy, from the object store or from files of its node.

    One that has been forgotten in the meantime is made by this process: slower, never wrong.

    Args:
        spec: the stream.
        stream: its name.
    """

    def __init__(self, spec: StreamSpec, stream: str) -> None:
        super().__init__()
        self._spec = spec
        self._stream = stream
        self._maker: MicroBatchMaker | None = None

    def __call__(
        self, keys: Mapping[MicroBatchId, bytes]
    ) -> dict[MicroBatchId, Fields]:
        """Return the fields of micro-batches, by their places."""
        stored = self._find(list(keys.values()))
        fields = dict[MicroBatchId, Fields]()
        for position, key in keys.items():
            if key in stored:
                fields[position] = stored[key].fields
            else:
                fields[position] = self._made(position)
        return fields

    def _find(self, keys: list[bytes]) -> dict[bytes, Stored]:
        if self._spec.pool.remember == "disk":
            with contextlib.suppress(OSError):
                return RememberedFiles().find(keys, len(keys), True)[0]
            return {}
        if self._memory is None and time.monotonic() - self._failed_at >= _WITHOUT_S:
            self._memory = running_memory()
        locations: dict[bytes, Found] = (
            self._ask("collect", self._stream, keys, _ARRIVES_S) or {}
        )
        return self._fetched(locations)

    def _made(self, position: MicroBatchId) -> Fields:
        if self._maker is None:
            # other threads of this process may have the stream's own objects
            transforms = copied(self._spec.transforms)
            self._maker = MicroBatchMaker(replace(self._spec, transforms=transforms))
        return self._maker.batch(position).fields
