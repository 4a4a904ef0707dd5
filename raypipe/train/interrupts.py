"""Ctrl-C and SIGTERM of a run: how it is asked to end, and aborted."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from raypipe.logs import progress

logger = logging.getLogger(__name__)

# `timeout` and `uv run` send a signal to the process and to its group: it comes twice, and is meant once.
_ONE_SIGNAL_S = 0.5
# After which trainers that were asked to end, and have not looked, are aborted: a step may take minutes, and so
# may the first batch. With what an abort and Ray's own end take, a run has ended ten seconds after the signal.
_PATIENCE_S = 6.0


class Stopped(KeyboardInterrupt):
    """The run was ended on request before its end, and has a checkpoint to go on from."""


class Interrupts:
    """Ctrl-C and SIGTERM (`ray job stop`) of a run: the first asks it to end, the second aborts it.

    A first signal within this context is never lost: nothing is raised where Ray would swallow it. In another
    thread than the main one it does nothing: signals are not for others.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._request: Callable[[], None] | None = None
        self._is_answered: Callable[[], bool] = lambda: True
        self._asking: threading.Thread | None = None
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self.stand()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._asking:
            self._asking.join(_PATIENCE_S)
        self._leave()

    def stand(self) -> None:
        """Take the place of handlers that Ray has set since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(signum)) != self._interrupted:
                if signum not in self._before or signum == signal.SIGTERM:
                    self._before[signum] = handler  # for SIGTERM Ray's, which ends Ray's processes
                signal.signal(signum, self._interrupted)

    def _leave(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self._asked_at is not None:
            raise KeyboardInterrupt

    def hand_over(self, request: Callable[[], None], is_answered: Callable[[], bool] = lambda: True) -> None:
        """From now on the run can be asked to end by itself, and is, if there was a signal already.

        Args:
            request: asks it.
            is_answered: whether it is about to end. A run that is not, some seconds later, is aborted.
        """
        self._request, self._is_answered = request, is_answered
        self.stand()
        if self._asked_at is not None:
            self._ask()

    def _ask(self) -> None:
        # In a thread: storage may be slow, and this one is in a handler, in the middle of anything.
        self._asking = threading.Thread(target=self._ask_and_wait, daemon=True, name="raypipe-stop")
        self._asking.start()

    def _ask_and_wait(self) -> None:
        assert self._request
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._request()
            while time.monotonic() < deadline:
                if self._is_answered() or self._ended.wait(0.2):
                    return
        except Exception as error:
            logger.warning("the run cannot be asked to end: %s", error)
        if not self._ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)  # as if it came a second time

    def _interrupted(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if self._request is not None:
                self._ask()
            else:
                progress(logger, "stopping before the trainers are started; once more aborts")
        elif now - self._asked_at > _ONE_SIGNAL_S:
            self._leave()  # a third gets what stood before
            raise KeyboardInterrupt
