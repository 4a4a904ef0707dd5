"""The commands that audit stores, their bad samples, streams, and runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.logs import table
from raypipe.lookup import num_cpus
from raypipe.storage.filesystem import as_uri, join

# Actors of a digest that a machine with fewer CPUs lets share them.
_SHARING = 4


def inspect(
    run: RunConfig,
    target: str = "",
    *,
    verify: bool = False,
    show_plan: bool = False,
    output: str = "",
    add_sizes: bool = False,
) -> dict[str, Any]:
    """Print what a store is, or what a run draws of it; find all samples that cannot be decoded; or add sizes.

    Example: raypipe inspect train.lmdb
    Example: raypipe inspect --config run.yaml --show-plan
    Example: raypipe inspect train.lmdb --verify --output bad.json
    Example: raypipe inspect train.tar --add-sizes

    Args:
        run: settings, of which those of the store, its columns, and of masks and boxes, matter; with --show-plan
            those of the plan as well; for sizes transform.apply_exif.
        target: see `settings.command_parser`.
        verify: read and decode every sample, in parallel on Ray.
        show_plan: show what an epoch of the run contains: steps, left-overs, sources, classes, draws of a sample.
        output: with --verify: where to write the list of bad samples, for --store.exclude, a local path or
            a URI; empty = NAME.bad.json in this folder, if any are bad.
        add_sizes: write the width and height of every image, by its header, to a file beside the store, where
            filters and weights find them; in parallel on Ray.
    """
    from raypipe.commands import image_sizes, inspection
    from raypipe.streaming.opening import open_train, run_columns
    from raypipe.transform.targets import check_columns

    if output and not verify:
        raise ConfigError("--output is for the list of bad samples that --verify finds: give both, or neither")
    if show_plan + verify + add_sizes > 1:
        raise ConfigError(
            "--verify finds a store's bad samples, --show-plan shows an epoch, and --add-sizes writes sizes "
            "beside the store: give one at a time"
        )
    if show_plan:
        return _show_plan(run)
    store, targets = open_train(run), run.transform.target_columns
    if add_sizes:
        sizes = image_sizes.add_sizes(store, exif=run.transform.apply_exif)
        table(store.address, sizes)
        return sizes
    check_columns(store, targets, "transform.{}_column")
    if not verify:
        description = inspection.describe(store, targets)
        table(store.address, description)
        return description
    summary = inspection.verify(store, output, targets=targets, columns=run_columns(run, store))
    reasons, rows = summary.pop("reasons"), dict(summary)
    for first, name, num, error in reasons:
        others = f" and {num - 1:,} others" if num > 1 else ""
        rows[f"sample {first}{others}"] = f"{error} ({name})" if name else error
    if summary["bad"]:
        rows["to exclude them"] = f"--store.exclude {summary['list']}"
    table(store.address, rows)
    return summary


def _show_plan(run: RunConfig) -> dict[str, Any]:
    from raypipe.commands.plan_summary import summary
    from raypipe.streaming.opening import spec_of

    spec = spec_of(run)
    contents = summary(spec)
    rows = dict(contents)
    if classes := rows.pop("classes", None):
        for which, shares in zip(("stored", "drawn"), zip(*classes.values(), strict=True), strict=True):
            rows[f"shares of {len(classes)} classes, {which}"] = f"{min(shares):.3%} to {max(shares):.3%}"
    table(spec.stores["train"].address, rows)
    return contents


def digest(
    run: RunConfig,
    target: str = "",
    *,
    from_step: int = 0,
    to_step: int = 0,
    output: str = "",
    compare: str = "",
) -> dict[str, Any]:
    """Print the digest of a stream: a hash over index, label and pixels of every micro-batch, in order.

    Example: raypipe digest train.lmdb --plan.epochs 2 --train.num_workers 2 --from-step 10 --to-step 20
    Example: raypipe digest runs/20261121-104600-3fa2 --to-step 50 --pool.engine inline

    Args:
        run: settings. train.num_workers consumers share each step, 1 where it is 0; of the pool's actors there may
            be more than CPUs.
        target: see `settings.command_parser`.
        from_step: resume at this training step, counted through all epochs.
        to_step: end before this training step, including a validation before it; 0 = at the end.
        output: write the settings and the digest of every micro-batch to this file, a local path or a URI.
        compare: compare with such a file; exit code 1 where they differ.
    """
    from raypipe.storage.files import check_place
    from raypipe.streaming.digest import DigestFile, combine, digested, iterate_digests, settings_of
    from raypipe.streaming.digest import compare as compared_with
    from raypipe.streaming.inline import inline_batches
    from raypipe.streaming.opening import spec_of

    spec, workers = spec_of(run), run.train.num_workers or 1
    spec.plan.check_workers(workers)
    total = spec.plan.config.epochs * spec.plan.steps_per_epoch
    to_step = to_step or total
    if not 0 <= from_step < to_step <= total:
        raise ConfigError(
            f"--from-step {from_step} and --to-step {to_step} are not a range within the run's {total} steps"
        )
    expected = DigestFile.read(compare) if compare else None
    if output:
        check_place(output)
    spec = dataclasses.replace(spec, plan=spec.plan.until(to_step))
    cursor = spec.plan.cursor_at(from_step)
    if spec.pool.engine == "inline":
        most, digests = 0, list(digested(inline_batches(spec, cursor)))
    else:
        from raypipe.rayext.allocation import preflight
        from raypipe.rayext.cluster import connect
        from raypipe.streaming.pipeline import splits

        # A few actors may share a CPU, so that pools can be compared anywhere; a large run's is made smaller.
        pool = dataclasses.replace(spec.pool, min_actors=min(spec.pool.min_actors, _SHARING))
        few = max(pool.least_actors, min(pool.max_actors, _SHARING))
        connect(num_cpus=max(num_cpus(), few))
        most, spec = preflight(pool).max_actors, dataclasses.replace(spec, pool=pool)
        iterators = splits(spec, cursor, max_actors=most, world_size=workers)
        digests = list(iterate_digests(spec.plan, cursor, iterators))
    settings = settings_of(spec, workers=workers, actors=most, from_step=from_step, to_step=to_step)
    written = DigestFile(output, settings, {one.name: one.digest.hex() for one in digests})
    result: dict[str, Any] = {
        "digest": combine(one.digest for one in digests),
        "samples": sum(one.num_samples for one in digests),
        "micro_batches": len(digests),
    }
    if output:
        written.write()
        result["output"] = output
    if expected:
        result |= compared_with(expected, written)
    _print_digests(spec.stores["train"].address, result)
    return result


def digest_diff(first: str, second: str) -> dict[str, Any]:
    """Compare two files that `raypipe digest --output` wrote, over the micro-batches that both have.

    Exit code 1 where they differ. Example: raypipe digest-diff one-gpu.json four-gpus.json

    Args:
        first: a file of digests.
        second: the file to compare it with.
    """
    from raypipe.streaming.digest import DigestFile, compare

    result = compare(DigestFile.read(first), DigestFile.read(second))
    _print_digests(f"{first}, {second}", result)
    return result


def _print_digests(heading: str, result: dict[str, Any]) -> None:
    """Print digests; of a comparison also both values of each setting that differs, and the verdict."""
    differ = {"settings": {name: tuple(pair) for name, pair in result.get("settings", {}).items()}}
    table(heading, {name: value for name, value in (result | differ).items() if value != {}})
    if "equal" in result:
        verdict = "{different} of {compared} micro-batches differ"
        print(("equal over {compared} micro-batches" if result["equal"] else verdict).format_map(result))


def report(run: RunConfig, folder: str = "", *, against: str = "", output: str = "") -> dict[str, Any]:
    """Write the HTML page of a run, also of one that is still going on, or compare two runs on one page.

    Example: raypipe report runs/baseline --against runs/strong

    Args:
        run: settings, of which storage_path and name matter, without a folder.
        folder: of the run, a path or a URI.
        against: another run, to draw into the same charts.
        output: where to write the page, a local path or a URI; also -o; empty = report.html in the run's folder.
    """
    from raypipe.pages.report import write_report

    if not (folder or run.name):
        raise ConfigError("the report needs a run: give its folder, or set name")
    result = write_report(folder or join(as_uri(run.storage_path), run.name), against, output)
    for summary in filter(None, (result, result["against"])):
        table(summary["run"], {name: value for name, value in summary.items() if name != "against"})
    return result
