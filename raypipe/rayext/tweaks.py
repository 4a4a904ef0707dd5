"""Changes to Ray that nothing depends on: a faster start, less CPU time, and a console without Ray's own lines.

`RAYPIPE_TWEAKS=0` turns all of them off, for a look at Ray as it is. README.md lists them, with what each gains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from raypipe.environment import variable
from raypipe.rayext import fork_server, forked_worker
from raypipe.rayext.cluster_state import is_local
from raypipe.rayext.data_context import is_ours
from raypipe.rayext.ray_private import Function, replace, replaced

_SLOW_START = "the start of a local cluster takes some seconds more"
_NODE = "ray._private.node.Node"
_ACTORS = "each local cluster starts two processes more"
_STATS = "ray.data._internal.stats._StatsManager"
POOL = "ray.data._internal.execution.operators.actor_pool_map_operator"
"""Module of Ray Data's pools of actors."""

EXECUTOR = "ray.data._internal.execution.streaming_executor"
"""Module of Ray Data's executions."""
AUTHENTICATION = "ray._private.authentication.authentication_token_setup"
"""Module that sends a cluster's token, and logger of what it says about it."""
# Loggers of Ray Data's executions.
_OF_DATA = (
    "ray.data._internal.progress",
    "ray.data.exceptions",
    EXECUTOR,
    f"{EXECUTOR}_state",
)


def are_on() -> bool:
    """Return whether raypipe may change what only costs time or lines."""
    return variable("RAYPIPE_TWEAKS") != "0"


@contextlib.contextmanager
def small_head() -> Iterator[None]:
    """Context manager: start Ray without the services that a cluster of one machine does not need.

    Ray starts the dashboard's server even without a dashboard, and ray.init waits 2 s for it; the monitor would
    add nodes.
    """
    if not are_on():
        yield
        return
    # Ray warns that authentication is on, which is irrelevant to a private cluster on one machine.
    logging.getLogger(AUTHENTICATION).setLevel(logging.ERROR)
    with contextlib.ExitStack() as changes:
        for name, wrap in (
            ("start_api_server", _without),
            ("start_monitor", _without),
            ("start_raylet", _with_forks),
        ):
            change = replaced(f"{_NODE}.{name}", wrap, loss=_SLOW_START)
            changes.enter_context(change)
        yield


def _without(function: Function) -> Function:
    """Wrap a function: do nothing instead."""
    return lambda *_, **__: None


def _with_forks(start_raylet: Function) -> Function:
    """Wrap `Node.start_raylet`: its workers are forks, see `fork_server`, and its agent takes any free port.

    Ray would wait up to 3 s for the agent's fixed port, which every other Ray on this machine uses too.
    """

    @functools.wraps(start_raylet)
    def start(self: Any, *args: Any, **options: Any) -> Any:
        self._ray_params.dashboard_agent_listen_port = 0
        if address := fork_server.take_address():
            self._ray_params.setup_worker_path = forked_worker.__file__
            os.environ[forked_worker.ADDRESS] = address
        return start_raylet(self, *args, **options)

    return start


class _NoTracker:
    """In the place of Ray Data's actor that is told where actors are: on one machine, all are there."""

    update_actor_location = SimpleNamespace(remote=lambda actor, node: None)


def without_idle_actors() -> None:
    """Let raypipe's executions on one machine do without two actors of Ray Data's.

    One has the statistics for Ray's dashboard, which such a cluster lacks; the other knows the nodes of actors.
    """
    if not are_on():
        return
    instead: dict[str, Callable[[], Any]] = {
        f"{_STATS}.register_dataset_to_stats_actor": lambda: None,
        f"{_STATS}.update_execution_metrics": lambda: None,
        f"{_STATS}.update_iteration_metrics": lambda: None,
        f"{_STATS}.gen_dataset_id_from_stats_actor": lambda: uuid.uuid4().hex,
        f"{POOL}.get_or_create_actor_location_tracker": _NoTracker,
        f"{POOL}.get_actor_locations": dict,
    }
    for path, call in instead.items():
        replace(path, _unless_local, call, loss=_ACTORS)


def _unless_local(function: Function, instead: Callable[[], Any]) -> Function:
    """Wrap a function: call another one for raypipe's executions on a cluster that raypipe started here."""

    @functools.wraps(function)
    def chosen(*args: Any, **options: Any) -> Any:
        if is_ours() and is_local():
            return instead()
        return function(*args, **options)

    return chosen


def quiet_executions() -> None:
    """Keep what Ray Data logs about raypipe's executions in its file, and off the console.

    The error that a stream raises has the text of Ray Data's.
    """
    if are_on():
        for name in _OF_DATA:
            logging.getLogger(name).addFilter(_hide_ours)


def _hide_ours(record: logging.LogRecord) -> bool:
    """Hide what one of raypipe's executions logs from the console, by an attribute for Ray Data's handler."""
    if is_ours():
        record.hide = True
    return True


def quiet_broadcasts() -> None:
    """Silence Ray Train's warnings about large broadcasts between its workers, in this process."""
    if are_on():
        name = "ray.train.v2._internal.execution.collective_impl"
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_trainer() -> None:
    """Silence Ray Train's logs of checkpoints and metrics in a trainer, which would break up the progress."""
    if not are_on():
        return
    for name in ("ray.train", *logging.Logger.manager.loggerDict):
        # Some loggers are named after their files.
        if name.startswith("ray.train") or "/ray/train/" in name:
            # The traceback of the error that ends a train function is kept with the error, see `train.launch`.
            level = logging.CRITICAL if "util" in name else logging.WARNING
            logging.getLogger(name).setLevel(level)
