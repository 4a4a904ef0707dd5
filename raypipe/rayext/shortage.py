"""What to say, and what would mend it, where a cluster has too few CPUs for trainers and their pool. Pure."""

from __future__ import annotations

import math

from raypipe.config import PoolConfig
from raypipe.errors import ResourceError

LEAST_SHARE = 0.25
"""CPUs that a trainer gets at least, unless train.cpus_per_worker says otherwise."""


def floor(cpus: float) -> float:
    """To hundredths, as a setting may have it; at least 0."""
    return math.floor(max(0.0, cpus) * 100 + 1e-9) / 100


def needs(workers: int, per_worker: float, pool: PoolConfig) -> str:
    """Who needs how many CPUs."""
    parts = [(workers, per_worker, "trainer"), (pool.least_actors, pool.cpus_per_actor, "transform actor")]
    parts = [part for part in parts if part[0]]
    who = " and ".join(f"{num} {name}{'s' * (num > 1)}" for num, _, name in parts)
    each = " + ".join(f"{num} x {cpus:g}" for num, cpus, _ in parts)
    verb = "needs" if sum(num for num, *_ in parts) == 1 else "need"
    return f"{who} {verb} {sum(num * cpus for num, cpus, _ in parts):g} CPUs ({each})"


def too_few_cpus(
    cpus: float, workers: int, per_worker: float, pool: PoolConfig, mends: list[str], shared: bool = False
) -> ResourceError:
    """The error, with each setting that would mend it alone.

    Args:
        cpus: of the cluster, and of what its autoscaler may add.
        mends: those of the trainers.
        shared: whether trainers take what the smallest pool leaves, up to `per_worker`.
    """
    left = cpus - workers * per_worker
    if shared:
        left = min(cpus * pool.least_actors / (workers + pool.least_actors), cpus - workers * LEAST_SHARE)
    mends = [*mends, *_pool_mends(pool, left, trains=workers > 0)]
    settings = f"set {' or '.join(mends)}, or " if mends else ""
    return ResourceError(
        f"{needs(workers, per_worker, pool)}; the cluster has, or can scale to, {cpus:g}: {settings}add CPU nodes"
    )


def _pool_mends(pool: PoolConfig, left: float, trains: bool) -> list[str]:
    """By which the smallest pool takes no more CPUs than are left for it."""
    if not pool.least_actors or left < 0:
        return []
    mends, fewest = [], int(left / pool.cpus_per_actor + 1e-9)
    if pool.min_actors > 1 and fewest >= pool.executions:
        mends.append(f"pool.min_actors={fewest // pool.executions}")
    if pool.executions > 1 and fewest >= pool.min_actors:
        fit = [n for n in range(1, pool.executions) if pool.executions % n == 0 and n * pool.min_actors <= fewest]
        mends += [f"pool.executions={max(fit)}"] if fit else []
    if share := floor(left / pool.least_actors):
        mends.append(f"pool.cpus_per_actor={share:g}")
    return [*mends, "pool.engine=inline"] if trains else mends


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
        fewer = int(gpus / gpus_per_worker + 1e-9)
        mend = f"num_workers={fewer}" if fewer else "use_gpu=False"
        raise ResourceError(
            f"{workers} trainer{'s' * (workers > 1)} of {gpus_per_worker:g} GPU each need "
            f"{workers * gpus_per_worker:g} GPUs; the cluster has, or can scale to, {gpus:g}: set "
            f"ScalingConfig({mend}), or add GPU nodes"
        )
    pool_cpus = pool.least_actors * pool.cpus_per_actor
    if workers * per_worker + pool_cpus <= cpus:
        return
    mends = []
    if per_worker and (fewer := int((cpus - pool_cpus) / per_worker + 1e-9)) > 0:
        mends.append(f"ScalingConfig(num_workers={fewer})")
    if workers and (share := floor((cpus - pool_cpus) / workers)):
        mends.append(f'ScalingConfig(resources_per_worker={{"CPU": {share:g}}})')
    raise too_few_cpus(cpus, workers, per_worker, pool, mends)
