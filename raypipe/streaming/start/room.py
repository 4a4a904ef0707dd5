"""Room on the cluster for a new stream of this process: its earlier ones give way, or end."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from raypipe.config import PoolConfig
from raypipe.rayext.allocation import cluster_resources
from raypipe.streaming.lifetime import end_oldest, supervisors

_logger = logging.getLogger(__name__)

_SETTLE_S = 2.0  # CPUs of a stream that has just ended come back
# Longest wait for other pools to give way: actors finish their blocks, and a pool that starts may not answer.
_GIVE_WAY_S = 60.0
_LATE_S = 2.0  # Ray tells late which CPUs have been taken
_ANSWER_S = 2.0  # a Supervisor says how many CPUs its pool still takes


def make_room(cpus: float) -> None:
    """End streams that this process has left open, the oldest first, until so many CPUs are free.

    Nobody else may be able to end them: a notebook's names and errors hold them.
    """

    def has_room() -> bool:
        deadline = time.monotonic() + _SETTLE_S
        while cluster_resources().free_cpus < cpus:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    while not has_room() and end_oldest():
        _logger.warning(
            "an earlier stream of this process was left open, and has been ended: its CPUs are needed for the "
            "new one. It starts again if it is asked for more. End one by loader.close(), or leave room for both"
        )


def ask_for_room(
    pool: PoolConfig, check: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Let the pools of this process's other streams shrink, as far as a new one needs it and they have more than
    their smallest number of actors. CPUs that are free, but that actors of these pools will take, do not count.

    Args:
        check: raises an error if the new stream is not wanted any more.

    Returns:
        A function that ends that.
    """
    cpus = pool.least_actors * pool.cpus_per_actor
    open_streams = supervisors()

    def has_room() -> bool:
        # asked first: an actor that starts in between counts twice, and not never
        awaited_cpus = sum(_answers("awaited_cpus", open_streams).values())
        return cluster_resources().free_cpus - awaited_cpus >= cpus

    def keeps_room() -> bool:
        if not has_room():
            return False
        until = time.monotonic() + _LATE_S
        while time.monotonic() < until:
            check()
            time.sleep(0.1)
        return has_room()

    def may_give() -> bool:
        giving = _answers("giving_cpus", open_streams)
        return len(giving) < len(open_streams) or any(giving.values())

    if not open_streams or keeps_room():
        return lambda: None
    deadline = time.monotonic() + _GIVE_WAY_S

    def ask(more: float) -> None:
        for supervisor in open_streams:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.is_initialized():  # a call would restart it
                    supervisor.give_way.remote(more)

    give_back = functools.partial(ask, -cpus)
    ask(cpus)
    with contextlib.ExitStack() as left:
        left.callback(give_back)
        while not keeps_room() and may_give() and time.monotonic() < deadline:
            check()
            time.sleep(0.1)
        left.pop_all()
    return give_back


def _answers(method: str, open_streams: list[Any]) -> dict[Any, float]:
    """Return the answers of the supervisors that answer."""
    asked = {getattr(one, method).remote(): one for one in open_streams}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    answers = {}
    for answer in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            answers[asked[answer]] = ray.get(answer)
    return answers
