"""Everything in Ray Data that raypipe replaces: what, why, and until when.

    replaced                              why, and the gain                               until
    create_actor_autoscaler,              a pool grows by what ranks wait for, and asks   Ray Data takes an
    create_cluster_autoscaler             for no nodes; left alone, one that only fills   autoscaler of the user's
                                          its buffer grows, and nodes of every type come  (ray#45331)
    StreamingExecutor.execute, shutdown   mark the calling thread as ours, for the rest   the others have gone
    _StatsManager's four methods          on a local cluster: figures for a dashboard     they can be switched off
                                          that is not there, 6 % of a core
    get_or_create_actor_location_tracker, on a local cluster: an actor that knows which   the same
    get_actor_locations                   node each actor is on; 1.1 s of a core at the
                                          start. Elsewhere: executions outlive its node
    ActorPoolMapOperator._start_actor     holds back a line that Ray's C++ writes of the  the line has a level
                                          first actor
    filters of three loggers              errors are told once, and not with two          Ray Data logs them once
                                          tracebacks before; no lines of progress

Each of them does what Ray's does for executions that are not ours, see `raypipe.rayext.ours`. The first execution
of ours in a process, made here or received from another, puts them in place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.data._internal.execution import streaming_executor
from ray.data._internal.execution.operators import actor_pool_map_operator
from ray.data._internal.stats import _StatsManager

from raypipe.rayext.console import quiet_first_actor
from raypipe.rayext.local import is_local
from raypipe.rayext.ours import KEY, has_settings, is_ours, ours

Replacement = Callable[..., Any]

_installed = False


class _NoMethod:
    """A method of an actor that does nothing."""

    def remote(self, *_: Any) -> None:
        """Do nothing."""


class NoTracker:
    """Stands in for Ray Data's actor that is told on which node each actor of a pool is."""

    update_actor_location = _NoMethod()


class NoAutoscaler:
    """Stands in for Ray Data's autoscaler of a pool; `raypipe.rayext.execution.Turns` scales instead."""

    def try_trigger_scaling(self) -> None:
        """Do nothing."""


def install(make_turns: Callable[[Any, Any], Any]) -> None:
    """Put all of them in place, once in a process.

    Args:
        make_turns: (topology, settings) → what is called at each turn of an execution of ours.
    """
    global _installed
    if _installed:
        return
    _installed = True
    executor: Any = streaming_executor
    operators: Any = actor_pool_map_operator
    executor.create_actor_autoscaler = _by_topology(executor.create_actor_autoscaler, lambda *_: NoAutoscaler())
    executor.create_cluster_autoscaler = _by_topology(executor.create_cluster_autoscaler, make_turns)
    for name in ("execute", "shutdown"):
        setattr(executor.StreamingExecutor, name, _marked(getattr(executor.StreamingExecutor, name)))
    manager: Any = _StatsManager
    _replace(manager, "gen_dataset_id_from_stats_actor", lambda *_: uuid.uuid4().hex, staticmethod)
    for name in ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics"):
        _replace(manager, name, lambda *_, **__: None, staticmethod)
    _replace(operators, "get_or_create_actor_location_tracker", lambda: NoTracker)
    if hasattr(operators, "get_actor_locations"):
        operators.get_actor_locations = _located(operators.get_actor_locations)
    pool_class = operators.ActorPoolMapOperator
    if start := getattr(pool_class, "_start_actor", None):
        pool_class._start_actor = _quiet_start(start)
    logging.getLogger("ray.data._internal.progress").addFilter(_hide_progress)
    logging.getLogger(streaming_executor.__name__).addFilter(_hide_progress)
    for name in ("ray.data.exceptions", "ray.data._internal.execution.streaming_executor_state"):
        logging.getLogger(name).addFilter(_hide_errors)


def _by_topology(rays: Replacement, make: Callable[[Any, Any], Any]) -> Replacement:
    """A function of Ray's that makes something for a topology, and for one of ours `make`."""

    @functools.wraps(rays)
    def chosen(topology: Any, *args: Any, **options: Any) -> Any:
        settings = next(iter(topology)).data_context.get_config(KEY)
        return make(topology, settings) if settings else rays(topology, *args, **options)

    return chosen


def _marked(rays: Replacement) -> Replacement:
    @functools.wraps(rays)
    def method(executor: Any, *args: Any, **options: Any) -> Any:
        if not has_settings(executor._data_context):
            return rays(executor, *args, **options)
        with ours():
            return rays(executor, *args, **options)

    return method


def _replace(
    owner: Any, name: str, made: Replacement, kind: Callable[[Replacement], Any] = lambda function: function
) -> None:
    """Replace a function on local clusters, for executions of ours; one that this Ray has not stays away."""
    rays = getattr(owner, name, None)
    if rays is None:
        return

    @functools.wraps(rays)
    def chosen(*args: Any, **options: Any) -> Any:
        return made(*args, **options) if is_ours() and is_local() else rays(*args, **options)

    setattr(owner, name, kind(chosen))


def _located(rays: Replacement) -> Replacement:
    @functools.wraps(rays)
    def locations(actors: Any) -> Any:
        if not is_ours():
            return rays(actors)
        # Ray pins the actor that knows to a node, and has no other once that is gone.
        with contextlib.suppress(ray.exceptions.RayError):
            return {} if is_local() else rays(actors)
        return {}

    return locations


def _quiet_start(rays: Replacement) -> Replacement:
    @functools.wraps(rays)
    def start(operator: Any, *args: Any, **options: Any) -> Any:
        if not has_settings(operator.data_context):
            return rays(operator, *args, **options)
        with quiet_first_actor():
            return rays(operator, *args, **options)

    return start


def _hide_progress(record: logging.LogRecord) -> bool:
    """Leave out what is no error of an execution of ours."""
    return record.levelno >= logging.ERROR or not is_ours()


def _hide_errors(record: logging.LogRecord) -> bool:
    """Keep errors of ours from the console, as Ray Data's handler of it reads this; its file has them."""
    record.hide = record.levelno >= logging.ERROR and is_ours()
    return True
