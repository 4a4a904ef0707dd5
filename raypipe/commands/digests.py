"""The command `digest`, which hashes and compares streams."""

from __future__ import annotations

import dataclasses
from typing import Any

from raypipe.config import RunConfig
from raypipe.cpus import num_cpus
from raypipe.errors import ConfigError
from raypipe.printing import print_table

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
) -> dict[str, Any]:
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
    from raypipe.storage.files import check_place
    from raypipe.streaming.digest import (
        DigestFile,
        combine,
        digested,
        iterate_digests,
        plain_settings,
    )
    from raypipe.streaming.digest import compare as compared_with
    from raypipe.streaming.inline import inline_batches
    from raypipe.streaming.opening import spec_of

    spec = spec_of(run)
    workers = run.train.num_workers or 1
    spec.plan.check_workers(workers)
    total = spec.plan.config.epochs * spec.plan.steps_per_epoch
    to_step = to_step or total
    if not 0 <= from_step < to_step <= total:
        raise ConfigError(
            f"--from-step {from_step} --to-step {to_step} is empty or outside the run's {total} steps"
        )
    expected = DigestFile.read(compare) if compare else None
    if output:
        check_place(output)
    spec = dataclasses.replace(spec, plan=spec.plan.until(to_step))
    cursor = spec.plan.cursor_at(from_step)
    if spec.pool.engine == "inline":
        max_actors = 0
        digests = list(digested(inline_batches(spec, cursor)))
    else:
        from raypipe.rayext.allocation import preflight
        from raypipe.rayext.cluster import connect
        from raypipe.streaming.pipeline import splits

        # A few actors may share a CPU, so pools can be compared on any machine; a large pool is made smaller.
        pool = dataclasses.replace(
            spec.pool, min_actors=min(spec.pool.min_actors, _SHARING)
        )
        few = max(pool.least_actors, min(pool.max_actors, _SHARING))
        connect(num_cpus=max(num_cpus(), few))
        max_actors, spec = (
            preflight(pool).max_actors,
            dataclasses.replace(spec, pool=pool),
        )
        iterators = splits(spec, cursor, max_actors=max_actors, world_size=workers)
        digests = list(iterate_digests(spec.plan, cursor, iterators))
    settings = plain_settings(
        spec, workers=workers, actors=max_actors, from_step=from_step, to_step=to_step
    )
    written = DigestFile(
        output, settings, {hashed.name: hashed.digest.hex() for hashed in digests}
    )
    result: dict[str, Any] = {
        "store": spec.stores["train"].address,
        "digest": combine(hashed.digest for hashed in digests),
        "samples": sum(hashed.num_samples for hashed in digests),
        "micro_batches": len(digests),
    }
    if output:
        written.write()
        result["output"] = output
    if expected:
        result |= compared_with(expected, written)
    return result


def print_digests(result: dict[str, Any]) -> None:
    """Print digests, or a comparison: both values of each setting that differs, and the verdict."""
    differ = {
        "settings": {
            name: tuple(pair) for name, pair in result.get("settings", {}).items()
        }
    }
    rows = {
        name: value
        for name, value in (result | differ).items()
        if value != {} and name != "store"
    }
    print_table(result.get("store", "comparison"), rows)
    if "equal" in result:
        verdict = "{different} of {compared} micro-batches differ"
        print(
            (
                "equal over {compared} micro-batches" if result["equal"] else verdict
            ).format_map(result)
        )
