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
from types import SimpleNamespace
from typing import Any

import ray
from ray.data._internal.execution import streaming_executor
from ray.data._internal.execution.operators import actor_pool_map_operator
from ray.data._internal.stats import _StatsManager

from raypipe.rayext.cluster import is_local
from raypipe.rayext.ours import KEY, has_settings, is_ours, ours

Function = Callable[..., Any]

_installed = False


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, instead of work that our executions do not need."""


# In place of Ray Data's autoscaler of a pool, which `execution.StreamAutoscaler` sizes, and of its actor that is
# told on which node each actor of a pool is.
_NO_AUTOSCALER = SimpleNamespace(try_trigger_scaling=nothing)
_NO_TRACKER = SimpleNamespace(update_actor_location=SimpleNamespace(remote=nothing))


def install(make_autoscaler: Callable[[Any, Any], Any]) -> None:
    """Put all of them in place, once in a process.

    Args:
        make_autoscaler: (topology, settings) → what is called at each turn of an execution of ours.
    """
    global _installed
    if _installed:
        return
    _installed = True
    executor, operators, stats = streaming_executor, actor_pool_map_operator, _StatsManager
    _replace(executor, "create_actor_autoscaler", _by_topology, lambda *_: _NO_AUTOSCALER)
    _replace(executor, "create_cluster_autoscaler", _by_topology, make_autoscaler)
    for name in ("execute", "shutdown"):
        _replace(executor.StreamingExecutor, name, _as_ours)
    for name in ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics"):
        _replace(stats, name, _unless_local, nothing)
    _replace(stats, "gen_dataset_id_from_stats_actor", _unless_local, lambda: uuid.uuid4().hex)
    _replace(operators, "get_or_create_actor_location_tracker", _unless_local, lambda: _NO_TRACKER)
    _replace(operators, "get_actor_locations", _unless_lost)
    for name in ("ray.data._internal.progress", streaming_executor.__name__):
        logging.getLogger(name).addFilter(_hide_progress)
    for name in ("ray.data.exceptions", "ray.data._internal.execution.streaming_executor_state"):
        logging.getLogger(name).addFilter(_hide_errors)


def _replace(owner: Any, name: str, wrap: Callable[..., Function], *args: Any) -> None:
    """Put a function of Ray's into a wrapper; one that this release of Ray does not have stays away."""
    if function := getattr(owner, name, None):
        setattr(owner, name, wrap(function, *args))


def _by_topology(function: Function, make: Callable[[Any, Any], Any]) -> Function:
    """A function of Ray's that makes something for a topology, and for one of ours `make`."""

    @functools.wraps(function)
    def chosen(topology: Any, *args: Any, **options: Any) -> Any:
        settings = next(iter(topology)).data_context.get_config(KEY)
        return make(topology, settings) if settings else function(topology, *args, **options)

    return chosen


def _as_ours(method: Function) -> Function:
    """A method of Ray Data's executor, which marks the thread for an execution of ours."""

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **options: Any) -> Any:
        with ours() if has_settings(self._data_context) else contextlib.nullcontext():
            return method(self, *args, **options)

    return marked


def _unless_local(function: Function, local: Function) -> Function:
    """A function of Ray's, and for executions of ours on a local cluster `local`."""

    @functools.wraps(function)
    def chosen(*args: Any, **options: Any) -> Any:
        return (local if is_ours() and is_local() else function)(*args, **options)

    return chosen


def _unless_lost(function: Function) -> Function:
    """Ray Data's function of where actors are, which for executions of ours may know of none."""

    @functools.wraps(function)
    def locations(actors: Any) -> Any:
        if not is_ours():
            return function(actors)
        # Ray pins the actor that knows to a node, and has no other once that is gone.
        with contextlib.suppress(ray.exceptions.RayError):
            return {} if is_local() else function(actors)
        return {}

    return locations


def _hide_progress(record: logging.LogRecord) -> bool:
    """Leave out what is no error of an execution of ours."""
    return record.levelno >= logging.ERROR or not is_ours()


def _hide_errors(record: logging.LogRecord) -> bool:
    """Keep errors of ours from the console, as Ray Data's handler of it reads this; its file has them."""
    record.hide = record.levelno >= logging.ERROR and is_ours()
    return True
