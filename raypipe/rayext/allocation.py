"""Shares out a cluster between trainers and transform actors, or names the setting that would make room.

A run that cannot start fails at once and names the setting to change. Ray itself would wait forever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ray
from packaging import version

from raypipe.config import PoolConfig, TrainConfig
from raypipe.errors import ConfigError, ResourceError
from raypipe.rayext.limits import autoscaler_limits
from raypipe.rayext.waiting import Wait

# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0

# CPUs that a trainer gets at least, unless train.cpus_per_worker says otherwise.
_LEAST_SHARE = 0.25


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
        most, used = max(total.get(name, 0.0), limit.get(name, 0.0)), total.get(name, 0.0) - free.get(name, 0.0)
        return most, most - used

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
        ResourceError: something is missing; the message names it and the setting to change.
        ConfigError: W does not divide M, or the fewest workers are more than
            the most.
    """
    workers, needed_workers, gpu = _trainers(offer, train, per_step) if train else (0, 0, False)
    pool_cpus = pool.least_actors * pool.cpus_per_actor
    per_worker = train.cpus_per_worker if train else 0.0
    if workers and not per_worker:
        # Trainers of a machine with few CPUs share what the smallest pool leaves them.
        share = math.floor(max(0.0, (offer.cpus - pool_cpus) / needed_workers) * 100 + 1e-9) / 100
        per_worker = min(1.0, share) if share >= _LEAST_SHARE else 1.0
    needed = needed_workers * per_worker + pool_cpus
    if needed > offer.cpus:
        settings = f"{_num_setting(train)}, train.cpus_per_worker" if train else ""
        raise _too_few_cpus(offer.cpus, needed_workers, per_worker, pool, settings)
    for num, what, free, total, kind in (
        (needed, _needs(needed_workers, per_worker, pool), offer.free_cpus, offer.cpus, "CPU"),
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


def _trainers(offer: Resources, train: TrainConfig, per_step: int) -> tuple[int, int, bool]:
    """W, the fewest workers that a run may begin with, and whether each has a GPU."""
    gpu = train.use_gpu is True or (train.use_gpu == "auto" and offer.gpus >= 1)
    most = largest_divisor(per_step, max(1, int(offer.gpus)))
    workers = train.num_workers or (most if gpu else 1)
    needed_workers = train.min_workers or workers
    if needed_workers > workers:
        raise ConfigError(
            f"train.min_workers={train.min_workers} is more than the {workers} workers of the run: "
            "set train.num_workers"
        )
    if gpu and offer.gpus < needed_workers:
        fewer = f"set {_num_setting(train)}={most}, or " if offer.gpus >= 1 else ""
        raise ResourceError(
            f"{needed_workers} trainers need {needed_workers} GPUs, the cluster has {offer.gpus:g}: "
            f"{fewer}set train.use_gpu=false to train on CPUs, or add GPU nodes"
        )
    if per_step % workers:
        raise ConfigError(
            f"train.num_workers={workers} does not divide the {per_step} micro-batches of a step "
            "(plan.global_batch_size / plan.micro_batch_size): each rank must get as many as the others"
        )
    return workers, needed_workers, gpu


def _num_setting(train: TrainConfig) -> str:
    """Which sets the fewest trainers that a run needs."""
    return "train.min_workers" if train.min_workers else "train.num_workers"


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


def _needs(workers: int, per_worker: float, pool: PoolConfig) -> str:
    """Who needs how many CPUs."""
    parts = [(workers, per_worker, "trainer"), (pool.least_actors, pool.cpus_per_actor, "transform actor")]
    parts = [part for part in parts if part[0]]
    who = " and ".join(f"{num} {name}{'s' * (num > 1)}" for num, _, name in parts)
    terms = " + ".join(f"{num} x {cpus:g}" for num, cpus, _ in parts)
    verb = "needs" if sum(num for num, *_ in parts) == 1 else "need"
    return f"{who} {verb} {sum(num * cpus for num, cpus, _ in parts):g} CPUs ({terms})"


def _too_few_cpus(cpus: float, workers: int, per_worker: float, pool: PoolConfig, settings: str) -> ResourceError:
    """The error, with the settings to change; `settings` are the trainers', if there are any."""
    names = [settings] if settings else []
    names += ["pool.min_actors", "pool.cpus_per_actor"] if pool.least_actors else []
    inline = "set pool.engine=inline, " if settings and pool.least_actors else ""
    return ResourceError(
        f"{_needs(workers, per_worker, pool)}; the cluster has, or can scale to, {cpus:g}: lower "
        f"{', '.join(names)}, {inline}or add CPU nodes"
    )


def check_own(
    cpus: float, workers: int, per_worker: float, pool: PoolConfig, gpus: float = 0.0, gpus_per_worker: float = 0.0
) -> None:
    """Raise ResourceError where the trainers of one's own loop, or the pool beside them, would wait for room.

    Args:
        cpus, gpus: as above.
        workers, per_worker: the trainers, and the CPUs that Ray reserves for each.
        gpus_per_worker: and the GPUs.
    """
    if workers * gpus_per_worker > gpus:
        raise ResourceError(
            f"{workers} trainer{'s' * (workers > 1)} of {gpus_per_worker:g} GPU each need "
            f"{workers * gpus_per_worker:g} GPUs; the cluster has, or can scale to, {gpus:g}: lower num_workers "
            "of ScalingConfig, set its use_gpu=False, or add GPU nodes"
        )
    if workers * per_worker + pool.least_actors * pool.cpus_per_actor > cpus:
        settings = "num_workers and resources_per_worker of ScalingConfig"
        raise _too_few_cpus(cpus, workers, per_worker, pool, settings)
