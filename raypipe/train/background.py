"""What rank 0 does beside the steps, each in a thread: it writes checkpoints, and looks for a request to stop.

Neither thread calls Ray, so each may outlast a Ray that is shut down, and none waits for the device in a step.

Ray Train's own thread (`ray.train.report(checkpoint_upload_mode=ASYNC)`, alpha) does not write checkpoints here:
the steps would wait until a local folder is written, nothing is synced to the disk, and Ray Train resumes from it
only once its controller has noted it in a file of its own, some time after the upload. A job that is killed in
between would lose a checkpoint that is whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from raypipe.storage.filesystem import is_remote
from raypipe.storage.patience import impatient
from raypipe.streaming.stateful import saved
from raypipe.train.run_folder import stop_requested

logger = logging.getLogger(__name__)

# Between two looks for a request to stop: in object storage, each is a request that is paid for.
_LOOK_S, _LOOK_REMOTE_S = 1.0, 3.0


class CheckpointWriter:
    """Writes states in a thread, one at a time.

    An error of the thread's is raised by the next call of any method, once.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, state: Any, write: Callable[[memoryview], None]) -> None:
        """Serialise a state as it is now, and let the thread write it; waits for the one before.

        Args:
            state: what torch.save takes.
            write: puts the bytes where they belong; called in the thread.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(saved(state), write), daemon=True, name="raypipe-checkpoint"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a thread that has failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, state: memoryview, write: Callable[[memoryview], None]) -> None:
        try:
            write(state)
        except BaseException as error:
            self._error = error


class StopPoll:
    """Looks for a request to stop a run, in a thread, from now until `close`.

    Args:
        run_uri: the run's folder.

    Attributes:
        asked: whether there was one.
    """

    def __init__(self, run_uri: str) -> None:
        self.asked = False
        self._run_uri, self._ended = run_uri, threading.Event()
        self._every_s = _LOOK_REMOTE_S if is_remote(run_uri) else _LOOK_S
        self._thread = threading.Thread(target=self._look, daemon=True, name="raypipe-stop-poll")
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that waits for storage is left to end by itself."""
        self._ended.set()
        self._thread.join(self._every_s)

    def _look(self) -> None:
        has_failed = False
        while not self._ended.is_set():
            try:
                with impatient():
                    self.asked = stop_requested(self._run_uri)
            except Exception as error:  # a run does not end because nobody can ask it to
                if not has_failed:
                    logger.warning("cannot see whether %s was asked to stop, and try on: %s", self._run_uri, error)
                has_failed = True
            if self.asked:
                return
            self._ended.wait(self._every_s)
