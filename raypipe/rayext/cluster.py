"""Connecting to a cluster, or starting one on this machine, which then is a local one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import ray
from ray._private import node, ray_constants, services

from raypipe.errors import ResourceError
from raypipe.logs import LogFormat
from raypipe.rayext.console import take_console
from raypipe.rayext.waiting import Wait, wait_for_head

LOCAL_CLUSTER = "RAYPIPE_LOCAL_CLUSTER"
"""Set in the environment of all processes of a cluster that `connect` has started."""

# Of the node that this process has started last.
_own_node = ""

_WORKER_ENV = {
    # A thread that reads the metadata of blocks takes a third more of the one core that runs an execution, and a
    # block's come with it. (Since Ray 2.57; read when ray.data is imported.)
    "RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0",
    # Ray Train prints every line of a train function twice unless told not to.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # It waits in silence for the room that trainers need; after so long trainer.py says so.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # A trainer that does not answer is replaced after so long, and not after ten minutes; nothing holds the
    # interpreter for that long. (If Ray makes its stream, watch.py finds a stopped one earlier.)
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
}
# On one machine Ray's own bookkeeping takes CPU from the transform: statistics of its event loops, and a
# record of every task for the dashboard, which is not there.
_LOCAL_ENV = {
    **_WORKER_ENV,
    LOCAL_CLUSTER: "1",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # an actor that looks for nodes which a cloud takes away
}

# A head that is being started takes so long.
_ANSWER_S = 60.0


def connect(
    address: str = "",
    *,
    num_cpus: int | None = None,
    object_store_bytes: int | None = None,
    log_format: LogFormat = "text",
    wait: Wait | None = None,
) -> None:
    """Connect to the cluster at `address` or RAY_ADDRESS; without either, start Ray on this machine.

    Does nothing if this process is connected already. Inside a submitted job RAY_ADDRESS is set.

    Args:
        address: of the cluster; empty = RAY_ADDRESS.
        num_cpus: CPUs to offer, if Ray is started here; None = all.
        object_store_bytes: size of the object store, if Ray is started here; None = Ray's default.
        log_format: "json" makes Ray's own log lines, and those of other libraries in its workers, JSON as well.
        wait: for the cluster's answer; None = a minute.

    Raises:
        ResourceError: the cluster has not answered, or cannot be joined.
    """
    if ray.is_initialized():
        return
    take_console()
    # With it Ray also leaves out the "(Actor pid=…)" before the lines of workers.
    ray_log = ray.LoggingConfig(encoding="JSON", log_level="WARNING") if log_format == "json" else None
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _SearchPath()
    options: dict[str, Any] = {"logging_level": logging.WARNING, "logging_config": ray_log, "job_config": job}
    if address or os.environ.get("RAY_ADDRESS"):
        address = address or os.environ["RAY_ADDRESS"]
        wait_for_head(address, wait or Wait(_ANSWER_S))
        closed = {name: os.environ[name] for name in ("PYTHONSAFEPATH",) if name in os.environ}
        try:
            ray.init(address=address, runtime_env={"env_vars": _WORKER_ENV | closed}, **options)
        except (RuntimeError, OSError, ray.exceptions.RayError) as error:
            raise ResourceError(f"cannot connect to the Ray cluster at {address}: {error}") from error
        return
    if "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ:
        # Under `uv run`, Ray would build the project's environment again for its workers, which share this one.
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    # That a cluster of one user's own on one machine asks for a token is nothing to be told of.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    environment = _LOCAL_ENV | ({"RAY_BACKEND_LOG_JSON": "1"} if log_format == "json" else {})
    with _inherited(environment), _small_head(), _spared_signals():
        ray.init(
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            **options,
        )
    global _own_node
    _own_node = ray.get_runtime_context().get_node_id()


def started_here() -> bool:
    """Whether this process has started the connected cluster, which ends with it."""
    return ray.is_initialized() and ray.get_runtime_context().get_node_id() == _own_node


def is_local() -> bool:
    """Whether `connect` has started the connected cluster, in this process or in its driver."""
    return started_here() or LOCAL_CLUSTER in os.environ


class _SearchPath(list[str]):
    """Where Ray's workers look for modules first of all: nowhere that this process does not look.

    Ray would add the current folder, be it a data set's with a file cv2.py in it.
    """

    def extend(self, folders: Iterable[str]) -> None:
        known = {os.path.realpath(folder) for folder in sys.path}
        super().extend(folder for folder in folders if os.path.realpath(folder) in known)


@contextlib.contextmanager
def _inherited(environment: dict[str, str]) -> Iterator[None]:
    """Processes that are started in here have these variables, unless this process has them otherwise.

    Afterwards it is as it was: this process may yet connect to a cluster that wants none of it.
    """
    added = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _small_head() -> Iterator[None]:
    """Ray, started in here, does without what a cluster of one machine has no use for, and waits less.

    The server of the dashboard is started without a dashboard too, and ray.init waits 2 s for it; the monitor
    would add nodes. The agent's port is where a dashboard would find it: any port will do, where Ray tries for 3 s
    to have one that each other Ray on this machine wants too.
    """
    node_type = node.Node
    start_raylet = node_type.start_raylet

    def start_with_any_port(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._ray_params.dashboard_agent_listen_port = 0
        return start_raylet(self, *args, **kwargs)

    ours = {name: lambda self, *_, **__: None for name in ("start_api_server", "start_monitor")}
    ours["start_raylet"] = start_with_any_port
    saved = {name: getattr(node_type, name) for name in ours}
    try:
        for name, method in ours.items():
            setattr(node_type, name, method)
        yield
    finally:
        for name, method in saved.items():
            setattr(node_type, name, method)


@contextlib.contextmanager
def _spared_signals() -> Iterator[None]:
    """Ray, started in here, is in process groups of its own.

    Ctrl-C in a terminal and `timeout` signal the whole group of this process. Ray would end at once, and a run
    that is asked to end could not leave its checkpoint. On Linux it still ends with this process, whatever ends
    that; elsewhere Ray itself ends its processes by their group.
    """
    popen: Any = services.ConsolePopen
    if sys.platform != "linux":
        yield
        return
    services.ConsolePopen = functools.partial(popen, process_group=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
