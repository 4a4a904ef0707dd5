"""The command `digest`, which hashes and compares streams."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from raypipe.config import RunConfig
from raypipe.cpus import num_cpus
from raypipe.errors import ConfigError
from raypipe.printing import Result, print_table, told

if TYPE_CHECKING:
    from raypipe.plan.places import Cursor
    from raypipe.streaming.digest import MicroBatchDigest
    from raypipe.streaming.spec import StreamSpec

# Actors of a digest that may share the CPUs of a smaller machine.
_SHARING = 4


def digest(
    run: RunConfig,
    target: str = "",
    *,
    from_step: int = 0,
    to_step: int = 0,
    output: str = "",
    compare: str = "",
) -> Result:
    """Hash a stream: index, label and pixels of every micro-batch.

    Examples:
        raypipe digest train.lmdb --plan.epochs 2 --output one.json
        raypipe digest train.lmdb --plan.epochs 2 --train.num-workers 2 --from-step 10 --compare one.json

    Args:
        run: train.num_workers consumers share each step (0 = one consumer); the pool may have more actors than
            there are CPUs.
        from_step: resume at this training step, counted through all epochs.
        to_step: end before this training step, including a validation before it; 0 = at the end.
        output: write the settings and the digest of every micro-batch to this file, a local path or a URI.
        compare: compare with such a file; exit code 1 if they differ.
    """
    from raypipe.storage.files import check_place, write_json
    from raypipe.streaming import digest as digesting
    from raypipe.streaming.hashes import combine
    from raypipe.streaming.opening import spec_of

    spec = spec_of(run)
    workers = run.train.workers_range[1] or 1
    spec.plan.check_workers(workers)
    total = spec.plan.config.epochs * spec.plan.steps_per_epoch
    to_step = to_step or total
    if not 0 <= from_step < to_step <= total:
        raise ConfigError(
            f"--from-step {from_step} --to-step {to_step} is empty or outside the run's {total} steps"
        )
    expected = digesting.read_digests(compare) if compare else None
    if output:
        check_place(output)
    spec = dataclasses.replace(spec, plan=spec.plan.until(to_step))
    cursor = spec.plan.cursor_at(from_step)
    hashed, max_actors = _hashed(spec, cursor, workers)
    settings = digesting.plain_settings(
        spec, workers=workers, actors=max_actors, from_step=from_step, to_step=to_step
    )
    micro_batches = {each.name: each.digest.hex() for each in hashed}
    made = digesting.Digests(settings, micro_batches)
    result: Result = {
        "store": spec.stores["train"].address,
        "digest": combine(each.digest for each in hashed),
        "samples": sum(each.num_samples for each in hashed),
        "micro_batches": len(hashed),
    }
    if output:
        write_json(output, made._asdict())
        result["output"] = output
    if expected:
        result |= digesting.compare(expected, made, compare)
    return result


def _hashed(
    spec: StreamSpec, cursor: Cursor, workers: int
) -> tuple[list[MicroBatchDigest], int]:
    """Return the hashes of a stream, made by this process or by actors for several consumers; and its most actors.

    A few actors may share a CPU, so pools can be compared on any machine; a large pool is made smaller.
    """
    from raypipe.rayext.allocation import preflight
    from raypipe.rayext.cluster import connect
    from raypipe.streaming.digest import digested, iterate_digests
    from raypipe.streaming.inline import inline_batches
    from raypipe.streaming.pipeline import splits

    if spec.pool.engine == "inline":
        return list(digested(inline_batches(spec, cursor))), 0
    min_actors = min(spec.pool.min_actors, _SHARING)
    pool = dataclasses.replace(spec.pool, min_actors=min_actors)
    few = max(pool.least_actors, min(pool.max_actors, _SHARING))
    connect(num_cpus=max(num_cpus(), few))
    max_actors = preflight(pool).max_actors
    spec = dataclasses.replace(spec, pool=pool)
    ranks = splits(spec, cursor, max_actors=max_actors, world_size=workers)
    return list(iterate_digests(spec.plan, cursor, ranks)), max_actors


def print_digests(result: Result) -> None:
    """Print digests, or a comparison: both values of each setting that differs, and the verdict."""
    print_table(result.get("store", "comparison"), told(result, "store"))
    if "equal" not in result:
        return
    num = f"{result['compared']} micro-batches"
    if result["equal"]:
        print(f"equal over {num}")
    else:
        print(f"{result['different']} of {num} differ")
