"""Patches of Ray Data: the functions that raypipe replaces, why, and until when.

    replaced                              reason and gain                                 until
    create_actor_autoscaler,              a pool grows with the ranks' waits, and asks    Ray Data accepts an
    create_cluster_autoscaler             for no nodes; Ray's grows if it only fills its  autoscaler from its user
                                          buffer, and adds nodes of every type            (ray#45331)
    StreamingExecutor.execute, shutdown   mark the calling thread as ours, for the rest   the others are gone
    StreamingExecutor.execute             fetches blocks' metadata in its own thread:     Ray Data's thread for it
                                          a second one costs the core that runs an        costs nothing
                                          execution a third more (Ray 2.57 and later)
    _StatsManager's four methods          on a local cluster: numbers for a dashboard     they can be switched off
                                          that does not run, 6% of a core
    get_or_create_actor_location_tracker, on a local cluster: an actor that tracks the    the same
    get_actor_locations                   node of each actor; 1.1 s of a core at the
                                          start. Elsewhere: executions outlive its node
    filters of three loggers              errors appear once, without two tracebacks      Ray Data logs them once
                                          before them; no lines of progress
    ray.shutdown                          ends open streams first: the threads of Ray     Ray Data ends its own
                                          Data would start a new cluster, or end the
                                          process with exit code 1

Each patch calls Ray's original for executions that are not raypipe's, see `raypipe.rayext.ours`. The first of
raypipe's executions in a process, made there or received from another process, installs the patches; the first
open stream installs the last one.
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
from raypipe.rayext.ours import KEY, is_ours, ours, settings_of

Function = Callable[..., Any]

_installed = False


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing; replaces functions that raypipe's executions do not need."""


# Replacements of Ray Data's autoscaler of a pool, since `execution.StreamAutoscaler` sizes it, and of its actor
# that tracks the nodes of a pool's actors.
_NO_AUTOSCALER = SimpleNamespace(try_trigger_scaling=nothing)
_NO_TRACKER = SimpleNamespace(update_actor_location=SimpleNamespace(remote=nothing))


def install(make_autoscaler: Callable[[Any, Any], Any]) -> None:
    """Install all patches, once per process.

    Args:
        make_autoscaler: (topology, settings) → autoscaler, which one of raypipe's executions calls at each turn.
    """
    global _installed
    if _installed:
        return
    _installed = True
    executor = streaming_executor
    operators = actor_pool_map_operator
    stats = _StatsManager
    _replace(
        executor, "create_actor_autoscaler", _by_topology, lambda *_: _NO_AUTOSCALER
    )
    _replace(executor, "create_cluster_autoscaler", _by_topology, make_autoscaler)
    _replace(executor.StreamingExecutor, "execute", _without_metadata_thread)
    for name in ("execute", "shutdown"):
        _replace(executor.StreamingExecutor, name, _as_ours)
    for name in (
        "register_dataset_to_stats_actor",
        "update_execution_metrics",
        "update_iteration_metrics",
    ):
        _replace(stats, name, _unless_local, nothing)
    _replace(
        stats,
        "gen_dataset_id_from_stats_actor",
        _unless_local,
        lambda: uuid.uuid4().hex,
    )
    _replace(
        operators,
        "get_or_create_actor_location_tracker",
        _unless_local,
        lambda: _NO_TRACKER,
    )
    _replace(operators, "get_actor_locations", _unless_lost)
    for name in ("ray.data._internal.progress", streaming_executor.__name__):
        logging.getLogger(name).addFilter(_hide_progress)
    for name in (
        "ray.data.exceptions",
        "ray.data._internal.execution.streaming_executor_state",
    ):
        logging.getLogger(name).addFilter(_hide_errors)


@functools.cache  # once for each function
def before_shutdown(call: Callable[[], None]) -> None:
    """Call a function at the beginning of every `ray.shutdown` in this process, a user's included."""
    _replace(ray, "shutdown", _preceded, call)


def _replace(owner: Any, name: str, wrap: Callable[..., Function], *args: Any) -> None:
    """Wrap a function of Ray; do nothing if this release of Ray lacks it."""
    if function := getattr(owner, name, None):
        setattr(owner, name, wrap(function, *args))


def _preceded(function: Function, call: Callable[[], None]) -> Function:
    """Wrap a function: make another call first."""

    @functools.wraps(function)
    def both(*args: Any, **options: Any) -> Any:
        call()
        return function(*args, **options)

    return both


def _by_topology(function: Function, make: Callable[[Any, Any], Any]) -> Function:
    """Wrap a function that makes something for a topology: call `make` for raypipe's topologies."""

    @functools.wraps(function)
    def chosen(topology: Any, *args: Any, **options: Any) -> Any:
        settings = next(iter(topology)).data_context.get_config(KEY)
        if settings:
            return make(topology, settings)
        return function(topology, *args, **options)

    return chosen


def _as_ours(method: Function) -> Function:
    """Wrap a method of Ray Data's executor: mark the thread for raypipe's executions."""

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **options: Any) -> Any:
        with ours() if settings_of(self._data_context) else contextlib.nullcontext():
            return method(self, *args, **options)

    return marked


def _without_metadata_thread(method: Function) -> Function:
    """Wrap the method of Ray Data's executor that starts it: fetch metadata without a thread for it."""

    @functools.wraps(method)
    def started(self: Any, *args: Any, **options: Any) -> Any:
        if settings_of(self._data_context) and hasattr(self, "_metadata_fetcher"):
            from ray.data._internal.execution import metadata_fetcher

            self._metadata_fetcher = metadata_fetcher.InlineMetadataFetcher()
        return method(self, *args, **options)

    return started


def _unless_local(function: Function, local: Function) -> Function:
    """Wrap a function: call `local` for raypipe's executions on a local cluster."""

    @functools.wraps(function)
    def chosen(*args: Any, **options: Any) -> Any:
        return (local if is_ours() and is_local() else function)(*args, **options)

    return chosen


def _unless_lost(function: Function) -> Function:
    """Wrap Ray Data's function for the actors' locations: for raypipe's executions it may return none."""

    @functools.wraps(function)
    def locations(actors: Any) -> Any:
        if not is_ours():
            return function(actors)
        # Ray pins the tracking actor to a node, and does not replace it when the node is lost.
        with contextlib.suppress(ray.exceptions.RayError):
            return {} if is_local() else function(actors)
        return {}

    return locations


def _hide_progress(record: logging.LogRecord) -> bool:
    """Drop records of raypipe's executions that are not errors."""
    return record.levelno >= logging.ERROR or not is_ours()


def _hide_errors(record: logging.LogRecord) -> bool:
    """Hide raypipe's errors from the console, by an attribute for Ray Data's handler; Ray's log file has them."""
    record.hide = record.levelno >= logging.ERROR and is_ours()
    return True
