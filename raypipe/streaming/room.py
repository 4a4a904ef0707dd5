"""Room on the cluster for a new stream of this process: its earlier ones give way, or end."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable

import ray

from raypipe.config import PoolConfig
from raypipe.rayext.allocation import cluster_resources
from raypipe.streaming.lifetime import end_oldest, supervisors

_logger = logging.getLogger(__name__)

_SETTLE_S = 2.0  # CPUs of a stream that has just ended come back
# Time for other pools to give way: they know within a second or two, and actors finish their blocks.
_GIVE_WAY_S = 6.0


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


def ask_for_room(pool: PoolConfig) -> Callable[[], None]:
    """Let the pools of this process's other streams shrink, as far as a new one needs it and they have more than
    their smallest number of actors.

    Returns:
        A function that ends that.
    """
    cpus = pool.least_actors * pool.cpus_per_actor
    open_streams = supervisors()
    if not open_streams or cluster_resources().free_cpus >= cpus:
        return lambda: None
    deadline = time.monotonic() + _GIVE_WAY_S

    def ask(more: float) -> None:
        for supervisor in open_streams:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.is_initialized():  # a call would restart it
                    supervisor.give_way.remote(more)

    ask(cpus)
    while cluster_resources().free_cpus < cpus and time.monotonic() < deadline:
        time.sleep(0.1)
    return functools.partial(ask, -cpus)
