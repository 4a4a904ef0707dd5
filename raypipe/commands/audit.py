"""The commands that audit: what a store is, which of its samples are bad, whether two streams are the same, and
what has become of a run.

They are part of the command line, see `raypipe.commands.cli`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.logs import shown, table
from raypipe.plan.schedule import rank_groups
from raypipe.stores import open_store, store_options


def inspect(
    store: str,
    *,
    verify: bool = False,
    output: str = "",
    html: str = "",
    mask_column: str = "",
    boxes_column: str = "",
    **columns: str,
) -> dict[str, Any]:
    """Print or draw what a store is, or find every sample of it that cannot be read and decoded.

    Example: raypipe inspect train.lmdb --html train.html
    Example: raypipe inspect train.lmdb --verify --output bad.json

    Args:
        store: LMDB, Parquet, tar, zip, a folder of class folders, TFRecord or HDF5.
        verify: read and decode every sample, in parallel on Ray.
        output: with --verify: where to write the list of bad samples, for --store.leave_out, a local path or
            a URI; empty = NAME.bad.json in this folder, if any are bad.
        html: write a page of samples, classes, sizes and mixing here, a local path or a URI.
        mask_column: column of masks to decode and check as well; empty = none.
        boxes_column: the same, of boxes.
    """
    from raypipe.commands import inspection
    from raypipe.transform.targets import check_columns

    if output and not verify:
        raise ConfigError("--output is for the list of bad samples that --verify finds: give both, or neither")
    if html and verify:
        raise ConfigError("--html shows what a store is, and --verify finds its bad samples: give one at a time")
    opened = open_store(store, **store_options(**columns))
    targets = TransformConfig(mask_column=mask_column, boxes_column=boxes_column).target_columns
    check_columns(opened, targets, "--{}-column")
    if not verify:
        found = inspection.describe(opened, targets)
        if html:
            from raypipe.commands import store_page

            found["html"] = store_page.write_page(opened, found, html)
        table(store, [(name.replace("_", " "), shown(value)) for name, value in found.items()])
        return found
    found = inspection.verify(opened, output, targets=targets)
    rows = [
        ("samples", f"{found['samples']:,}"),
        ("bad", f"{found['bad']:,}"),
        ("images/s", f"{found['images_per_s']:,.0f}"),
    ]
    for first, name, number, error in found.pop("reasons"):
        others = f" and {number - 1:,} others" if number > 1 else ""
        rows.append((f"sample {first}{others}", f"{error} ({name})" if name else error))
    if found["bad"]:
        rows += [("to do without them", f"--store.leave_out {found['list']}")]
    table(store, rows)
    return found


def digest(
    store: str,
    *,
    val: str = "",
    epochs: int = 1,
    micro_batch: int = 64,
    per_step: int = 1,
    actors: int = 0,
    workers: int = 1,
    executions: int = 1,
    from_step: int = 0,
    to_step: int = 0,
    unbroken: bool = True,
    seed: int = 0,
    shuffle: Literal["auto", "global", "window", "off"] = "auto",
    transform: str | list[dict[str, Any]] = "light",
    val_transform: str | list[dict[str, Any]] = "center",
    size: int = 224,
    cache: Literal["off", "disk"] = "off",
    mask_column: str = "",
    boxes_column: str = "",
    leave_out: str = "",
    val_leave_out: str = "",
    output: str = "",
    compare: str = "",
    **columns: str,
) -> dict[str, Any]:
    """Print the digest of a stream: a hash over index, label and pixels of every micro-batch, in order.

    Example: raypipe digest train.lmdb --epochs 2 --per-step 4 --workers 2 --from-step 10 --to-step 20

    Args:
        store: the training store.
        val: the validation store; empty = no validation segments.
        epochs: passes over the store.
        micro_batch: B, samples in a micro-batch.
        per_step: M, micro-batches in a step.
        actors: transform actors; 0 = what the cluster has.
        workers: W, consumers that share each step.
        executions: G, Ray Data executions that share the workers.
        from_step: resume at this training step, counted through all epochs, and compare with the same tail
            of an unbroken run.
        to_step: end before this training step, a validation that lies before it included; 0 = at the end.
        unbroken: with from_step: run the unbroken stream as well. --unbroken=false saves its time.
        seed: the run's seed.
        shuffle: global, window, off, or auto.
        transform: preset, module:function, a list of Albumentations transforms, or a file of one (*.yaml, *.json),
            for training segments.
        val_transform: the same for validations.
        size: side of the images that the presets make, in pixels.
        cache: keep decoded samples on each node, see pool.cache.
        mask_column: column of masks, which are part of the digest; empty = none.
        boxes_column: the same, of boxes.
        leave_out: list of bad samples of the training store, from `raypipe inspect --verify`, to do without.
        val_leave_out: the same, of the validation store.
        output: write the settings and the digest of every micro-batch to this file, a local path or a URI.
        compare: compare with such a file; exit code 1 where they differ.
    """
    from raypipe.rayext.cluster import connect, preflight
    from raypipe.storage.whole_file import check_place
    from raypipe.streaming.digest import DigestFile, combine, iterate_digests, settings_of
    from raypipe.streaming.digest import compare as compared_with
    from raypipe.streaming.spec import StreamSpec

    options = store_options(**columns)
    spec = StreamSpec.of(
        open_store(store, **options),
        open_store(val, **options) if val else None,
        plan=PlanConfig(epochs, micro_batch, per_step, seed, shuffle),
        transform=TransformConfig(
            train=transform, val=val_transform, size=size, mask_column=mask_column, boxes_column=boxes_column
        ),
        pool=PoolConfig(
            executions=executions, min_actors=max(1, actors // executions), max_actors=actors, cache=cache
        ),
        leave_out=leave_out,
        val_leave_out=val_leave_out,
    )
    spec.plan.check_workers(workers)
    rank_groups(workers, executions)
    total = epochs * spec.plan.steps_per_epoch
    to_step = to_step or total
    if not 0 <= from_step < total:
        raise ConfigError(f"--from-step {from_step} is outside the run's {total} steps")
    if not from_step < to_step <= total:
        raise ConfigError(
            f"--to-step {to_step} is not after --from-step {from_step} within the run's {total} steps"
        )
    expected = DigestFile.read(compare) if compare else None
    if output:
        check_place(output)
    # Asked for more actors than there are CPUs: let them share, so that any pool can be tried anywhere.
    cpus = len(os.sched_getaffinity(0))
    connect(num_cpus=max(cpus, actors, executions))
    spec = dataclasses.replace(spec, plan=spec.plan.until(to_step))
    pool: dict[str, int] = {"max_actors": preflight(spec.pool).max_actors, "world_size": workers}
    settings = settings_of(spec, workers=workers, actors=pool["max_actors"], from_step=from_step, to_step=to_step)
    digests = list(iterate_digests(spec, spec.plan.cursor_at(from_step), **pool))
    made = DigestFile(output, settings, {one.name: one.digest.hex() for one in digests})
    found: dict[str, Any] = {
        "digest": combine(one.digest for one in digests),
        "samples": sum(one.num_samples for one in digests),
        "micro_batches": len(digests),
    }
    if output:
        made.write()
        found["output"] = output
    if from_step and unbroken:
        whole = [one.digest for one in iterate_digests(spec, spec.plan.start(), **pool)]
        found |= {"unbroken_digest": combine(whole), "unbroken_tail_digest": combine(whole[-len(digests) :])}
    rows = [(name.replace("_", " "), str(value)) for name, value in found.items()]
    if expected:
        compared = compared_with(expected, made)
        rows += _rows_of(compared)
        found |= compared
    table(store, rows)
    return found


def digest_diff(first: str, second: str) -> dict[str, Any]:
    """Compare two files that `raypipe digest --output` wrote, over the micro-batches that both have.

    Exit code 1 where they differ. Example: raypipe digest-diff one-gpu.json four-gpus.json

    Args:
        first: a file of digests.
        second: another one.
    """
    from raypipe.streaming.digest import DigestFile, compare

    found = compare(DigestFile.read(first), DigestFile.read(second))
    table(f"{first}, {second}", _rows_of(found))
    return found


def report(run: str, *, against: str = "", output: str = "") -> dict[str, Any]:
    """Write the HTML page of a run, also of one that is still going on, or compare two runs on one page.

    Example: raypipe report runs/baseline --against runs/strong

    Args:
        run: the run's folder, a path or a URI.
        against: another run, to draw into the same charts.
        output: where to write the page, a local path or a URI; also -o; empty = report.html in the run's folder.
    """
    from raypipe.pages import report as report_module

    found = report_module.write_report(run, against, output)
    rows = [("page", found["report"].removeprefix("file://")), ("steps", f"{found['steps']:,}")]
    for name, key, form in (
        ("images/s, median", "images_per_s", ",.0f"),
        ("waiting for data, median", "wait_fraction", ".1%"),
        ("validation accuracy, last", "val_accuracy", ".4f"),
    ):
        values = [one[key] for one in (found, found["against"]) if one]
        if values[0] is not None:
            rows.append((name, " against ".join("none" if v is None else format(v, form) for v in values)))
    table(run, rows)
    return found


def _rows_of(compared: dict[str, Any]) -> list[tuple[str, str]]:
    """What `raypipe.streaming.digest.compare` found, for people."""
    num = compared["compared"]
    if compared["equal"]:
        rows = [("comparison", f"equal over {num:,} micro-batches")]
    else:
        rows = [
            ("comparison", f"{compared['different']:,} of {num:,} micro-batches differ"),
            ("the first that differs", compared["first_different"]),
        ]
    return rows + [(name, f"{one} / {other}") for name, (one, other) in compared["settings"].items()]
