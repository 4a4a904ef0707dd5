"""Room on the cluster for a new stream of this process: its earlier ones give way, or end."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import ray

from raypipe.background import in_background
from raypipe.config import PoolConfig
from raypipe.rayext.allocation import SETTLE_S, cluster_resources
from raypipe.rayext.startup import Wait
from raypipe.streaming.lifetime import end_oldest, supervisors

_logger = logging.getLogger(__name__)

_SETTLE_S = 2.0  # CPUs of a stream that has just ended come back
# Longest wait for other pools to give way: actors finish their blocks, and a pool that starts may not answer.
_GIVE_WAY_S = 60.0
_LATE_S = 2.0  # Ray tells late which CPUs have been taken
_ANSWER_S = 2.0  # a Supervisor says how many CPUs its pool still takes


def make_room(cpus: float, spared: Any = None, most: float = math.inf) -> None:
    """End streams that this process has left open, the oldest first, until so many CPUs are free.

    Nobody else may be able to end them: a notebook's names and errors hold them.

    Args:
        spared: handle of the Supervisor of a stream that is not ended.
        most: how many may be ended.
    """
    while most > 0 and not _settles(cpus) and end_oldest(spared):
        most -= 1
        _logger.warning(
            "an earlier stream of this process was left open, and has been ended: its CPUs are needed for the new "
            "one. It starts again if it is asked for more. End one by loader.close(), or leave room for both"
        )


def _settles(cpus: float) -> bool:
    """Return whether so many CPUs are free, or become so soon."""
    deadline = time.monotonic() + _SETTLE_S
    while cluster_resources().free_cpus < cpus:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class ActorRoom:
    """CPUs of this process's other streams that their pools leave to a new one.

    Pools give what they have beyond their smallest number of actors. CPUs that are free, but that actors of these
    pools will take, do not count.

    Attributes:
        cpus: those that the new stream needs.
    """

    def __init__(self, pool: PoolConfig) -> None:
        self.cpus = pool.least_actors * pool.cpus_per_actor
        self._others = supervisors()
        self._is_asked = False
        self._asked_at = 0.0

    def ask_for(self, check: Callable[[], None] = lambda: None) -> None:
        """Let the others shrink if the new stream needs it, and wait until they have; see `give_back`.

        Args:
            check: raises an error if the new stream is not wanted any more.
        """
        if not self._others or self._keeps_room(check):
            return
        deadline = time.monotonic() + _GIVE_WAY_S
        self.ask()
        while (
            not self._keeps_room(check)
            and self._may_give()
            and time.monotonic() < deadline
        ):
            check()
            time.sleep(0.1)

    def make(self, check: Callable[[], None]) -> None:
        """Let the others shrink if their pools have grown since there was room; see `make_room`."""
        if self._others and not self._is_asked and not _settles(self.cpus):
            self.ask_for(check)
        make_room(self.cpus)

    def wait(self, check: Callable[[], None]) -> Wait:
        """Return a wait for CPUs that are held, also by pools of the others which have grown in the meantime."""
        timeout_s = _GIVE_WAY_S if self._others else SETTLE_S
        return Wait(timeout_s, check, tell=lambda reason: self.ask())

    def insist(self, own: Any) -> None:
        """Ask again while the new pool finds no CPU: others may have taken it since there was one.

        Args:
            own: handle of the new stream's Supervisor, if an earlier stream that has nothing to give is to end for
                it, where no CPU is free or may still come; None = it is not.
        """
        if not self._others:
            return
        if not self._is_asked:
            self.ask()
        elif (
            own
            and time.monotonic() - self._asked_at > SETTLE_S
            and not self._may_give()
        ):
            self._asked_at = time.monotonic()
            # the end of a stream waits for its threads, of which one may call this
            end = functools.partial(make_room, self.cpus, own, most=1)
            in_background("raypipe-end", end)

    def ask(self) -> None:
        """Let the others shrink, if they were not asked."""
        if not self._is_asked:
            self._is_asked = True
            self._asked_at = time.monotonic()
            self._tell(self.cpus)

    def give_back(self) -> None:
        """Let the others grow again."""
        if self._is_asked:
            self._is_asked = False
            self._tell(-self.cpus)

    def _tell(self, more: float) -> None:
        for supervisor in self._others:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.is_initialized():  # a call would restart it
                    supervisor.give_way.remote(more)

    def _has_room(self) -> bool:
        # asked first: an actor that starts in between counts twice, and not never
        awaited_cpus = sum(_answers("awaited_cpus", self._others).values())
        return cluster_resources().free_cpus - awaited_cpus >= self.cpus

    def _keeps_room(self, check: Callable[[], None]) -> bool:
        if not self._has_room():
            return False
        until = time.monotonic() + _LATE_S
        while time.monotonic() < until:
            check()
            time.sleep(0.1)
        return self._has_room()

    def _may_give(self) -> bool:
        giving = _answers("giving_cpus", self._others)
        return len(giving) < len(self._others) or any(giving.values())


def _answers(method: str, open_streams: list[Any]) -> dict[Any, float]:
    """Return the answers of the supervisors that answer."""
    asked = {getattr(one, method).remote(): one for one in open_streams}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    answers = {}
    for answer in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            answers[asked[answer]] = ray.get(answer)
    return answers
