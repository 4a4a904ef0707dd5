"""Patches of Ray Data on which streams depend: the functions that raypipe replaces, why, and until when.

    replaced                              reason                                          until
    create_actor_autoscaler,              a pool grows with the ranks' waits, and asks    Ray Data accepts an
    create_cluster_autoscaler             for no nodes; Ray's grows if it only fills its  autoscaler from its user
                                          buffer, and adds nodes of every type            (ray#45331)
    StreamingExecutor.execute, shutdown   mark the calling thread as ours, for the        the others are gone
                                          others and for `tweaks`; no thread fetches the
                                          metadata, which come with the blocks
    get_actor_locations                   an execution outlives the node of the actor     Ray Data replaces a lost
                                          that knows them                                 actor
    ray.shutdown                          ends open streams first: the threads of Ray     Ray Data ends its own
                                          Data would start a new cluster, or end the
                                          process with exit code 1

Each patch calls Ray's original for executions that are not raypipe's, see `data_context`. The first of raypipe's
executions in a process, made there or received from another process, installs the patches; the first open stream
installs the last one. Patches that only save time or lines are in `tweaks`; README.md lists all private names.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray

from raypipe.rayext.data_context import is_ours, ours, stream_settings
from raypipe.rayext.ray_private import Function, find_private, replace
from raypipe.rayext.tweaks import EXECUTOR, POOL, quiet_executions, without_idle_actors

_INLINE = "ray.data._internal.execution.metadata_fetcher.InlineMetadataFetcher"

# Replacement of Ray Data's autoscaler of a pool, since `execution.StreamAutoscaler` sizes it.
_NO_AUTOSCALER = SimpleNamespace(try_trigger_scaling=lambda: None)


@functools.cache  # once per process
def install(make_autoscaler: Callable[[Any, Any], Any]) -> None:
    """Install all patches, once per process.

    Args:
        make_autoscaler: (topology, settings) → autoscaler, which one of raypipe's executions calls at each turn.
    """
    replace(
        f"{EXECUTOR}.create_actor_autoscaler",
        _by_topology,
        lambda *_: _NO_AUTOSCALER,
        loss="Ray Data's own autoscaler sizes the pool too",
    )
    replace(
        f"{EXECUTOR}.create_cluster_autoscaler",
        _by_topology,
        make_autoscaler,
        loss="the pool neither grows nor replaces lost actors, and Ray Data may add nodes",
    )
    for name in ("execute", "shutdown"):
        replace(
            f"{EXECUTOR}.StreamingExecutor.{name}",
            _as_ours,
            loss="other changes do not recognize raypipe's executions",
        )
    replace(
        f"{POOL}.get_actor_locations",
        _unless_lost,
        loss="an execution may end with the node of one of Ray Data's actors",
    )
    quiet_executions()
    without_idle_actors()


@functools.cache  # once for each function
def before_shutdown(call: Callable[[], None]) -> None:
    """Call a function at the beginning of every `ray.shutdown` in this process, a user's included."""
    replace(
        "ray.shutdown",
        _preceded,
        call,
        loss="call the loader's close() before the end of Ray",
    )


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
        settings = stream_settings(next(iter(topology)).data_context)
        if settings:
            return make(topology, settings)
        return function(topology, *args, **options)

    return chosen


def _as_ours(method: Function) -> Function:
    """Wrap a method of Ray Data's executor: mark the thread for raypipe's executions."""

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **options: Any) -> Any:
        if not stream_settings(self._data_context):
            return method(self, *args, **options)
        # Ray before 2.57 has no thread for it.
        if hasattr(self, "_metadata_fetcher"):
            inline = find_private(_INLINE, "tiny images stream a quarter slower")
            self._metadata_fetcher = inline() if inline else self._metadata_fetcher
        with ours():
            return method(self, *args, **options)

    return marked


def _unless_lost(function: Function) -> Function:
    """Wrap Ray Data's function for the actors' locations: for raypipe's executions it may return none."""

    @functools.wraps(function)
    def locations(actors: Any) -> Any:
        if not is_ours():
            return function(actors)
        # Ray pins the tracking actor to a node, and does not replace it when the node is lost.
        with contextlib.suppress(ray.exceptions.RayError):
            return function(actors)
        return {}

    return locations
