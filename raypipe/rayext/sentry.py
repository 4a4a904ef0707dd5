"""Watch over the watcher: each rank asks a stream's Supervisor for a sign of life, and ends one that is stopped.

The Supervisor ends stopped processes of the stream, see `watch`. Ranks end a stopped Supervisor. Ray restarts it
at once, and it remembers whom it watches, see `memory`. With the same call a rank says how long it has waited.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from raypipe.rayext.watch import Process, end_stopped

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
# Time without an answer, after which the Supervisor's process is checked. A busy one answers within milliseconds.
_ANSWER_S = 3.0


class Sentry:
    """Sentry of one rank, in a thread.

    Args:
        supervisor: handle of the stream's Supervisor.
        rank: number of the rank.
        waited_s: returns the seconds for which the rank has waited for a batch; 0 = it does not wait.
    """

    def __init__(
        self, supervisor: Any, rank: int, waited_s: Callable[[], float]
    ) -> None:
        self._supervisor = supervisor
        self._rank = rank
        self._waited_s = waited_s
        self._process: Process | None = None  # where the Supervisor has answered from
        self._asked: Any = None
        self._asked_at = 0.0
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="raypipe-sentry", daemon=True
        )

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to watch; a call afterwards would start Ray again."""
        self._left.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _PERIOD_S)

    def _run(self) -> None:
        while not self._left.wait(_PERIOD_S) and ray.is_initialized():
            try:
                self.turn(time.monotonic())
            except Exception:
                logger.debug("cannot watch a stream's supervisor", exc_info=True)

    def turn(self, now: float) -> None:
        """Ask the Supervisor for an answer, or take it; check the process of one that gives none."""
        if self._asked is None:
            self._asked = self._supervisor.rank_waits.remote(
                self._rank, self._waited_s()
            )
            self._asked_at = now
        if ray.wait([self._asked], timeout=_PERIOD_S)[0]:
            asked, self._asked = self._asked, None
            self._process = ray.get(asked)
        elif now - self._asked_at >= _ANSWER_S and self._process:
            self._check(self._process)

    def _check(self, process: Process) -> None:
        if (
            process.node != ray.get_runtime_context().get_node_id()
        ):  # rank 0 is on its node
            return
        if end_stopped([(process.pid, process.started)]):
            self._process = self._asked = None
            # The restarted one records it.
            self._supervisor.note.remote(
                f"killed a stopped process (SIGSTOP) that watched the stream: {process.role} ({process})",
                "stopped",
            )
