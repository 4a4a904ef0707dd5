"""Waits during a start, with a limit and log lines: for other starting runs, and for resources."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import NoRoomError
from raypipe.progress import print_progress
from raypipe.rayext.processes import Process, is_stopped, this_process

logger = logging.getLogger(__name__)

_FIRST_LINE_S = 1.0
_LINE_EVERY_S = 30.0

_STARTING = "raypipe-start"
_HOLDER_S = 2.0  # time for the other run's actor to answer


class Wait:
    """A bounded wait.

    Args:
        timeout_s: limit, after which the wait raises.
        check: called at each turn; may raise to end the wait.
        setting: setting of `timeout_s`, for messages.
        tell: called with the reason of the wait when a line about it is logged.
    """

    def __init__(
        self,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        setting: str = "",
        tell: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._tell = tell
        self._timeout_s = timeout_s
        self._check = check
        self._setting = f" ({setting})" if setting else ""
        self._begun = time.monotonic()
        self._line_at = self._begun + _FIRST_LINE_S - _LINE_EVERY_S

    def turn(self, reason: str, pause_s: float = 0.5) -> None:
        """Wait a little longer for a reason, which follows "waiting for"; raise NoRoomError at the limit."""
        self._check()
        now = time.monotonic()
        left_s = self._begun + self._timeout_s - now
        if left_s <= 0:
            raise NoRoomError(
                f"waited {self._timeout_s:g} s{self._setting} for {reason}"
            )
        if now - self._line_at >= _LINE_EVERY_S:
            self._line_at = now
            print_progress(
                logger, f"waiting up to {left_s:.0f} s more{self._setting} for {reason}"
            )
            self._tell(reason)
        time.sleep(min(pause_s, left_s))


class _Starting:
    """Actor of a starting run, with a unique name; it ends with the run's process.

    Args:
        run: name of the run.
        driver: process of the run.
    """

    def __init__(self, run: str, driver: Process) -> None:
        self._run = run
        self._driver = driver
        self._reason = ""

    def name(self) -> str:
        """Return the name of the run."""
        return self._run

    def tell(self, reason: str) -> None:
        """Record what the run waits for."""
        self._reason = reason

    def state(self) -> str:
        """Return who holds up the other runs, and why."""
        why = f", which waits for {self._reason}" if self._reason else ""
        is_here = self._driver.node == ray.get_runtime_context().get_node_id()
        if is_here and is_stopped(self._driver):
            why = ", which is stopped (SIGSTOP): continue or end it"
        return f"run {self._run} ({self._driver}){why}"


@contextlib.contextmanager
def only_start(wait: Wait, run: str = "") -> Iterator[Any]:
    """Context manager: let no other run start on the connected cluster. Killing the yielded actor ends this early.

    Two runs that check for resources at the same time would both count on the same ones. Runs that wait learn who
    holds them up.

    Args:
        run: name of this run, for others.
    """
    node = ray.get_runtime_context().get_node_id()
    options = {
        "num_cpus": 0,
        "name": _STARTING,
        "namespace": "raypipe",
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
    }
    while True:
        try:
            actor: Any = (
                ray.remote(_Starting)
                .options(**options)
                .remote(run, this_process("driver"))
            )
            break
        except ValueError:  # the name is taken
            state = _told_by_holder("state")
            who = f": {state}" if state else ""
            wait.turn(f"another run, until its trainers and its pool have started{who}")
    try:
        yield actor
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            ray.kill(actor)  # does not wait for the head


def another_starts(run: str) -> bool:
    """Return whether a run of another name starts, and counts on the CPUs that were free at its check."""
    return _told_by_holder("name") not in ("", run)


def _told_by_holder(method: str) -> str:
    """Return the answer of the run that holds up others; empty if unknown."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        actor: Any = ray.get_actor(_STARTING, namespace="raypipe")
        return str(ray.get(getattr(actor, method).remote(), timeout=_HOLDER_S))
    return ""
