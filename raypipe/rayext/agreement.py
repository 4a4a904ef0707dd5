"""Agreement of the ranks of a run on what rank 0 decides, about once a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed
from ray import cloudpickle

_Decided = TypeVar("_Decided")

_PERIOD_S = 1.0


class Agreement:
    """Agreement of ranks that all ask after each step.

    Rank 0 sets the number of steps until they next wait for each other, since their clocks differ.

    Args:
        rank, world_size: number of this rank, and W.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._num_steps = 0
        self._steps_between = 1
        self._agreed_at = time.monotonic()

    def on(
        self, decide: Callable[[], tuple[_Decided, bool]], at_once: bool = False
    ) -> _Decided | None:
        """Return rank 0's decision on all ranks; None = it is not the time to ask.

        Args:
            decide: called on rank 0; returns the decision, and whether to ask again after the next step.
            at_once: whether to ask now in any case; the same on all ranks.
        """
        if self._world_size == 1:
            decision, _ = decide()
            return decision
        self._num_steps += 1
        if self._num_steps < self._steps_between and not at_once:
            return None
        message = None
        if self._rank == 0:
            decision, is_urgent = decide()
            message = decision, 1 if is_urgent else self._steps_in_a_period()
        self._num_steps = 0
        decision, self._steps_between = from_rank_zero(message)
        self._agreed_at = time.monotonic()
        return decision

    def _steps_in_a_period(self) -> int:
        seconds = max(time.monotonic() - self._agreed_at, 1e-6)
        return max(1, int(self._num_steps * _PERIOD_S / seconds))


def in_train_function() -> bool:
    """Return whether this process runs a train function of Ray Train."""
    if "ray.train" not in sys.modules:
        # a train function's process has it; others need not wait 2 s for it
        return False
    import ray.train.torch

    try:
        return ray.train.get_context().get_world_size() is not None
    except (RuntimeError, DeprecationWarning):  # the second in a function of Ray Tune
        return False


def processes() -> tuple[int, int] | None:
    """Return the number of this process, and how many there are, of those that agree; None = no other."""
    if in_train_function():
        context = sys.modules["ray.train"].get_context()
        return context.get_world_rank(), context.get_world_size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def from_rank_zero(value: _Decided | None) -> _Decided:
    """Return rank 0's value on all ranks, which call this, through Ray Train or torch.distributed."""
    if in_train_function():
        from ray.train.collective import broadcast_from_rank_zero

        # as bytes: the actor that hands it on would import the modules of its class, which takes up to 2 s
        pickled = broadcast_from_rank_zero(cloudpickle.dumps(value))
        return cloudpickle.loads(pickled)
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    (of_first,) = values
    assert of_first is not None
    return of_first
