"""Connecting to Ray, and the preflight: does the cluster have, or can it scale to, what a run needs?

A run that cannot start says so at once, with the setting that mends it. Ray alone would wait for ever.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from packaging import version
from ray._private import node, ray_constants, services

from raypipe.config import PoolConfig, TrainConfig
from raypipe.errors import ConfigError, ResourceError
from raypipe.logs import LogFormat
from raypipe.plan.schedule import lanes
from raypipe.rayext.console import json_lines, quiet_console
from raypipe.rayext.limits import autoscaler_limits
from raypipe.rayext.local import LOCAL_CLUSTER, note_start
from raypipe.rayext.shortage import LEAST_SHARE, floor, needs, too_few_cpus
from raypipe.rayext.waiting import Wait, wait_for_head

logger = logging.getLogger(__name__)

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

# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0

# A head that is being started takes so long.
_ANSWER_S = 60.0


def connect(
    address: str = "",
    *,
    num_cpus: int | None = None,
    object_store_bytes: int | None = None,
    log: LogFormat = "text",
    wait: Wait | None = None,
) -> None:
    """Connect to the cluster at `address` or RAY_ADDRESS; without either, start Ray on this machine.

    Does nothing if this process is connected already. Inside a submitted job RAY_ADDRESS is set.

    Args:
        address: of the cluster; empty = RAY_ADDRESS.
        num_cpus: CPUs to offer, if Ray is started here; None = all.
        object_store_bytes: size of the object store, if Ray is started here; None = Ray's default.
        log: "json" makes Ray's own log lines, and those of other libraries in its workers, JSON as well.
        wait: for the cluster's answer; None = a minute.

    Raises:
        ResourceError: the cluster has not answered, or cannot be joined.
    """
    if ray.is_initialized():
        return
    if log == "json":
        json_lines()
    # With it Ray also leaves out the "(Actor pid=…)" before the lines of workers.
    ray_log = ray.LoggingConfig(encoding="JSON", log_level="WARNING") if log == "json" else None
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
        quiet_console()
        return
    if "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ:
        # Under `uv run`, Ray would build the project's environment anew for its workers, which share this one.
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    # That a cluster of one user's own on one machine asks for a token is nothing to be told of.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    environment = _LOCAL_ENV | ({"RAY_BACKEND_LOG_JSON": "1"} if log == "json" else {})
    with _inherited(environment), _small_head(), _spared_signals():
        ray.init(
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            **options,
        )
    quiet_console()
    note_start()


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


class HeldError(ResourceError):
    """The cluster has what a run needs, and other jobs hold it."""


@dataclass(frozen=True)
class Resources:
    """What a cluster offers.

    Attributes:
        cpus, gpus: in all nodes that run, or that the autoscaler may add.
        free_cpus, free_gpus: of these, what nobody holds.
    """

    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def cluster_resources() -> Resources:
    """The resources of the connected cluster, with what its autoscaler may add where it says so."""
    total, free = ray.cluster_resources(), ray.available_resources()
    limit = autoscaler_limits()

    def of(name: str) -> tuple[float, float]:
        most, held = max(total.get(name, 0.0), limit.get(name, 0.0)), total.get(name, 0.0) - free.get(name, 0.0)
        return most, most - held

    (cpus, free_cpus), (gpus, free_gpus) = of("CPU"), of("GPU")
    return Resources(cpus, gpus, free_cpus, free_gpus)


def worker_resources(scaling_config: Any) -> dict[str, float]:
    """The resources that each worker of Ray Train's takes, by the names of Ray's; without any it takes a CPU."""
    return scaling_config._resources_per_worker_not_none


@dataclass(frozen=True)
class Allocation:
    """Who gets what.

    Attributes:
        workers: W; where training is elastic, the most.
        gpu, cpus_per_worker: whether each has a GPU, and CPUs that Ray reserves for each.
        max_actors: transform actors that the pool may grow to; 0 = trainers make the stream themselves.
        min_workers: where training is elastic, the fewest; else 0.
        idle_gpus: that no job holds and the run has no use for, where W was derived from M.
    """

    workers: int
    gpu: bool
    cpus_per_worker: float
    max_actors: int
    min_workers: int = 0
    idle_gpus: int = 0


def allocate(offer: Resources, pool: PoolConfig, train: TrainConfig | None, per_step: int) -> Allocation:
    """Share out a cluster between trainers and transform actors. Pure.

    Args:
        train: what the trainers need; None = there are none.
        per_step: M, which W must divide.

    Raises:
        ResourceError: something is missing; the message names what, and which setting mends it.
        ConfigError: W does not divide M, pool.executions does not divide W, or the fewest workers are more than
            the most.
    """
    workers, needed_workers, gpu = 0, 0, False
    if train is not None:
        gpu = train.use_gpu is True or (train.use_gpu == "auto" and offer.gpus >= 1)
        workers = train.num_workers or (largest_divisor(per_step, max(1, int(offer.gpus))) if gpu else 1)
        needed_workers = train.min_workers or workers
        if needed_workers > workers:
            raise ConfigError(
                f"train.min_workers={train.min_workers} is more than the {workers} workers of the run: "
                "set train.num_workers"
            )
        if gpu and offer.gpus < needed_workers:
            most = largest_divisor(per_step, max(1, int(offer.gpus)))
            setting = "train.min_workers" if train.min_workers else "train.num_workers"
            fewer = f"set {setting}={most}, or " if offer.gpus >= 1 else ""
            raise ResourceError(
                f"{needed_workers} trainers need {needed_workers} GPUs, the cluster has {offer.gpus:g}: "
                f"{fewer}set train.use_gpu=false to train on CPUs, or add GPU nodes"
            )
        if per_step % workers:
            raise ConfigError(
                f"train.num_workers={workers} does not divide the {per_step} micro-batches of a step "
                "(plan.global_batch_size / plan.micro_batch_size): each rank must get as many as the others"
            )
        lanes(workers, pool.executions)
    pool_cpus = pool.least_actors * pool.cpus_per_actor
    per_worker = train.cpus_per_worker if train is not None else 0.0
    if workers and not per_worker:
        # Trainers of a machine with few CPUs share what the smallest pool leaves them.
        share = floor((offer.cpus - pool_cpus) / needed_workers)
        per_worker = min(1.0, share) if share >= LEAST_SHARE else 1.0
    needed = needed_workers * per_worker + pool_cpus
    if needed > offer.cpus:
        most = largest_divisor(per_step, int((offer.cpus - pool_cpus) / per_worker)) if needed_workers else 0
        setting = "train.min_workers" if train and train.min_workers else "train.num_workers"
        mends = [f"{setting}={most}"] if most else []
        if needed_workers and (share := floor((offer.cpus - pool_cpus) / needed_workers)):
            mends.append(f"train.cpus_per_worker={share:g}")
        shared = train is not None and not train.cpus_per_worker
        raise too_few_cpus(offer.cpus, needed_workers, per_worker, pool, mends, shared)
    parts = needs(needed_workers, per_worker, pool)
    for num, what, free, total, kind in (
        (needed, parts, offer.free_cpus, offer.cpus, "CPU"),
        (needed_workers * gpu, f"the trainers need {needed_workers} GPUs", offer.free_gpus, offer.gpus, "GPU"),
    ):
        if num > free:
            raise HeldError(
                f"{what}; other jobs hold all but {max(0.0, free):g} of the cluster's {total:g} "
                f"{kind}s. Wait for them, stop them (`ray job list`), or add {kind} nodes"
            )
    spare = max(pool.least_actors, int((offer.cpus - workers * per_worker) / pool.cpus_per_actor + 1e-9))
    max_actors = min(spare, pool.max_actors) if pool.max_actors else spare
    if pool.engine == "inline":
        max_actors = 0
    min_workers = needed_workers if needed_workers < workers else 0
    idle_gpus = max(0, int(offer.free_gpus) - workers) if gpu and not (train and train.num_workers) else 0
    return Allocation(workers, gpu, per_worker, max_actors, min_workers, idle_gpus)


def check_elastic() -> None:
    """Raise ConfigError where this Ray has no elastic training."""
    if version.parse(ray.__version__) < version.parse("2.55"):
        raise ConfigError(
            f"elastic training (train.min_workers) needs Ray 2.55 or newer, this is Ray {ray.__version__}: "
            "update Ray, or set train.min_workers=0"
        )


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number up to a limit; 0 where there is none."""
    return max((d for d in range(1, limit + 1) if number % d == 0), default=0)


def preflight(
    pool: PoolConfig,
    train: TrainConfig | None = None,
    per_step: int = 1,
    wait: Wait | None = None,
) -> Allocation:
    """Share out the connected cluster, see `allocate`; fails at once where it never could be done.

    Args:
        wait: for what other jobs hold; None = some seconds.
    """
    wait = wait or Wait(_SETTLE_S)
    while True:
        try:
            return allocate(cluster_resources(), pool, train, per_step)
        except HeldError as error:
            wait.turn(f"room: {error}")
