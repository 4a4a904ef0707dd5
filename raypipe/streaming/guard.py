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
_STDERR = 2

# Where a record has failed, this process tries none again: an object store that is gone says so after minutes, and
# a run should not wait for it at every bad sample.
_without_records: set[str] = set()


class Guard:
    """Of one transform actor.

    Args:
        supervisor: handle of a Supervisor.
        time_limit_s: seconds for a micro-batch, and, in a careful attempt, for each sample; 0 = none.
    """

    def __init__(self, supervisor: Any, time_limit_s: float) -> None:
        self._supervisor, self._time_limit_s = supervisor, time_limit_s
        context = ray.get_runtime_context()
        self._actor = context.get_actor_id() or f"process {os.getpid()}"
        home = f"process {os.getpid()} on {ray.util.get_node_ip_address()}, node {context.get_node_id()[:8]}"
        self._wary = _WARY_FOR if ray.get(supervisor.arrived.remote(self._actor, home)) else 0

    @contextlib.contextmanager
    def micro_batch(self, at: MicroBatchId) -> Iterator[Attempt]:
        """Gives what is known of a micro-batch; around its transform.

        Raises:
            ResourceError: it has cost too many actors.
        """
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

    def _watch(self) -> None:
        # A thread of C's: it works while a transform holds the interpreter, and shows where that was.
        if self._time_limit_s:
            faulthandler.dump_traceback_later(self._time_limit_s, exit=True, file=_STDERR)

    def _touch(self, index: int) -> None:
        ray.get(self._supervisor.touches.remote(self._actor, index))
        self._watch()


def record_bad(folder_uri: str, at: MicroBatchId, bad: list[dict[str, Any]], by: str = "") -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    It is named by the micro-batch's place, so that a retry of the same one, on any node, writes the same again.
    Where it cannot be written, that is logged, once in a process, and the log alone has them from then on.

    Args:
        folder_uri: of the quarantine; empty = log only.
        at: the micro-batch.
        bad: one record per sample.
        by: who found them, where that is not an actor; part of the name.
    """
    lines = [json.dumps({**vars(at), **record}) for record in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    if not folder_uri or folder_uri in _without_records:
        return
    try:
        filesystem, folder = open_filesystem(folder_uri)
        filesystem.create_dir(folder, recursive=True)
        write_text(join(folder_uri, f"{at}{by and '-' + by}.jsonl"), "".join(line + "\n" for line in lines))
    except Exception as error:  # a full disk, an object store that is gone, whatever it is
        _without_records.add(folder_uri)
        logger.warning("bad samples cannot be recorded in %s, but in this log: %s", folder_uri, error)


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

    def spend(self, bad: list[dict[str, Any]], num_seen: int) -> None:
        """Count so many more samples seen, and those of them that were bad, by their records.

        Raises:
            BadSamplesError: more than max(grace, max_fraction × seen) have been bad.
        """
        self.num_bad += len(bad)
        self.num_seen += num_seen
        if bad and self.num_bad > max(self.grace, self.max_fraction * self.num_seen):
            title = title_of(bad[-1]["store"], bad[-1]["index"], bad[-1]["name"])
            raise BadSamplesError(
                f"{self.num_bad} of {self.num_seen} samples are bad, more than"
                f" transform.max_bad_fraction={self.max_fraction:g} allows (the first {self.grace} are free);"
                f" the last one is {title}: {bad[-1]['error']}."
                " Mend the store, or raise transform.max_bad_fraction"
            )
