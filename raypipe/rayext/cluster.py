"""Connections to a cluster, and local clusters that are started on this machine."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import node, ray_constants, services
from ray._private import utils as ray_utils
from ray.util import client

from raypipe.cpus import num_cpus as usable_cpus
from raypipe.errors import ResourceError
from raypipe.logs import LogFormat
from raypipe.rayext.console import take_console
from raypipe.rayext.waiting import Wait, wait_for_head

LOCAL_CLUSTER = "RAYPIPE_LOCAL_CLUSTER"
"""Variable in the environment of all processes of a cluster that `connect` started."""

# Id of the node that this process started last.
_own_node = ""

_WORKER_ENV = {
    # The thread that prefetches blocks' metadata costs the one core that runs an execution a third more time,
    # though blocks come with their metadata. (Since Ray 2.57; read when ray.data is imported.)
    "RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0",
    # With the patch, Ray Train prints every line of a train function twice.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray Train waits silently for resources; after this many seconds trainer.py logs what is missing.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # A trainer that does not answer for so long is replaced; Ray's default is ten minutes. Nothing holds the
    # interpreter for two minutes. (If Ray makes its stream, watch.py detects a stopped trainer earlier.)
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
}
# On one machine, Ray's bookkeeping takes CPU time from the transform: statistics of its event loops, and a record
# of every task for the dashboard, which does not run.
_LOCAL_ENV = {
    **_WORKER_ENV,
    LOCAL_CLUSTER: "1",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the watcher is an actor that looks for preempted cloud nodes
}

# Time that the start of a head may take.
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

    Does nothing if this process is already connected. Inside a submitted job RAY_ADDRESS is set.

    Args:
        address: address of the cluster; empty = RAY_ADDRESS.
        num_cpus: CPUs to offer, if Ray is started on this machine; None = all that this process may use.
        object_store_bytes: size of the object store, if Ray is started on this machine; None = Ray's default.
        log_format: "json" also turns the log lines of Ray, and of other libraries in its workers, into JSON.
        wait: the wait for the cluster's answer; None = a minute.

    Raises:
        ResourceError: the cluster does not answer, cannot be joined, or does not start.
    """
    is_client = client.ray.is_connected()
    if ray.is_initialized() and not is_client:
        return
    address = address or os.environ.get("RAY_ADDRESS", "")
    if is_client or address.startswith("ray://"):
        raise ResourceError(
            "a stream does not run through Ray Client (ray://…): start the program on a machine of the cluster, "
            "such as by `ray job submit`"
        )
    take_console()
    # This also removes Ray's prefix "(Actor pid=…)" from the lines of workers.
    if log_format == "json":
        ray_log = ray.LoggingConfig(encoding="JSON", log_level="WARNING")
    else:
        ray_log = None
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _SearchPath()
    options: dict[str, Any] = {
        "logging_level": logging.WARNING,
        "logging_config": ray_log,
        "job_config": job,
    }
    if address:
        wait_for_head(address, wait or Wait(_ANSWER_S))
        closed = {
            name: os.environ[name] for name in ("PYTHONSAFEPATH",) if name in os.environ
        }
        try:
            with _whole_start():
                ray.init(
                    address=address,
                    runtime_env={"env_vars": _WORKER_ENV | closed},
                    **options,
                )
        except (RuntimeError, OSError, ray.exceptions.RayError) as error:
            raise ResourceError(
                f"cannot connect to the Ray cluster at {address}: {error}"
            ) from error
        return
    if "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ:
        # Under `uv run`, Ray would rebuild the project's environment for its workers, which can share this one.
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    # Ray warns that authentication is on, which is irrelevant to a private cluster on one machine.
    logging.getLogger(
        "ray._private.authentication.authentication_token_setup"
    ).setLevel(logging.ERROR)
    _keep_token_private()
    environment = _LOCAL_ENV | (
        {"RAY_BACKEND_LOG_JSON": "1"} if log_format == "json" else {}
    )
    with _inherited(environment), _small_head(), _spared_signals(), _whole_start():
        try:
            ray.init(
                # Ray counts the machine's, or those of its container, and not those of `taskset` or Slurm.
                num_cpus=num_cpus or min(usable_cpus(), int(ray_utils.get_num_cpus())),
                object_store_memory=object_store_bytes,
                include_dashboard=False,
                **options,
            )
        except (
            Exception
        ) as error:  # Ray raises nothing more special where its processes are too slow
            raise ResourceError(
                "Ray did not start on this machine: its CPUs or memory may be in use, or TMPDIR may be too long "
                f"or not ASCII: {error}"
            ) from error
    global _own_node
    _own_node = ray.get_runtime_context().get_node_id()


def _keep_token_private() -> None:
    """Let nobody else read the token of Ray's local clusters, whoever made it.

    Ray makes it at the first start, with the modes that the umask leaves, which are 0644 on most machines; its
    ports are open to the network, and the token is the key to run code.
    """
    token = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # no home, or another user's: Ray's start tells
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not token.exists():
            file = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as new:
                new.write(secrets.token_hex(32))  # Ray's own has the same form
        elif stat.S_IMODE(token.stat().st_mode) & 0o077:
            token.chmod(0o600)


def started_here() -> bool:
    """Return whether this process started the connected cluster, which ends with the process."""
    return ray.is_initialized() and ray.get_runtime_context().get_node_id() == _own_node


def is_local() -> bool:
    """Return whether `connect` started the connected cluster, in this process or in its driver."""
    return started_here() or LOCAL_CLUSTER in os.environ


class _SearchPath(list[str]):
    """First module search path of Ray's workers, limited to the folders in this process's path.

    Ray would add the current folder, which may be a dataset's with a file cv2.py.
    """

    def extend(self, folders: Iterable[str]) -> None:
        known = {os.path.realpath(folder) for folder in sys.path}
        super().extend(
            folder for folder in folders if os.path.realpath(folder) in known
        )


@contextlib.contextmanager
def _inherited(environment: dict[str, str]) -> Iterator[None]:
    """Context manager: set variables for started processes, unless this process has other values.

    The variables are removed afterwards, since this process may later connect to a cluster that must not have
    them.
    """
    added = {
        name: value for name, value in environment.items() if name not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _small_head() -> Iterator[None]:
    """Context manager: start Ray without the services that a cluster of one machine does not need.

    Ray starts the dashboard's server even without a dashboard, and ray.init waits 2 s for it; the monitor would
    add nodes. The agent's port only matters to a dashboard, so it may be any: Ray would wait up to 3 s for a fixed
    port, which every other Ray on this machine uses too.
    """
    node_type = node.Node
    start_raylet = node_type.start_raylet

    def start_with_any_port(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._ray_params.dashboard_agent_listen_port = 0
        return start_raylet(self, *args, **kwargs)

    replaced = {
        name: lambda self, *_, **__: None
        for name in ("start_api_server", "start_monitor")
    }
    replaced["start_raylet"] = start_with_any_port
    saved = {name: getattr(node_type, name) for name in replaced}
    try:
        for name, method in replaced.items():
            setattr(node_type, name, method)
        yield
    finally:
        for name, method in saved.items():
            setattr(node_type, name, method)


@contextlib.contextmanager
def _spared_signals() -> Iterator[None]:
    """Context manager: start Ray in separate process groups.

    Ctrl-C in a terminal and `timeout` signal the whole group of this process. In it, Ray would end at once, and a
    stopped run could not write its checkpoint. On Linux Ray still ends with this process; on other systems Ray
    needs the group to end its processes.
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


@contextlib.contextmanager
def _whole_start() -> Iterator[None]:
    """Context manager: hold the KeyboardInterrupt of a first Ctrl-C until Ray has started.

    After an interrupted start of Ray's core, the next one, as by a notebook's cell, would end the process.
    """
    held = list[bool]()
    default = signal.default_int_handler

    def hold(*_: Any) -> None:
        held.append(True)
        signal.signal(signal.SIGINT, default)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) != default
    ):
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if held:
        raise KeyboardInterrupt
