"""Ray Train's TorchTrainer with what is a run's own: sizes that divide M, an end on request, or at an error that
would come again, and no endless or silent wait.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train.v2._internal.callbacks import datasets, placement_group_callback
from ray.train.v2._internal.execution import failure_handling, scaling_policy, train_fn_utils
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.train.v2.torch.torch_trainer import TorchTrainer

from raypipe.errors import ResourceError
from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.records import append_fault
from raypipe.rayext.allocation import largest_divisor, worker_resources
from raypipe.rayext.cluster import started_here
from raypipe.rayext.failures import explanation, is_final, is_lost, own_error

logger = logging.getLogger(__name__)

# In its controller, which has the policies below: on a busy machine the first warns, with a traceback, of requests
# that it makes again, and the second of each trainer that has died. What a run waits for is told by the policies.
for _name in ("execution.scaling_policy.autoscaling_coordinator_client", "callbacks.backend_setup"):
    logging.getLogger(f"ray.train.v2._internal.{_name}").setLevel(logging.ERROR)

# Trainers that have room are there at once. Ray Train looks again for room after so long (cluster.py sets it).
_TOLD_AFTER_S = 8.0

# What Ray takes to kill a process at most, before this one goes without waiting for it.
_KILL_S = 1.5

# Ray 2.54 has none, which cluster.check_elastic says.
_Elastic: Any = getattr(scaling_policy, "ElasticScalingPolicy", scaling_policy.FixedScalingPolicy)


def _is_elastic(config: Any) -> bool:
    return getattr(config, "elasticity_enabled", False)


def train_alone(name: str) -> None:
    """Let functions of `ray.train` work in this process, which is no worker of Ray Train's, as its only rank."""
    train_fn_utils.set_train_fn_utils(train_fn_utils.LocalTrainFnUtils(name))


class BoundedScalingPolicy(scaling_policy.ScalingPolicy):
    """One of Ray Train's policies below, which says so, once, when trainers wait for room.

    A run whose trainers have had none for `timeout_s` ends.
    """

    def __init__(self, scaling_config: ScalingConfig, timeout_s: float) -> None:
        super().__init__(scaling_config)
        self._timeout_s = timeout_s
        self._since: float | None = None
        self._has_told = False

    def make_decision_for_non_running_worker_group(self) -> scaling_policy.ScalingDecision:
        self._since = self._since or time.monotonic()
        waited_s = time.monotonic() - self._since
        if waited_s > self._timeout_s:
            raise ResourceError(self._waiting(f"have had no room for {self._timeout_s:g} s"))
        if waited_s > _TOLD_AFTER_S and not self._has_told:
            self._has_told = True
            logger.warning(self._waiting(f"have no room; the run ends in {self._timeout_s - waited_s:.0f} s"))
        return super().make_decision_for_non_running_worker_group()  # type: ignore[safe-super]

    def make_decision_for_running_worker_group(self, *args: Any, **options: Any) -> scaling_policy.ScalingDecision:
        self._since, self._has_told = None, False
        return super().make_decision_for_running_worker_group(*args, **options)  # type: ignore[safe-super]

    def _waiting(self, what: str) -> str:
        """What is with the trainers, and what to do."""
        config: Any = self.scaling_config
        workers = config.min_workers if _is_elastic(config) else config.num_workers
        share = " and ".join(f"{n:g} {kind}" for kind, n in worker_resources(config).items() if n)
        return (
            f"{workers} trainers of {share} each {what} (pool.stall_timeout_s). Add nodes, or stop other jobs "
            "(`ray job list`)"
        )


class FixedPolicy(BoundedScalingPolicy, scaling_policy.FixedScalingPolicy):
    """Always as many workers."""


class DivisorScalingPolicy(BoundedScalingPolicy, _Elastic):
    """Ray Train's elastic policy, which takes only numbers of workers that can share the M of a step evenly."""

    def __init__(self, scaling_config: ScalingConfig, timeout_s: float, per_step: int) -> None:
        super().__init__(scaling_config, timeout_s)
        self._per_step = per_step

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        return largest_divisor(self._per_step, super()._count_possible_workers(reserved_resources))


def _reason(error: TrainingFailedError) -> str:
    """Why trainers are started again, as a label: preempted, died, no_start."""
    failures = [error, *getattr(error, "worker_failures", {}).values()]
    # Ray 2.54 to 2.59 have no PreemptionError.
    if any(type(e).__name__ == "PreemptionError" or getattr(e, "preempted", False) for e in failures):
        return "preempted"
    return "died" if isinstance(error, WorkerGroupError) else "no_start"


# What Ray says of an actor that has died: its process, its node, and why.
_DEAD_ACTOR = re.compile(r"\w+: The actor died .* pid: (\d+) .* ip: (\S+) The actor is dead because (?:its )?(.*)")


def who_died(error: BaseException) -> str:
    """Tell why trainers are started again: which have died, and not those that failed because of these."""
    if info := getattr(error, "preemption_info", None):
        nodes = ", ".join(node[:8] for node in info.preempted_node_ids)
        return f"the node of {_trainers(info.preempted_ranks)} was taken away ({nodes})"
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    lost = {rank: failure for rank, failure in failures.items() if is_lost(failure)}
    if lost:
        why = _DEAD_ACTOR.sub(r"process \1 on \2, \3", explanation(lost[min(lost)]))
        return f"{_trainers(sorted(lost))} died: {why}"
    return f"{_trainers(sorted(failures))} failed: {explanation(error)}" if failures else explanation(error)


def _trainers(ranks: list[int]) -> str:
    return f"trainer{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class OnlyDeathsPolicy(failure_handling.DefaultFailurePolicy):
    """Ray Train's failure policy, which tries again what died, and nothing else; records and counts that.

    Args:
        failure_config: Ray Train's.
        run: the run's name, for the count.
        run_uri: its folder; empty = it has none.
    """

    def __init__(self, failure_config: Any, run: str, run_uri: str = "") -> None:
        super().__init__(failure_config)
        self._run, self._run_uri = run, run_uri

    def make_decision(self, training_failed_error: TrainingFailedError) -> failure_handling.FailureDecision:
        error = training_failed_error
        if isinstance(error, WorkerGroupError) and is_final(error.worker_failures.values()):
            return failure_handling.FailureDecision.RAISE
        decision = super().make_decision(error)
        if decision != failure_handling.FailureDecision.RAISE:  # else it is told once the run has ended
            text, reason = f"the trainers are started again: {who_died(error)}", _reason(error)
            logger.warning("%s", text, extra={"values": {"fault": reason}})
            Recorder(self._run).add({"trainer_restarts_total": 1}, reason=reason)
            if self._run_uri:
                append_fault(self._run_uri, text, reason)
        return decision


class FinalErrors(WorkerGroupCallback):
    """Ends any run of Ray Train's at an error of raypipe's own that would come again; what dies after a notice
    counts as preempted.

    `raypipe` names it in RAY_TRAIN_CALLBACKS, from which each `fit` makes one; it works in Ray Train's controller.
    Errors of other code are retried as `FailureConfig` says.
    """

    def __init__(self) -> None:
        self._has_failed = False
        self._notice: Any = None  # of the trainers of now

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._notice = None

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        failures = list(worker_group_status.errors.values())
        error = own_error(failures)
        # Resources that went away with a node during the run may come back.
        if error and not (self._has_failed and isinstance(error, ResourceError)):
            raise ControllerError(error)  # which Ray Train does not retry
        self._has_failed |= bool(failures)
        if not hasattr(worker_group_status, "get_preemption_info"):  # before Ray 2.60
            return
        self._notice = worker_group_status.get_preemption_info() or self._notice
        # Ray knows a node that was taken away by the end that it gave notice of. To a node that goes earlier, or a
        # trainer that has lost its peer and says so first, it would take `max_failures`.
        if failures and self._notice and not is_final(failures) and not worker_group_status.has_preempted_worker():
            from ray.train.v2.api.exceptions import PreemptionError

            raise PreemptionError(self._notice)


class _Logs(ControllerCallback):
    """Sets the format of the lines of Ray Train's controller."""

    def __init__(self, log_format: LogFormat, run: str) -> None:
        self._log_format, self._run = log_format, run

    def after_controller_start(self, train_run_context: Any) -> None:
        configure_logs(self._log_format, run=self._run)


class RunTrainer(TorchTrainer):
    """A TorchTrainer of one run.

    Args:
        per_step: M.
        run_uri: its folder; empty = it has none.
        log_format: format of its log lines.
        timeout_s: after which a run whose trainers have no room ends.
        take_signals: called once the run can be asked to end, since Ray Train would take Ctrl-C for itself.
        args, options: for TorchTrainer.
    """

    def __init__(
        self,
        *args: Any,
        per_step: int,
        run_uri: str = "",
        log_format: LogFormat = "text",
        timeout_s: float,
        take_signals: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._per_step, self._timeout_s, self._take_signals = per_step, timeout_s, take_signals
        self._run_uri, self._log_format, self._run = run_uri, log_format, self.run_config.name or ""
        self._controller: Any = None

    def fit(self) -> Any:
        try:
            return super().fit()
        finally:
            # After an interrupt, in a process that goes on, such as a notebook's, the run would go on as well. And
            # at its end a controller may stay: one that leaves by itself locks up in Ray 2.60's Publisher, in half
            # of all runs, and outlives its cluster.
            if self._controller:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(self._controller)  # with it go the trainers
                    ray.get(self._controller.get_state.remote(), timeout=_KILL_S)

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        config: Any = self.scaling_config  # of Ray Train's version 2, which its type does not say
        options["scaling_policy"] = (
            DivisorScalingPolicy(config, self._timeout_s, self._per_step)
            if _is_elastic(config)
            else FixedPolicy(config, self._timeout_s)
        )
        options["failure_policy"] = OnlyDeathsPolicy(self.run_config.failure_config, self._run, self._run_uri)
        return super()._initialize_and_run_controller(**options)

    def _create_default_callbacks(self) -> list[Any]:
        # Each would start an actor. One hands out datasets, and a run has none of Ray Train's. One frees the
        # trainers' resources when this process has died: a local cluster dies with it, and has no dashboard, which
        # it would ask ten times a second.
        needless: tuple[Any, ...] = (datasets.DatasetsCallback,)
        if started_here():
            needless += (placement_group_callback.PlacementGroupCleanerCallback,)
        callbacks = [new for new in super()._create_default_callbacks() if not isinstance(new, needless)]
        return [*callbacks, _Logs(self._log_format, self._run)]

    def _register_sigint_handler(self, controller: Any) -> None:
        self._controller = controller
        self._take_signals()
