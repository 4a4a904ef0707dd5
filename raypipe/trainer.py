"""Ray Train's TorchTrainer with two things of a run's own: sizes that divide M, and an end on request."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ReservedResources
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

from raypipe.cluster import largest_divisor, started_here


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


class RunTrainer(TorchTrainer):
    """A TorchTrainer of one run.

    Args:
        per_step: M.
        on_interrupt: asks the run to end by itself; called at the first Ctrl-C or SIGTERM. The second one aborts
            the run.
        args, options: for TorchTrainer.
    """

    def __init__(self, *args: Any, per_step: int, on_interrupt: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._per_step, self._on_interrupt = per_step, on_interrupt

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        config: Any = self.scaling_config  # of Ray Train's version 2, which its type does not say
        if config.elasticity_enabled:
            options["scaling_policy"] = DivisorScalingPolicy(config, self._per_step)
        return super()._initialize_and_run_controller(**options)

    def _create_default_callbacks(self) -> list[Any]:
        # Each would start an actor. One hands out datasets, and a run has none of Ray Train's.
        needless: tuple[type, ...] = () if self.datasets else (DatasetsCallback,)
        if started_here():
            # One frees the trainers' resources when this process has died: the cluster dies with it. And it would
            # ask a dashboard that is not there, ten times a second.
            needless += (PlacementGroupCleanerCallback,)
        return [each for each in super()._create_default_callbacks() if not isinstance(each, needless)]

    def _register_sigint_handler(self, controller: Any) -> None:
        super()._register_sigint_handler(controller)
        aborts = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

        def interrupted(signum: int, frame: Any) -> None:
            for each, abort in aborts.items():
                signal.signal(each, abort)
            self._on_interrupt()

        for signum in aborts:
            signal.signal(signum, interrupted)
