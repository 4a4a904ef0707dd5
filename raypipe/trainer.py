"""Ray Train's TorchTrainer with two things of a run's own: sizes that divide M, and an end on request."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ReservedResources
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

logger = logging.getLogger(__name__)


class DivisorScalingPolicy(ElasticScalingPolicy):
    """Ray Train's elastic policy, which takes only numbers of workers that can share a step evenly.

    Args:
        scaling_config: with `num_workers` a pair.
        per_step: M.
    """

    def __init__(self, scaling_config: ScalingConfig, per_step: int) -> None:
        super().__init__(scaling_config)
        self._per_step = per_step

    def _count_possible_workers(self, reserved_resources: ReservedResources) -> int:
        return largest_divisor(self._per_step, super()._count_possible_workers(reserved_resources))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number up to a limit; 0 where there is none."""
    return max((d for d in range(1, limit + 1) if number % d == 0), default=0)


class RunTrainer(TorchTrainer):
    """Args: as for TorchTrainer, and

    per_step: M.
    on_interrupt: called at the first Ctrl-C; returns whether the run will end by itself. The next one aborts it.
    """

    def __init__(self, *args: Any, per_step: int, on_interrupt: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._per_step, self._on_interrupt = per_step, on_interrupt

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        config: Any = self.scaling_config  # of Ray Train's version 2, which its type does not say
        if config.elasticity_enabled:
            options["scaling_policy"] = DivisorScalingPolicy(config, self._per_step)
        return super()._initialize_and_run_controller(**options)

    def _register_sigint_handler(self, controller: Any) -> None:
        super()._register_sigint_handler(controller)
        abort = signal.getsignal(signal.SIGINT)

        def interrupted(signum: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, abort)
            if not self._on_interrupt():
                signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, interrupted)
