"""Runs of Ray Train that use a raypipe loader: changes in their controller, and in no other run's.

A train function that opens a stream or asks for a loader makes its run one of raypipe's, by a call to the run's
controller. The controller of each run of Ray Train is an actor in a separate process, so the changes end with it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray._private import state
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.train.v2.api.exceptions import ControllerError

from raypipe.errors import ResourceError
from raypipe.rayext.controller import introduce, own_controller
from raypipe.rayext.failures import is_final, own_error

logger = logging.getLogger(__name__)

HEALTH_CHECK_INTERVAL_S = 0.5
"""Interval in which a controller checks its workers, unless RAY_TRAIN_HEALTH_CHECK_INTERVAL_S is set.

With Ray's default of 2 s, it would notice a death late, and lose a checkpoint that was reported in that time.
"""

# Interval in which a controller looks for preemption notices; Ray's default is 5 s.
_NOTICE_INTERVAL_S = 1.0
# Ray's name of its variable; releases before 2.60 have no notices.
_NOTICE_INTERVAL = "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"

# A controller answers within milliseconds; one that is stopped must not hold a trainer.
_ANSWER_S = 10.0

# Two loggers of a controller are silenced: on a busy machine, the first warns about retried requests, with a
# traceback, and the second about each trainer that has died. raypipe logs what a run waits for.
_SILENCED = (
    "execution.scaling_policy.autoscaling_coordinator_client",
    "callbacks.backend_setup",
)


class FinalErrors(WorkerGroupCallback):
    """Callback that ends a run of Ray Train at a final error of raypipe, and recognizes preemptions.

    A death after a notice counts as a preemption. Errors of other code are retried according to `FailureConfig`.
    """

    def __init__(self) -> None:
        self._has_failed = False
        self._notice: Any = None  # the current trainers' last notice

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._notice = None

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        failures = list(worker_group_status.errors.values())
        error = own_error(failures)
        # Resources that were lost with a node during the run may come back.
        if error and not (self._has_failed and isinstance(error, ResourceError)):
            raise ControllerError(error)  # Ray Train does not retry this error
        self._has_failed |= bool(failures)
        if not hasattr(worker_group_status, "get_preemption_info"):  # before Ray 2.60
            return
        self._notice = worker_group_status.get_preemption_info() or self._notice
        # Ray recognizes a preempted node only by the deadline of its notice. A node that goes earlier, or a
        # trainer that first reports its lost peer, would count against `max_failures`.
        if (
            failures
            and self._notice
            and not is_final(failures)
            and not worker_group_status.has_preempted_worker()
        ):
            from ray.train.v2.api.exceptions import PreemptionError

            raise PreemptionError(self._notice)


def join_run_of_trainer() -> None:
    """Make the run of the calling trainer one of raypipe's; do nothing elsewhere."""
    if controller := own_controller():
        try:
            ray.get(join_run(controller), timeout=_ANSWER_S)
        except ray.exceptions.RayError:
            logger.warning("Ray Train's controller does not answer", exc_info=True)


def join_run(controller: Any) -> Any:
    """Make the run of a controller one of raypipe's; returns a reference to the call's end."""
    return controller.__ray_call__.remote(adapt)


def adapt(controller: Any) -> None:
    """Adapt the calling process, a controller of Ray Train, to raypipe; any further call does nothing.

    Args:
        controller: Ray Train's object, of the actor's class.
    """
    run_callbacks: list[Any] = controller._worker_group_callbacks_to_propagate
    if any(isinstance(callback, FinalErrors) for callback in run_callbacks):
        return
    introduce()
    for name in _SILENCED:
        # A filter, since Ray Train resets the levels of its loggers when a run begins.
        logging.getLogger(f"ray.train.v2._internal.{name}").addFilter(_is_error)
    if constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR not in os.environ:
        controller._health_check_interval_s = HEALTH_CHECK_INTERVAL_S
    for callback in run_callbacks:
        if hasattr(callback, "_watcher") and _NOTICE_INTERVAL not in os.environ:
            _watch_often(callback)
        if is_cleaner(callback) and callback._cleaner:
            callback._cleaner.__ray_call__.remote(_ask_head)
            if controller._worker_group:
                callback.after_worker_group_start(controller._worker_group)
    errors = FinalErrors()
    run_callbacks.append(errors)
    if controller._worker_group:  # the trainers have started
        controller._worker_group._callbacks.append(errors)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _watch_often(callback: Any) -> None:
    """Let Ray Train's watcher of preempted nodes look more often: the running one, and those of later trainers."""
    callback._poll_interval_s = _NOTICE_INTERVAL_S
    if callback._watcher:
        callback._watcher.__ray_call__.remote(_look_often)


def _look_often(watcher: Any) -> None:
    watcher._poll_interval_s = _NOTICE_INTERVAL_S


def is_cleaner(callback: Any) -> bool:
    """Return whether a callback starts an actor that frees the resources of a dead controller."""
    return isinstance(callback, placement_group_callback.PlacementGroupCleanerCallback)


def _ask_head(cleaner: Any) -> None:
    """Let Ray Train's cleaner ask the head whether the controller lives, in the cleaner's process.

    It asks the dashboard, which a local cluster lacks. Its thread waits for that, or dies where it finds two.
    """
    vars(placement_group_cleaner)["is_actor_alive"] = _is_alive
    cleaner._check_interval_s = HEALTH_CHECK_INTERVAL_S
    cleaner._monitor_thread = None
    cleaner.start_monitoring()


def _is_alive(actor_id: str, timeout: float) -> bool:
    return state.actors(actor_id).get("State") != "DEAD"
