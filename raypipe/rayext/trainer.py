"""Ray Train's TorchTrainer with policies for a run: sizes that divide M, an end on request and at final errors,
and bounded waits with log lines.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train.v2._internal import execution
from ray.train.v2._internal.callbacks import datasets
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution import (
    failure_handling,
    scaling_policy,
    train_fn_utils,
)
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2.api import config as ray_config
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.train.v2.torch.torch_trainer import TorchTrainer

from raypipe.errors import NoRoomError
from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.records import append_fault, record_wait
from raypipe.rayext.allocation import largest_divisor, worker_resources
from raypipe.rayext.cluster_state import is_local
from raypipe.rayext.controller import (
    DriverWatch,
    free_resources_of,
    wait_for_trainers,
)
from raypipe.rayext.failures import deaths, explanation, is_final, is_lost
from raypipe.rayext.head import is_head_lost
from raypipe.rayext.ray_private import Function, replace
from raypipe.rayext.train_runs import is_cleaner, join_run

logger = logging.getLogger(__name__)

# Trainers with resources start at once, so a longer wait is logged. It must be below the timeout in cluster.py,
# after which Ray Train tries again.
_LOG_AFTER_S = 8.0

# Longest wait for Ray to kill a process.
_KILL_S = 1.5
_KILL_PERIOD_S = 0.05


def train_alone(name: str) -> None:
    """Make the functions of `ray.train` work in this process, outside Ray Train, as the only rank."""
    train_fn_utils.set_train_fn_utils(train_fn_utils.LocalTrainFnUtils(name))


class BoundedScalingPolicy(scaling_policy.ScalingPolicy):
    """Base of Ray Train's policies below: logs once when trainers wait for resources.

    A run whose trainers have had no resources for `timeout_s` ends.

    Args:
        run: the run's name, for the metric of the wait; empty = none.
        run_uri: the run's folder, for its status; empty = none.
    """

    def __init__(
        self,
        scaling_config: ray_config.ScalingConfig,
        timeout_s: float,
        run: str = "",
        run_uri: str = "",
    ) -> None:
        super().__init__(scaling_config)
        self._timeout_s = timeout_s
        self._run = run
        self._run_uri = run_uri
        self._since: float | None = None
        self._has_logged = False

    def make_decision_for_non_running_worker_group(
        self,
    ) -> scaling_policy.ScalingDecision:
        self._since = self._since or time.monotonic()
        waited_s = time.monotonic() - self._since
        if self._run:
            Recorder(self._run).set({"trainer_room_wait_seconds": waited_s})
        if waited_s > self._timeout_s:
            raise NoRoomError(
                self._waiting(f"have had no room for {self._timeout_s:g} s")
            )
        if waited_s > _LOG_AFTER_S:
            left_s = self._timeout_s - waited_s
            text = self._waiting(f"have no room; the run ends in {left_s:.0f} s")
            if not self._has_logged:
                self._has_logged = True
                logger.warning(text)
            if self._run_uri:
                record_wait(self._run_uri, text, time.time() - waited_s)
        return super().make_decision_for_non_running_worker_group()  # type: ignore[safe-super]

    def make_decision_for_running_worker_group(
        self, *args: Any, **options: Any
    ) -> scaling_policy.ScalingDecision:
        self._since = None
        self._has_logged = False
        return super().make_decision_for_running_worker_group(*args, **options)  # type: ignore[safe-super]

    def _waiting(self, state: str) -> str:
        """Return the message about waiting trainers: their needs, their state, and a remedy."""
        config: Any = self.scaling_config
        if config.elasticity_enabled:
            workers = config.min_workers
        else:
            workers = config.num_workers
        share = " and ".join(
            f"{n:g} {kind}" for kind, n in worker_resources(config).items() if n
        )
        return (
            f"{workers} trainers of {share} each {state} (pool.stall_timeout_s). Add nodes, or stop other jobs "
            "(`ray job list`)"
        )


class FixedPolicy(BoundedScalingPolicy, scaling_policy.FixedScalingPolicy):
    """Ray Train's policy of a fixed number of workers."""


class DivisorScalingPolicy(BoundedScalingPolicy, scaling_policy.ElasticScalingPolicy):
    """Ray Train's elastic policy, limited to numbers of workers that divide the M micro-batches of a step."""

    def __init__(
        self,
        scaling_config: ray_config.ScalingConfig,
        timeout_s: float,
        per_step: int,
        run: str = "",
        run_uri: str = "",
    ) -> None:
        super().__init__(scaling_config, timeout_s, run, run_uri)
        self._per_step = per_step

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        return largest_divisor(
            self._per_step, super()._count_possible_workers(reserved_resources)
        )


def use_divisors(scaling_config: Any, timeout_s: float, per_step: int) -> None:
    """Let a user's elastic TorchTrainer with this configuration run on numbers of workers that divide M.

    Args:
        timeout_s: longest wait of its trainers for resources, after which the run ends.
        per_step: M.
    """
    scaling_config.raypipe_divides = (timeout_s, per_step)
    _install_divisors()


@functools.cache  # once per process
def _install_divisors() -> None:
    replace(
        "ray.train.v2.api.data_parallel_trainer.create_scaling_policy",
        _dividing,
        loss="an elastic trainer of your own ends at a number of workers that does not divide M",
    )


def _dividing(create: Function) -> Function:
    def policy(scaling_config: Any) -> scaling_policy.ScalingPolicy:
        limits = getattr(scaling_config, "raypipe_divides", None)
        if limits:
            return DivisorScalingPolicy(scaling_config, *limits)
        return create(scaling_config)

    return policy


def _reason(error: TrainingFailedError) -> str:
    """Return the reason of a restart as a label: preempted, died, no_start."""
    failures = [error, *getattr(error, "worker_failures", {}).values()]
    # Ray 2.56 to 2.59 have no PreemptionError.
    if any(
        type(e).__name__ == "PreemptionError" or getattr(e, "preempted", False)
        for e in failures
    ):
        return "preempted"
    return "died" if isinstance(error, WorkerGroupError) else "no_start"


# Ray's message about a dead actor: its process, its node, and the reason.
_DEAD_ACTOR = re.compile(
    r"\w+: The actor died .* pid: (\d+) .* ip: (\S+) The actor is dead because (?:its )?(.*)"
)


def who_died(error: BaseException) -> str:
    """Describe the cause of a restart: the trainers that died, without those that failed as a consequence."""
    if info := getattr(error, "preemption_info", None):
        nodes = ", ".join(node[:8] for node in info.preempted_node_ids)
        return f"the node of {_trainers(info.preempted_ranks)} was preempted ({nodes})"
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    lost = {rank: failure for rank, failure in failures.items() if is_lost(failure)}
    if lost:
        cause = _DEAD_ACTOR.sub(r"process \1 on \2, \3", explanation(lost[min(lost)]))
        return f"{_trainers(sorted(lost))} died: {cause}"
    if failures:
        return f"{_trainers(sorted(failures))} failed: {explanation(error)}"
    return explanation(error)


def _trainers(ranks: list[int]) -> str:
    return f"trainer{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class OnlyDeathsPolicy(failure_handling.DefaultFailurePolicy):
    """Ray Train's failure policy, limited to restarts after deaths, which it records and counts.

    Trainers that wait for nodes have not died: they are tried again without a word.

    Args:
        failure_config: Ray Train's FailureConfig.
        run: the run's name, for the count.
        run_uri: the run's folder; empty = none.
    """

    def __init__(self, failure_config: Any, run: str, run_uri: str = "") -> None:
        super().__init__(failure_config)
        self._run = run
        self._run_uri = run_uri

    def make_decision(
        self, training_failed_error: TrainingFailedError
    ) -> failure_handling.FailureDecision:
        error = training_failed_error
        if isinstance(error, WorkerGroupError) and is_final(
            error.worker_failures.values()
        ):
            return failure_handling.FailureDecision.RAISE
        decision = super().make_decision(error)
        is_wait = isinstance(
            getattr(error, "controller_failure", None), WorkerGroupStartupTimeoutError
        )
        if decision != failure_handling.FailureDecision.RAISE and not is_wait:
            # otherwise the error is logged when the run ends
            text = f"restarting the trainers: {who_died(error)}"
            reason = _reason(error)
            logger.warning("%s", text, extra={"values": {"fault": reason}})
            Recorder(self._run).add({"trainer_restarts_total": 1}, reason=reason)
            if self._run_uri:
                append_fault(self._run_uri, text, reason)
        return decision


class _Setup(ControllerCallback):
    """Callback that sets up the log of Ray Train's controller."""

    def __init__(self, log_format: LogFormat, run: str) -> None:
        self._log_format = log_format
        self._run = run

    def after_controller_start(self, train_run_context: Any) -> None:
        configure_logs(self._log_format, run=self._run)
        # Ray Train logs a traceback every 10 s while trainers wait for nodes.
        logging.getLogger(f"{execution.__name__}.controller.controller").addFilter(
            lambda record: (
                not isinstance(
                    (record.exc_info or (None, None))[1], WorkerGroupStartupTimeoutError
                )
            )
        )


class RunTrainer(TorchTrainer):
    """TorchTrainer of a run.

    Args:
        per_step: M.
        run_uri: the run's folder; empty = none.
        log_format: format of log lines.
        timeout_s: longest wait of trainers for resources, after which the run ends.
        take_signals: called once the run can be stopped; replaces Ray Train's own handler of Ctrl-C.
        give_up: called with the reason if the run must end although Ray does not answer.
        args, options: arguments of TorchTrainer.
    """

    def __init__(
        self,
        *args: Any,
        per_step: int,
        run_uri: str = "",
        log_format: LogFormat = "text",
        timeout_s: float,
        take_signals: Callable[[], None],
        give_up: Callable[[str], None] = lambda reason: None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._per_step = per_step
        self._timeout_s = timeout_s
        self._take_signals = take_signals
        self._run_uri = run_uri
        self._log_format = log_format
        self._run = self.run_config.name or ""
        self._give_up = give_up
        self._controller: Any = None
        self._watch: DriverWatch | None = None

    def fit(self) -> Any:
        """Train; if Ray Train's controller dies, begin again from the last checkpoint, `max_failures` times."""
        failures = self.run_config.failure_config
        max_failures = failures.max_failures if failures else 0
        for num_deaths in itertools.count(1):
            try:
                return self._fit()
            # Ray Train raises its own errors for trainers.
            except deaths() as error:
                if (
                    0 <= max_failures < num_deaths
                    or is_head_lost()
                    or not wait_for_trainers()
                ):
                    raise
                cause = _DEAD_ACTOR.sub(r"process \1 on \2, \3", explanation(error))
                text = f"restarting the trainers: Ray Train's controller died: {cause}"
                logger.warning("%s", text, extra={"values": {"fault": "died"}})
                Recorder(self._run).add({"trainer_restarts_total": 1}, reason="died")
                self._record(text)
        raise AssertionError("the loop above has no end")

    def _record(self, text: str) -> None:
        if self._run_uri:
            append_fault(self._run_uri, text, "died")

    def _fit(self) -> Any:
        try:
            return super().fit()
        finally:
            is_silent = self._watch is not None and self._watch.is_head_silent()
            if self._watch:
                self._watch.stop()
            # After an interrupt in a process that stays, such as a notebook's, the run would continue. Even at a
            # normal end the controller must be killed: in half of all runs, one that exits by itself deadlocks in
            # Ray 2.60's Publisher, and outlives its cluster.
            if self._controller and not is_silent:
                _kill(self._controller)
                with contextlib.suppress(Exception):  # must not hide the run's error
                    free_resources_of(self._controller)

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        config: Any = self.scaling_config  # version 2's class, unlike its annotation
        options["scaling_policy"] = (
            DivisorScalingPolicy(
                config, self._timeout_s, self._per_step, self._run, self._run_uri
            )
            if config.elasticity_enabled
            else FixedPolicy(config, self._timeout_s, self._run, self._run_uri)
        )
        options["failure_policy"] = OnlyDeathsPolicy(
            self.run_config.failure_config, self._run, self._run_uri
        )
        return super()._initialize_and_run_controller(**options)

    def _create_default_callbacks(self) -> list[Any]:
        # Two of Ray Train's callbacks start actors: one distributes datasets, which a run does not have; the other
        # frees what a dead controller has reserved, which ends with a local cluster.
        callbacks = [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, datasets.DatasetsCallback)
            and not (is_local() and is_cleaner(callback))
        ]
        return [*callbacks, _Setup(self._log_format, self._run)]

    def _register_sigint_handler(self, controller: Any) -> None:
        self._controller = controller
        join_run(controller)  # before the trainers start
        self._watch = DriverWatch(
            controller, self._timeout_s, self._give_up, self._record
        )
        self._watch.start()
        self._take_signals()


def _kill(controller: Any) -> None:
    """Kill a controller, and its trainers with it; return once it is dead, or after a limit."""
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(controller)
        # Ray kills asynchronously: until then the controller still answers.
        while time.monotonic() < deadline:
            ray.get(controller.get_state.remote(), timeout=_KILL_S)
            time.sleep(_KILL_PERIOD_S)
