"""Around each micro-batch of a transform actor: a time limit, fresh memory, and a record of what it was at."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterator
from typing import Any

import ray

from raypipe.errors import ResourceError
from raypipe.plan.schedule import MicroBatchId
from raypipe.storage import file_lock
from raypipe.transform.micro_batch import FIRST_ATTEMPT, Attempt

# A restarted actor asks what is known of so many micro-batches before it trusts the world again. What killed it
# was at most as far away as the queue of its tasks.
_WARY_FOR = 64
# Results of the last micro-batch are on their way when an actor ends itself.
_FLUSH_S = 0.2
_STDERR = 2


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
