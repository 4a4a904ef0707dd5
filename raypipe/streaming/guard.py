"""What is done about samples that are bad, or that kill the process that decodes them.

Guard             around each micro-batch of a transform actor: a time limit, fresh memory, what it was at
record_bad        the quarantine: best effort, since no run should end for want of it
BadSampleBudget   how many bad samples a run puts up with
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from raypipe.errors import BadSamplesError, ResourceError
from raypipe.plan.schedule import MicroBatchId
from raypipe.storage import file_lock
from raypipe.storage.filesystem import join, open_filesystem
from raypipe.storage.whole_file import write_text
from raypipe.stores.base import title_of
from raypipe.transform.micro_batch import FIRST_ATTEMPT, Attempt

logger = logging.getLogger(__name__)

# A restarted actor asks what is known of so many micro-batches before it trusts the world again. What killed it
# was at most as far away as the queue of its tasks.
_WARY_FOR = 64
# Results of the last micro-batch are on their way when an actor ends itself.
_FLUSH_S = 0.2
_STDERR = 2

# Where a record has failed, none is tried for so many times as long as that took: a full disk says so at once, an
# object store that is gone after minutes, and a run should not wait for it at every bad sample.
_PAUSE = 9
# Of this process: folder → when to try again, by time.monotonic().
_try_again_at: dict[str, float] = {}


class Guard:
    """Of one transform actor.

    Args:
        supervisor: handle of a Supervisor.
        time_limit_s: seconds for a micro-batch, and, in a careful attempt, for each sample; 0 = none.
        recycle_after: micro-batches after which the process ends, to be restarted; 0 = never.
    """

    def __init__(self, supervisor: Any, time_limit_s: float, recycle_after: int) -> None:
        self._supervisor, self._time_limit_s, self._recycle_after = supervisor, time_limit_s, recycle_after
        context = ray.get_runtime_context()
        self._actor = context.get_actor_id() or f"process {os.getpid()}"
        home = f"process {os.getpid()} on {ray.util.get_node_ip_address()}, node {context.get_node_id()[:8]}"
        self._wary = _WARY_FOR if ray.get(supervisor.arrived.remote(self._actor, home)) else 0
        self._num_done = 0

    @contextlib.contextmanager
    def micro_batch(self, at: MicroBatchId) -> Iterator[Attempt]:
        """Gives what is known of a micro-batch; around its transform.

        Raises:
            ResourceError: it has cost too many actors.
        """
        if self._recycle_after and self._num_done >= self._recycle_after:
            self._leave()
        begun = self._supervisor.begins.remote(self._actor, str(at))
        attempt = FIRST_ATTEMPT
        if self._wary:
            self._wary -= 1
            orders = ray.get(begun)
            if orders.error:
                raise ResourceError(orders.error)
            if orders.careful or orders.bad:
                why = "its process died twice while at it: it crashes, or takes longer than transform.time_limit_s"
                attempt = Attempt(dict.fromkeys(orders.bad, why), self._touch if orders.careful else None)
        self._watch()
        file_lock.on_progress.append(self._watch)  # to fetch a shard may take longer than any transform
        try:
            yield attempt
        finally:
            file_lock.on_progress.remove(self._watch)
            faulthandler.cancel_dump_traceback_later()
        if attempt.before_sample:
            ray.get(self._supervisor.ended.remote(self._actor))
        self._num_done += 1

    def _watch(self) -> None:
        # A thread of C's: it works while a transform holds the interpreter, and shows where that was.
        if self._time_limit_s:
            faulthandler.dump_traceback_later(self._time_limit_s, exit=True, file=_STDERR)

    def _touch(self, index: int) -> None:
        ray.get(self._supervisor.touches.remote(self._actor, index))
        self._watch()

    def _leave(self) -> None:
        ray.get(self._supervisor.leaves.remote(self._actor))
        time.sleep(_FLUSH_S)
        os._exit(1)  # Ray restarts an actor that dies, and lets one go that exits


def record_bad(folder_uri: str, at: MicroBatchId, bad: list[dict[str, Any]], by: str = "") -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    It is named by the micro-batch's place, so that a retry of the same one, on any node, writes the same again.
    Where it cannot be written, that is logged, once in a process, and nothing else.

    Args:
        folder_uri: of the quarantine; empty = log only.
        at: the micro-batch.
        bad: one record per sample.
        by: who found them, where that is not an actor; part of the name.
    """
    lines = [json.dumps({**vars(at), **record}) for record in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    begun = time.monotonic()
    if not folder_uri or begun < _try_again_at.get(folder_uri, 0.0):
        return
    try:
        filesystem, folder = open_filesystem(folder_uri)
        filesystem.create_dir(folder, recursive=True)
        write_text(join(folder_uri, f"{at}{by and '-' + by}.jsonl"), "".join(line + "\n" for line in lines))
    except Exception as error:  # a full disk, an object store that is gone, whatever it is
        if folder_uri not in _try_again_at:
            logger.warning("bad samples cannot be recorded in %s, but in this log: %s", folder_uri, error)
        now = time.monotonic()
        _try_again_at[folder_uri] = now + _PAUSE * (now - begun)


@dataclass
class BadSampleBudget:
    """How many bad samples a run puts up with before it stops.

    Attributes:
        max_fraction: of the samples seen, in [0, 1].
        grace: this many are let pass at any time, since one in the first ten says little about a rate.
    """

    max_fraction: float = 0.01
    grace: int = 10
    num_bad: int = 0
    num_seen: int = 0

    def spend(self, num_bad: int, num_seen: int, last_record: dict[str, Any] | None) -> None:
        """Count `num_bad` more bad samples among `num_seen` more seen; the record is the latest of the bad.

        Raises:
            BadSamplesError: more than max(grace, max_fraction × seen) have been bad.
        """
        self.num_bad += num_bad
        self.num_seen += num_seen
        if num_bad and self.num_bad > max(self.grace, self.max_fraction * self.num_seen):
            last = last_record or {}
            title = title_of(last.get("store"), last.get("index"), last.get("name"))
            raise BadSamplesError(
                f"{self.num_bad} of {self.num_seen} samples are bad, more than"
                f" transform.max_bad_fraction={self.max_fraction:g} allows (the first {self.grace} are free);"
                f" the last one is {title}: {last.get('error')}."
                " Mend the store, or raise transform.max_bad_fraction"
            )
