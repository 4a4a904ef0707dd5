"""The thread of rank 0 that writes checkpoints. It does not call Ray, and makes no step wait for the device.

Ray Train's own thread (`ray.train.report(checkpoint_upload_mode=ASYNC)`, alpha) is not used: steps would wait for
a local folder to be written, nothing is synced to the disk, and Ray Train resumes from a checkpoint only after its
controller has registered it in a separate file, some time after the upload. A job that is killed in between would
lose a complete checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from raypipe.streaming.stateful import saved


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
            target=self._write,
            args=(saved(state), write),
            daemon=True,
            name="raypipe-checkpoint",
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
