"""Allocation of a cluster's resources to trainers and transform actors.

A run that cannot start raises at once and names the setting to change. Without this, Ray would wait forever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ray

from raypipe.config import PoolConfig, TrainConfig
from raypipe.errors import ConfigError, ResourceError
from raypipe.rayext.cluster_state import autoscaler_limits
from raypipe.rayext.placement import cpus_name
from raypipe.rayext.startup import Wait

SETTLE_S = 10.0
"""CPUs of a run that has just ended become free within seconds; those that stay busy longer are another job's."""

# Least CPUs of a trainer, unless train.cpus_per_worker is set.
_LEAST_SHARE = 0.25


class HeldError(ResourceError):
    """The cluster has the resources for a run, but other jobs hold them."""


@dataclass(frozen=True)
class Resources:
    """CPUs and GPUs of a cluster, in total and free.

    Attributes:
        cpus, gpus: total of all nodes that run or that the autoscaler may add.
        free_cpus, free_gpus: part of the total that no job holds.
    """

    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def cluster_resources() -> Resources:
    """Return the resources of the connected cluster, including nodes that its autoscaler may add, if known.

    The CPUs are those of the process's placement group, if it has one for what it starts.
    """
    total = ray.cluster_resources()
    free = ray.available_resources()
    limit = autoscaler_limits()

    def amounts(name: str) -> tuple[float, float]:
        possible = max(total.get(name, 0.0), limit.get(name, 0.0))
        used = total.get(name, 0.0) - free.get(name, 0.0)
        return possible, possible - used

    (cpus, free_cpus) = amounts(cpus_name())
    (gpus, free_gpus) = amounts("GPU")
    return Resources(cpus, gpus, free_cpus, free_gpus)


def worker_resources(scaling_config: Any) -> dict[str, float]:
    """Return the resources of each Ray Train worker, by Ray's names; by default one CPU."""
    return scaling_config._resources_per_worker_not_none


@dataclass(frozen=True)
class Allocation:
    """Resources of a run.

    Attributes:
        workers: W; for elastic training, the largest W.
        gpu, cpus_per_worker: whether each worker has a GPU, and the CPUs that Ray reserves for it.
        max_actors: most transform actors of the pool; 0 = trainers make the stream themselves.
        min_workers: for elastic training, the smallest W; else 0.
        idle_gpus: free GPUs that the run cannot use, if W was derived from M.
    """

    workers: int
    gpu: bool
    cpus_per_worker: float
    max_actors: int
    min_workers: int = 0
    idle_gpus: int = 0


def allocate(
    offer: Resources, pool: PoolConfig, train: TrainConfig | None, per_step: int
) -> Allocation:
    """Divide a cluster between trainers and transform actors. Pure.

    Args:
        train: requirements of the trainers; None = no trainers.
        per_step: M, which W must divide.

    Raises:
        ResourceError: a resource is missing; the message names it, and the setting to change.
        ConfigError: W does not divide M.
    """
    if train:
        workers, needed_workers, gpu = _trainers(offer, train, per_step)
        per_worker = _cpus_per_worker(offer, pool, train, needed_workers)
    else:
        workers = 0
        needed_workers = 0
        gpu = False
        per_worker = 0.0
    needed = needed_workers * per_worker + pool.least_actors * pool.cpus_per_actor
    if needed > offer.cpus:
        if train:
            settings = "train.num_workers, train.cpus_per_worker"
        else:
            settings = ""
        raise _too_few_cpus(offer.cpus, needed_workers, per_worker, pool, settings)
    if needed > offer.free_cpus:
        needs = _needs(needed_workers, per_worker, pool)
        raise _held(needs, offer.free_cpus, offer.cpus, "CPU")
    if gpu and needed_workers > offer.free_gpus:
        needs = f"the trainers need {needed_workers} GPUs"
        raise _held(needs, offer.free_gpus, offer.gpus, "GPU")
    min_workers = needed_workers if needed_workers < workers else 0
    if gpu and not (train and train.workers_range[1]):
        idle_gpus = max(0, int(offer.free_gpus) - workers)
    else:
        idle_gpus = 0
    max_actors = _most_actors(offer.cpus - workers * per_worker, pool)
    return Allocation(workers, gpu, per_worker, max_actors, min_workers, idle_gpus)


def _cpus_per_worker(
    offer: Resources, pool: PoolConfig, train: TrainConfig, workers: int
) -> float:
    """Return the CPUs of each trainer: those that are set, or one, or a share of what the smallest pool leaves."""
    if train.cpus_per_worker:
        return train.cpus_per_worker
    left = max(0.0, offer.cpus - pool.least_actors * pool.cpus_per_actor)
    share = math.floor(left / workers * 100 + 1e-9) / 100
    if share < _LEAST_SHARE:
        return 1.0
    return min(1.0, share)


def _most_actors(cpus: float, pool: PoolConfig) -> int:
    """Return the size to which the pool may grow on the CPUs that trainers leave; 0 without actors."""
    if pool.engine == "inline":
        return 0
    spare = max(pool.least_actors, int(cpus / pool.cpus_per_actor + 1e-9))
    if pool.max_actors:
        return min(spare, pool.max_actors)
    return spare


def _held(needs: str, free: float, total: float, kind: str) -> HeldError:
    """Return the error of resources that exist, and that others hold."""
    return HeldError(
        f"{needs}; other jobs, or other streams of this one, hold all but {max(0.0, free):g} of the "
        f"cluster's {total:g} {kind}s. Wait for them, stop them (`ray job list`), or add {kind} nodes"
    )


def _trainers(
    offer: Resources, train: TrainConfig, per_step: int
) -> tuple[int, int, bool]:
    """Return W, the fewest workers that a run may start with, and whether each has a GPU."""
    gpu = train.use_gpu is True or (train.use_gpu == "auto" and offer.gpus >= 1)
    most_workers = largest_divisor(per_step, max(1, int(offer.gpus)))
    fewest, most = train.workers_range
    workers = most or (most_workers if gpu else 1)
    needed_workers = min(fewest, workers) or workers
    if gpu and offer.gpus < needed_workers:
        if offer.gpus >= 1:
            fewer = f"set train.num_workers={most_workers}, or "
        else:
            fewer = ""
        raise ResourceError(
            f"{needed_workers} trainers need {needed_workers} GPUs, but the cluster has {offer.gpus:g}: "
            f"{fewer}set train.use_gpu=false to train on CPUs, or add GPU nodes"
        )
    if per_step % workers:
        raise ConfigError(
            f"train.num_workers={workers} does not divide the {per_step} micro-batches of a step "
            "(plan.global_batch_size / plan.micro_batch_size): all ranks must get the same number"
        )
    return workers, needed_workers, gpu


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit; 0 for a limit of 0."""
    return max((d for d in range(1, limit + 1) if number % d == 0), default=0)


def preflight(
    pool: PoolConfig,
    train: TrainConfig | None = None,
    per_step: int = 1,
    wait: Wait | None = None,
) -> Allocation:
    """Divide the connected cluster, see `allocate`; raise at once if it is too small even without other jobs.

    Args:
        wait: the wait for resources that other jobs hold; None = 10 seconds.
    """
    wait = wait or Wait(SETTLE_S)
    while True:
        try:
            return allocate(cluster_resources(), pool, train, per_step)
        except HeldError as error:
            wait.turn(f"room: {error}")


def _needs(workers: int, per_worker: float, pool: PoolConfig) -> str:
    """Describe how many CPUs trainers and transform actors need."""
    parts = [
        (workers, per_worker, "trainer"),
        (pool.least_actors, pool.cpus_per_actor, "transform actor"),
    ]
    parts = [(num, cpus, name) for num, cpus, name in parts if num]
    who = " and ".join(f"{num} {name}{'s' * (num > 1)}" for num, _, name in parts)
    terms = " + ".join(f"{num} x {cpus:g}" for num, cpus, _ in parts)
    verb = "needs" if sum(num for num, *_ in parts) == 1 else "need"
    return f"{who} {verb} {sum(num * cpus for num, cpus, _ in parts):g} CPUs ({terms})"


def _too_few_cpus(
    cpus: float, workers: int, per_worker: float, pool: PoolConfig, settings: str
) -> ResourceError:
    """Return the error with the settings to lower; `settings` are the trainers' settings, if any."""
    names = [settings] if settings else []
    names += ["pool.min_actors", "pool.cpus_per_actor"] if pool.least_actors else []
    if settings and pool.least_actors:
        inline = "set pool.engine=inline, "
    else:
        inline = ""
    return ResourceError(
        f"{_needs(workers, per_worker, pool)}; the cluster has or can scale to {cpus:g}: lower "
        f"{', '.join(names)}, {inline}or add CPU nodes"
    )


def check_own(
    cpus: float,
    workers: int,
    per_worker: float,
    pool: PoolConfig,
    gpus: float = 0.0,
    gpus_per_worker: float = 0.0,
) -> None:
    """Raise ResourceError if a custom loop's trainers, or the pool next to them, would wait for resources forever.

    Args:
        cpus, gpus: total of the cluster, see `Resources`.
        workers, per_worker: number of trainers, and the CPUs that Ray reserves for each.
        gpus_per_worker: the GPUs that Ray reserves for each.
    """
    if workers * gpus_per_worker > gpus:
        raise ResourceError(
            f"{workers} trainer{'s' * (workers > 1)} of {gpus_per_worker:g} GPU each need "
            f"{workers * gpus_per_worker:g} GPUs; the cluster has or can scale to {gpus:g}: lower num_workers "
            "of ScalingConfig, set its use_gpu=False, or add GPU nodes"
        )
    if workers * per_worker + pool.least_actors * pool.cpus_per_actor > cpus:
        settings = "num_workers and resources_per_worker of ScalingConfig"
        raise _too_few_cpus(cpus, workers, per_worker, pool, settings)
