"""Background threads of rank 0: one writes checkpoints, one polls for a request to stop.

Neither thread calls Ray, so both may outlive it, and neither makes a step wait for the device.

Ray Train's own thread (`ray.train.report(checkpoint_upload_mode=ASYNC)`, alpha) is not used: steps would wait for
a local folder to be written, nothing is synced to the disk, and Ray Train resumes from a checkpoint only after its
controller has registered it in a separate file, some time after the upload. A job that is killed in between would
lose a complete checkpoint.
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

# Periods of the poll for a request to stop: in object storage, each look is a billed request.
_LOOK_S, _LOOK_REMOTE_S = 1.0, 3.0


class CheckpointWriter:
    """Writes states in a thread, one at a time.

    The next call of any method raises an error of the thread, once.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """True while the thread writes a state."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, state: Any, write: Callable[[memoryview], None]) -> None:
        """Serialize a state now, and write it in the thread; waits for the previous state.

        Args:
            state: an argument of torch.save.
            write: writes the bytes; called in the thread.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(saved(state), write), daemon=True, name="raypipe-checkpoint"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the thread's error, if it has failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Block until the state is written."""
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
    """Polls for a request to stop a run, in a thread, until `close`.

    Args:
        run_uri: the run's folder.

    Attributes:
        asked: whether a stop was requested.
    """

    def __init__(self, run_uri: str) -> None:
        self.asked = False
        self._run_uri, self._ended = run_uri, threading.Event()
        self._every_s = _LOOK_REMOTE_S if is_remote(run_uri) else _LOOK_S
        self._thread = threading.Thread(target=self._look, daemon=True, name="raypipe-stop-poll")
        self._thread.start()

    def close(self) -> None:
        """End the thread, without waiting for one that is blocked by storage."""
        self._ended.set()
        self._thread.join(self._every_s)

    def _look(self) -> None:
        has_failed = False
        while not self._ended.is_set():
            try:
                with impatient():
                    self.asked = stop_requested(self._run_uri)
            except Exception as error:  # a failed poll must not end the run
                if not has_failed:
                    logger.warning("cannot check for a stop request in %s, will retry: %s", self._run_uri, error)
                has_failed = True
            if self.asked:
                return
            self._ended.wait(self._every_s)
