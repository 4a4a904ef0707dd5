"""Background threads, for one call, a call that is waited for, or one that is made again and again; processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_TICK_S = 0.2
_END_S = 5.0


def in_background(name: str, do: Callable[[], _T], daemon: bool = True) -> Future[_T]:
    """Call `do` in a new thread; the future gets its result, or its error.

    Args:
        name: name of the thread.
        daemon: whether Python leaves it behind at exit.
    """
    outcome = Future[_T]()

    def run() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return outcome


def attended(name: str, do: Callable[[], _T], tick: Callable[[], object]) -> _T:
    """Return the result of `do` from a thread, and call `tick` meanwhile, which may raise.

    Neither Ctrl-C nor `tick` waits for a server that does not answer.
    """
    outcome = in_background(name, do)
    while not wait([outcome], _TICK_S).done:
        tick()
    return outcome.result()


class Repeating(threading.Thread):
    """A thread that calls `turn` again and again, until it is stopped.

    Args:
        turn: called after each period; an error of it is only logged.
        period_s: seconds between two calls.
        name: name of the thread.

    Attributes:
        left: set once it is stopped.
    """

    def __init__(self, turn: Callable[[], object], period_s: float, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._turn = turn
        self._period_s = period_s
        self.left = threading.Event()

    def run(self) -> None:
        """Call `turn` again and again."""
        while not self.left.wait(self._period_s) and self._goes_on():
            self._call()

    def _call(self) -> None:
        try:
            self._turn()
        except Exception:
            logger.debug("a turn of %s failed", self.name, exc_info=True)

    def _goes_on(self) -> bool:
        return True

    def stop(self, timeout_s: float | None = _END_S) -> None:
        """Stop the thread, and wait for the end of its current call.

        Args:
            timeout_s: limit of the wait; None = no limit.
        """
        self.left.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join(timeout_s)


def process_state(pid: int) -> tuple[str, str]:
    """Return a local process's state and start, as Linux tells them; both empty for a dead one, or elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
