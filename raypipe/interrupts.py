"""Ctrl-C and SIGTERM (`ray job stop`) of a run: the first asks it to end, the second aborts it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from raypipe.logs import progress

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context. A first signal within it is never lost: nothing is raised where Ray would swallow it.

    In another thread than the main one it does nothing: signals are not for others.
    """

    def __init__(self) -> None:
        self._asked = False
        self._request: Callable[[], None] | None = None
        self._seconds: dict[int, Any] = {}  # what a second signal gets

    def __enter__(self) -> Interrupts:
        self._at_first = signal.getsignal(signal.SIGINT)
        self.stand()
        return self

    def __exit__(self, *error: object) -> None:
        if self._seconds:
            signal.signal(signal.SIGINT, self._at_first)
            # Ray's, if it was started within; it ends Ray's processes.
            signal.signal(signal.SIGTERM, self._seconds[signal.SIGTERM])

    def stand(self) -> None:
        """Take the place of handlers that Ray has set since."""
        if self._asked or threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            if (handler := signal.getsignal(signum)) != self._interrupted:
                self._seconds[signum] = handler
                signal.signal(signum, self._interrupted)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self._asked:
            raise KeyboardInterrupt

    def hand_over(self, request: Callable[[], None]) -> None:
        """From now on the run can be asked to end by itself, and is, if there was a signal already."""
        self._request = request
        self.stand()
        if self._asked:
            request()

    def _interrupted(self, signum: int, frame: Any) -> None:
        self._asked = True
        for each, handler in self._seconds.items():
            signal.signal(each, handler)
        if self._request is not None:
            self._request()
        else:
            progress(logger, "stopping before the trainers are started; once more aborts")
