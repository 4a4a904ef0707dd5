"""Ctrl-C and SIGTERM of a run: the first stops it with a checkpoint, the second aborts it."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pyarrow as pa

from raypipe.background import in_background
from raypipe.errors import RaypipeError
from raypipe.progress import print_progress
from raypipe.storage.retries import allow_retries, stop_retries

logger = logging.getLogger(__name__)

# `timeout` and `uv run` send a signal to the process and to its group, so one signal arrives twice.
_ONE_SIGNAL_S = 0.5
# Longest wait, at the end, for the thread that asks.
_END_S = 5.0


class Stopped(KeyboardInterrupt):
    """The run was stopped on request, and has a checkpoint to resume from."""


class Interrupts:
    """Context manager for Ctrl-C and SIGTERM (`ray job stop`): the first asks a run to end, the second aborts it.

    A first signal is never lost, since no exception is raised where Ray might swallow it. Outside the main thread,
    which receives all signals, the context manager does nothing.

    Args:
        grace_s: time for the trainers to notice the request, before they are aborted: a step may take minutes.

    Attributes:
        reason: reason of `give_up`; empty = it was not called.
    """

    def __init__(self, grace_s: float = 6.0) -> None:
        self._grace_s = grace_s
        self.reason = ""
        self._asked_at: float | None = None
        self._request: Callable[[], None] | None = None
        self._is_answered: Callable[[], bool] = lambda: True
        self._asking: Future[None] | None = None
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        allow_retries()
        self.stand()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._asking:
            wait([self._asking], _END_S)
        self._leave()

    def stand(self) -> None:
        """Replace handlers that Ray has set in the meantime."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(signum)) != self._interrupted:
                if signum not in self._before or signum == signal.SIGTERM:
                    # Ray's handler of SIGTERM ends Ray's processes
                    self._before[signum] = handler
                signal.signal(signum, self._interrupted)

    def _leave(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self._asked_at is not None:
            raise KeyboardInterrupt

    def give_up(self, reason: str) -> None:
        """End the run from any thread, as a second signal does, with an error."""
        self.reason = reason
        self._abort()

    def _abort(self) -> None:
        if self._ended.is_set():
            return
        self._asked_at = self._asked_at or -math.inf
        os.kill(os.getpid(), signal.SIGINT)  # acts as a second signal

    def hand_over(
        self,
        request: Callable[[], None],
        is_answered: Callable[[], bool] = lambda: True,
    ) -> None:
        """Use `request` from now on to ask the run to end, and at once if there has been a signal.

        Args:
            request: asks the run to end.
            is_answered: returns whether the run is about to end. If it is not after the grace, it is aborted.
        """
        self._request = request
        self._is_answered = is_answered
        self.stand()
        if self._asked_at is not None:
            self._ask()

    def _ask(self) -> None:
        # Threads do it, since a signal handler interrupts arbitrary code, and storage may not answer at all.
        self._asking = in_background("raypipe-stop-request", self._ask_until)
        in_background("raypipe-stop-grace", self._await_answer)

    def _ask_until(self) -> None:
        assert self._request
        self._request()
        while not (self._is_answered() or self._ended.wait(0.2)):
            pass

    def _await_answer(self) -> None:
        assert self._asking
        try:
            self._asking.result(self._grace_s)
        except TimeoutError:
            self._abort()
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("cannot ask the run to end: %s", error)
            self._abort()

    def _interrupted(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if self._request is not None:
                self._ask()
            else:
                print_progress(
                    logger,
                    "stopping before the trainers are started; press Ctrl-C again to abort",
                )
        elif now - self._asked_at > _ONE_SIGNAL_S:
            self._leave()  # a third signal gets the original handlers
            self._asking = None  # an abort waits for nothing
            stop_retries()  # the end must not wait for storage
            raise KeyboardInterrupt
