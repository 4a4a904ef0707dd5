"""Changes to Ray that nothing depends on: a faster start, less CPU time, and a console without Ray's own lines.

`RAYPIPE_TWEAKS=0` turns all of them off, for a look at Ray as it is. README.md lists them, with what each gains.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ray

from raypipe.environment import variable
from raypipe.progress import RELAY
from raypipe.rayext import fork_server, forked_worker, later
from raypipe.rayext.cluster_state import is_local, local_environment
from raypipe.rayext.data_context import is_ours, stream_settings
from raypipe.rayext.processes import is_ray_worker
from raypipe.rayext.ray_private import Function, find_private, replace, replaced

_SLOW_START = "the start of a local cluster takes some seconds more"
_NODE = "ray._private.node.Node"
# Options of the raylet.
_AGENT = re.compile("^--(dashboard|runtime_env)_agent_command=")
# The worker's command: the interpreter, and Ray's script that sets up the worker's environment.
_SETUP = re.compile(r"^(--python_worker_command=\S+) (\S+/setup_worker\.py)(?= )")
# Modules that ray.dashboard.optional_deps imports.
_AGENT_NEEDS = (
    "aiohttp",
    "aiohttp_cors",
    "grpc",
    "opencensus",
    "opentelemetry",
    "prometheus_client",
    "pydantic",
)

_STATISTICS = "ray.data._internal.stats._StatsManager"
_POOL = "ray.data._internal.execution.operators.actor_pool_map_operator"
_MORE_ACTORS = "Ray Data starts actors for statistics that nobody reads"

_EXECUTOR = "ray.data._internal.execution.streaming_executor"
_SLOW = "tiny images stream a quarter slower"

_SLOW_TRAIN = "the start of a run takes a second more"

_LINES = "Ray's own lines appear between those of a run"

_NOISE = re.compile(
    # Ray Data starts an actor with arguments in the object store, which are kept as long as it runs.
    r"has constructor arguments in the object store"
    # The actors of a finished execution are killed.
    r"|failed\. There are infinite retries remaining.*killed by `ray\.kill`"
    # A killed actor's process ends before it has answered.
    r"|Failed to kill actor \w+, return status"
    # On two cores, several trials at a time have more processes than Ray expects to start.
    r"|worker processes have been started on node"
    # torch prints this for each process group.
    r"|\[Gloo\] Rank \d+ is connected to"
    # Ray's autoscaler says it when it asks for nodes, which may take minutes, or never come.
    r'|(:event_summary:|"message": ?")Resized to '
    # Ray Train and Ray Data log their own progress.
    r"|Reporting training result|execution finished in|Registered dataset logger"
)
_END_S = 3.0  # longest wait for the trainers' last lines, which Ray delivers late

_progress_ended = threading.Event()


def are_on() -> bool:
    """Return whether raypipe may change what only costs time or lines."""
    return variable("RAYPIPE_TWEAKS") != "0"


# The start of a cluster of one machine


@contextlib.contextmanager
def small_head() -> Iterator[None]:
    """Context manager: start Ray without the services that a cluster of one machine does not need.

    Ray starts the dashboard's server even without a dashboard, and ray.init waits 2 s for it; the monitor would
    add nodes. The agent's port only matters to a dashboard, so it may be any: Ray would wait up to 3 s for a fixed
    port, which every other Ray on this machine uses too. The raylet's agents start later, see `later`; its workers
    are forks, see `fork_server`.
    """
    if not are_on():
        yield
        return
    # Ray warns that authentication is on, which is irrelevant to a private cluster on one machine.
    authentication = "ray._private.authentication.authentication_token_setup"
    logging.getLogger(authentication).setLevel(logging.ERROR)
    with contextlib.ExitStack() as changes:
        for name in ("start_api_server", "start_monitor"):
            change = replaced(f"{_NODE}.{name}", _without, loss=_SLOW_START)
            changes.enter_context(change)
        change = replaced(f"{_NODE}.start_raylet", _with_any_port, loss=_SLOW_START)
        changes.enter_context(change)
        for name, wrap in (
            ("services.start_ray_process", _with_later_agents),
            ("services.start_ray_process", _with_forked_workers),
            ("utils.get_dashboard_dependency_error", _without_import),
        ):
            change = replaced(f"ray._private.{name}", wrap, loss=_SLOW_START)
            changes.enter_context(change)
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _without(function: Function) -> Function:
    """Wrap a function: do nothing instead."""
    return _nothing


def _with_any_port(start_raylet: Function) -> Function:
    """Wrap `Node.start_raylet`: let the agent take any free port."""

    @functools.wraps(start_raylet)
    def start(self: Any, *args: Any, **options: Any) -> Any:
        self._ray_params.dashboard_agent_listen_port = 0
        return start_raylet(self, *args, **options)

    return start


def _with_arguments(start_process: Function, changed: Callable[[str], str]) -> Function:
    """Wrap the function that starts one of Ray's processes: change each argument of its command."""

    @functools.wraps(start_process)
    def start(command: list[str], *args: Any, **options: Any) -> Any:
        return start_process(list(map(changed, command)), *args, **options)

    return start


def _with_later_agents(start_process: Function) -> Function:
    """Wrap the function that starts one of Ray's processes: the raylet's agents start later."""
    waiter = subprocess.list2cmdline([sys.executable, "-I", "-S", later.__file__])
    return _with_arguments(
        start_process,
        lambda argument: _AGENT.sub(lambda option: f"{option[0]}{waiter} ", argument),
    )


def _with_forked_workers(start_process: Function) -> Function:
    """Wrap the function that starts one of Ray's processes: the raylet's workers are forks of the fork server."""
    address = fork_server.address()
    if not address:
        return start_process
    fork = subprocess.list2cmdline(["-I", "-S", forked_worker.__file__, address])
    return _with_arguments(
        start_process,
        lambda argument: _SETUP.sub(
            lambda found: f"{found[1]} {fork} {found[2]}", argument
        ),
    )


def _without_import(find_error: Function) -> Function:
    """Wrap the function that imports what the dashboard's agent needs, to see whether it can start: look it up."""

    def error() -> ImportError | None:
        for name in _AGENT_NEEDS:
            if importlib.util.find_spec(name) is None:
                return ImportError(f"no module {name}")
        return None

    return error


# Ray Data's executions


def tweak_ray_data() -> None:
    """Start neither statistics nor their actors for raypipe's executions on a local cluster; log no progress."""
    if not are_on():
        return
    for name in (
        "register_dataset_to_stats_actor",
        "update_execution_metrics",
        "update_iteration_metrics",
    ):
        replace(f"{_STATISTICS}.{name}", _unless_local, _nothing, loss=_MORE_ACTORS)
    replace(
        f"{_STATISTICS}.gen_dataset_id_from_stats_actor",
        _unless_local,
        lambda: uuid.uuid4().hex,
        loss=_MORE_ACTORS,
    )
    no_tracker = SimpleNamespace(update_actor_location=SimpleNamespace(remote=_nothing))
    replace(
        f"{_POOL}.get_or_create_actor_location_tracker",
        _unless_local,
        lambda: no_tracker,
        loss=_MORE_ACTORS,
    )
    replace(
        f"{_POOL}.get_actor_locations",
        _unless_local,
        lambda actors: {},
        loss=_MORE_ACTORS,
    )
    replace(
        f"{_EXECUTOR}.StreamingExecutor.execute", _without_metadata_thread, loss=_SLOW
    )
    for name in ("ray.data._internal.progress", _EXECUTOR):
        _filter(name, _hide_progress)
    for name in ("ray.data.exceptions", f"{_EXECUTOR}_state"):
        _filter(name, _hide_errors)


def _unless_local(function: Function, local: Function) -> Function:
    """Wrap a function: call `local` for raypipe's executions on a local cluster."""

    @functools.wraps(function)
    def chosen(*args: Any, **options: Any) -> Any:
        return (local if is_ours() and is_local() else function)(*args, **options)

    return chosen


def _without_metadata_thread(method: Function) -> Function:
    """Wrap the method of Ray Data's executor that starts it: fetch blocks' metadata without a thread for it.

    The thread takes the interpreter from the one that runs the execution, though blocks come with their metadata.
    """

    @functools.wraps(method)
    def started(self: Any, *args: Any, **options: Any) -> Any:
        # Releases before Ray 2.57 have no such thread.
        if stream_settings(self._data_context) and hasattr(self, "_metadata_fetcher"):
            path = "ray.data._internal.execution.metadata_fetcher.InlineMetadataFetcher"
            if fetcher := find_private(path, _SLOW):
                self._metadata_fetcher = fetcher()
        return method(self, *args, **options)

    return started


def _filter(logger: str, keep: Any) -> None:
    """Add a filter to the logger of one of Ray's modules."""
    if find_private(logger, _LINES):
        logging.getLogger(logger).addFilter(keep)


def _hide_progress(record: logging.LogRecord) -> bool:
    """Drop records of raypipe's executions that are not errors."""
    return record.levelno >= logging.ERROR or not is_ours()


def _hide_errors(record: logging.LogRecord) -> bool:
    """Hide raypipe's errors from the console, by an attribute for Ray Data's handler; Ray's log file has them.

    The error that the stream raises has their text.
    """
    record.hide = record.levelno >= logging.ERROR and is_ours()
    return True


# Ray Train

_TRAIN = "ray.train.v2"
_WARNS = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"


class _Inherited(dict[str, str]):
    """Variables to set for the processes of a run: none, since they inherit all."""

    def setdefault(self, name: str, default: Any = None) -> Any:
        return default


def without_environment() -> contextlib.AbstractContextManager[None]:
    """Context manager: start the controller of a run without a runtime environment, if it inherits all variables.

    For it Ray would start an agent and a new process, and leave those idle that it has started in advance.
    """
    inherited = local_environment()
    if not are_on() or inherited is None:
        return contextlib.nullcontext()

    def wrap(function: Function) -> Function:
        def variables() -> dict[str, str]:
            needed: dict[str, str] = function()
            if any(inherited.get(name) != value for name, value in needed.items()):
                return needed
            return _Inherited()

        return variables

    path = f"{_TRAIN}.api.data_parallel_trainer.get_env_vars_to_propagate"
    return replaced(path, wrap, loss=_SLOW_TRAIN)


def inherit_environment() -> None:
    """Start trainers without a runtime environment, if the calling controller has none.

    Does nothing in other processes than Ray's workers.
    """
    if (
        not (are_on() and is_ray_worker() and is_local())
        or ray.get_runtime_context().runtime_env
    ):
        return
    os.environ.setdefault(_WARNS, "0")  # as Ray Train sets it
    path = f"{_TRAIN}._internal.execution.worker_group.worker_group"
    replace(
        f"{path}.get_env_vars_to_propagate",
        lambda _: _Inherited,
        loss=_SLOW_TRAIN,
    )


# Ray Train's lines


def quiet_broadcasts() -> None:
    """Silence Ray Train's warnings about large broadcasts between its workers, in this process."""
    name = "ray.train.v2._internal.execution.collective_impl"
    if are_on() and find_private(name, _LINES):
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


# The lines of workers on the driver's console


def begin_progress() -> bool:
    """Begin the progress of a run's trainers; return whether its lines are shown without Ray's prefix."""
    _progress_ended.clear()
    return are_on()


def await_progress() -> None:
    """Wait for the end of the trainers' progress, a few seconds at most."""
    _progress_ended.wait(_END_S)


def sift(lines: list[str]) -> list[str]:
    """Print those lines of workers that are a run's progress, drop noise, and return the others."""
    if not are_on():
        return lines
    kept = []
    for line in lines:
        if line == RELAY:
            _progress_ended.set()
        elif line.startswith(RELAY):
            print(line.removeprefix(RELAY), flush=True)
        elif not _NOISE.search(line):
            kept.append(line)
    return kept
