"""Checkpoints in a run's folder: the one to begin with, and those that a thread of rank 0 writes.

The thread does not call Ray, and makes no step wait for the device. Ray Train's own thread
(`ray.train.report(checkpoint_upload_mode=ASYNC)`, alpha) is not used: steps would wait for a local folder to be
written, nothing is synced to the disk, and Ray Train resumes from a checkpoint only after its controller has
registered it in a separate file, some time after the upload. A job that is killed in between would lose a complete
checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from raypipe.background import in_background
from raypipe.errors import RaypipeError
from raypipe.plan.places import Cursor
from raypipe.progress import print_progress
from raypipe.rayext.agreement import from_rank_zero
from raypipe.storage.lease import is_held
from raypipe.streaming.saving.checkpoints import (
    Checkpoint,
    find_newest,
    write_checkpoint,
)
from raypipe.streaming.saving.stateful import saved

logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Checkpoints in a run's folder, on one rank.

    The next call of `save`, `check` or `wait` raises an error of the thread, once.

    Args:
        run_uri: the run's folder.
        lease: token of the lease of the run's folder; empty = not needed.

    Attributes:
        run_uri: the run's folder.
    """

    def __init__(self, run_uri: str, lease: str = "") -> None:
        self.run_uri = run_uri
        self._lease = lease
        # The name of the checkpoint that was read or written last.
        self._name = ""
        self._writing: Future[None] | None = None

    def find(
        self,
        start_from: str,
        check: Callable[[Cursor], None],
        rank: int = 0,
        world_size: int = 1,
    ) -> Checkpoint | None:
        """Return the newest whole checkpoint of a plan, on rank 0 with its state; all ranks call it.

        It is rank 0's, since each rank might find a different one.

        Args:
            start_from: where a run without checkpoints begins, see `raypipe.loader`; empty = at the beginning.
            check: the plan's, which raises CursorError for a cursor of a different one.

        Raises:
            ConfigError, CursorError: see `find_newest`.
            RaypipeError: another run has the folder.
        """
        self._check_lease()
        found: Checkpoint | RaypipeError | None = None
        state = b""
        if rank == 0:
            try:
                found = self._newest(start_from, check)
            except RaypipeError as error:
                found = error
        if isinstance(found, Checkpoint):
            state = found.state
            found = found._replace(state=b"")
        if world_size > 1:
            (found,) = from_rank_zero((found,))
        if isinstance(found, RaypipeError):
            raise found
        if found is None:
            return None
        self._name = found.name
        return found._replace(state=state)

    def _newest(
        self, start_from: str, check: Callable[[Cursor], None]
    ) -> Checkpoint | None:
        """Return the newest checkpoint, with its state; print those that are skipped."""
        newest, skipped = find_newest(
            self.run_uri, check, with_state=True, start_from=start_from
        )
        for name, reason in skipped.items():
            print_progress(logger, f"not resumed from {name}: {reason}")
        if skipped:
            start = newest.name if newest else "the beginning"
            print_progress(logger, f"resumed from {start}")
        return newest

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def save(
        self,
        state: Mapping[str, Any],
        cursor: Cursor,
        metrics: Mapping[str, Any],
        described: Mapping[str, Any],
        before: Callable[[], None] = lambda: None,
        after: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Copy a state now, and write it in a thread, on rank 0; waits for the previous one.

        The checkpoint is valid when it is complete; until then, a resume uses the previous one.

        Args:
            state: the states of parts, by name.
            cursor: the run's place.
            metrics: the run's metrics, as plain values.
            described: description of the model's input, see `saved_model.input_of`.
            before: called in the thread before it writes.
            after: called in the thread once the checkpoint is complete, with the seconds that it took.

        Raises:
            ConfigError: a part holds objects that no resume could load.
        """
        self.wait()
        begun_at = time.perf_counter()
        content = saved(state)

        def write() -> None:
            before()
            self._check_lease()
            self._name = write_checkpoint(
                self.run_uri, cursor, content, dict(metrics), self._name, described
            )
            after(time.perf_counter() - begun_at)

        # Python waits for it at exit.
        self._writing = in_background("raypipe-checkpoint", write, daemon=False)

    def check(self) -> None:
        """Raise the thread's error, if it has failed."""
        if self._writing and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Block until the last checkpoint is written; raise the thread's error, if it has failed."""
        writing = self._writing
        self._writing = None
        if writing:
            writing.result()

    def _check_lease(self) -> None:
        if self._lease and not is_held(self.run_uri, self._lease):
            raise RaypipeError(
                f"{self.run_uri} no longer belongs to this run: either another run has taken it, or this machine "
                "cannot see it. If trainers run on several machines, set storage_path to a folder that all of "
                "them share, or to a bucket"
            )
