"""Checkpoints in a run's folder: the one to begin with, and those that a thread of rank 0 writes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan.places import Cursor
from raypipe.plan.schedule import Plan
from raypipe.progress import print_progress
from raypipe.storage.filesystem import open_filesystem
from raypipe.storage.lease import is_held
from raypipe.streaming.background import CheckpointWriter
from raypipe.streaming.checkpoints import (
    Checkpoint,
    find_newest,
    read_state,
    write_checkpoint,
)
from raypipe.streaming.stateful import loaded
from raypipe.streaming.stop_file import answer_stop, stop_requested

logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Checkpoints of a run in its folder, on one rank.

    All ranks make it together. They start from rank 0's checkpoint, since each might find a different one.

    Args:
        run_uri: the run's folder.
        plan: the run's plan.
        start_from: where a run without checkpoints begins, see `TrainConfig`; empty = at the beginning.
        lease: token of the lease of the run's folder; empty = not needed.
    """

    def __init__(
        self, run_uri: str, plan: Plan, start_from: str = "", lease: str = ""
    ) -> None:
        self._run_uri = run_uri
        self._lease = lease
        self._writer = CheckpointWriter()
        self._content = b""
        self._check_lease()
        ranks = ray.train.get_context()
        checkpoint = None
        if ranks.get_world_rank() == 0:
            checkpoint = self._newest(plan, start_from)
        if checkpoint:
            self._content = checkpoint.state
            checkpoint = checkpoint._replace(state=b"")
        if ranks.get_world_size() > 1:
            checkpoint = broadcast_from_rank_zero(checkpoint)
        self._start: Checkpoint | None = checkpoint
        self._name = checkpoint.name if checkpoint else ""
        self._plan = plan

    @property
    def cursor(self) -> Cursor:
        """Place where the run begins."""
        return self._start.cursor if self._start else self._plan.start()

    def take_start(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the state and the metrics of the checkpoint that the run begins with, once; None without one."""
        if self._start is None:
            return None
        content = self._content or read_state(open_filesystem(self._start.address))
        self._content = b""
        return loaded(content), self._start.metrics

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writer.is_writing

    def save(
        self,
        state: dict[str, Any],
        cursor: Cursor,
        metrics: dict[str, Any],
        described: dict[str, Any],
        before: Callable[[], None],
        after: Callable[[float], None],
    ) -> None:
        """Copy a state now, and write it in a thread, on rank 0.

        The checkpoint is valid when it is complete; until then, a resume uses the previous one.

        Args:
            state: the state.
            cursor: the run's place.
            metrics: the run's metrics.
            described: description of the model's input, see `Loader.described`.
            before: called in the thread before it writes.
            after: called in the thread once the checkpoint is complete, with the seconds that it took.
        """
        begun_at = time.perf_counter()

        def write(content: memoryview) -> None:
            before()
            self._check_lease()
            self._name = write_checkpoint(
                self._run_uri,
                cursor,
                content,
                metrics,
                before=self._name,
                described=described,
            )
            after(time.perf_counter() - begun_at)

        self._writer.save(state, write)

    def check(self) -> None:
        """Raise the thread's error, if it has failed."""
        self._writer.check()

    def wait(self) -> None:
        """Block until the last checkpoint is written."""
        self._writer.wait()

    def stop_requested(self) -> bool:
        """Return whether the run was asked to end."""
        return stop_requested(self._run_uri)

    def answer_stop(self) -> None:
        """Confirm that the run will end with a checkpoint."""
        with contextlib.suppress(ConfigError):
            # if the disk is full, the checkpoint raises
            answer_stop(self._run_uri)

    def _newest(self, plan: Plan, start_from: str) -> Checkpoint | None:
        """Return the newest checkpoint, with its state; log those that are skipped."""
        newest, skipped = find_newest(
            self._run_uri, plan.check, with_state=True, start_from=start_from
        )
        for name, reason in skipped.items():
            print_progress(logger, f"not resumed from {name}: {reason}")
        if skipped:
            start = newest.name if newest else "the beginning"
            print_progress(logger, f"resumed from {start}")
        return newest

    def _check_lease(self) -> None:
        if self._lease and not is_held(self._run_uri, self._lease):
            raise RaypipeError(
                f"{self._run_uri} no longer belongs to this run: either another run has taken it, or this machine "
                "cannot see it. If trainers run on several machines, set storage_path to a folder that all of "
                "them share, or to a bucket"
            )
