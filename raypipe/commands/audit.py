"""The commands that audit: what a store is, which of its samples are bad, whether two streams are the same, and
what has become of a run."""

from __future__ import annotations

import dataclasses
import inspect as introspection
import os
from typing import TYPE_CHECKING, Any, Literal

from raypipe.config import PlanConfig, PoolConfig, Shuffle, TransformConfig
from raypipe.errors import ConfigError
from raypipe.logs import shown, table
from raypipe.pages import number
from raypipe.plan.schedule import shares
from raypipe.storage.filesystem import as_uri, exists, join
from raypipe.stores import open_store, store_options

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec


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
        store: LMDB, Parquet, tar, zip, or a folder of class folders.
        verify: read and decode every sample, in parallel on Ray.
        output: with --verify: where to write the list of bad samples, for --store.exclude, a local path or
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
        samples = inspection.sampled(opened, targets)
        found = inspection.describe(opened, samples=samples)
        if html:
            from raypipe.commands import store_page

            found["html"] = store_page.write_page(opened, samples, html)
        table(store, _rows(found))
        return found
    found = inspection.verify(opened, output, targets=targets)
    reasons = found.pop("reasons")
    rows = _rows(found)
    for first, name, num, error in reasons:
        others = f" and {num - 1:,} others" if num > 1 else ""
        rows.append((f"sample {first}{others}", f"{error} ({name})" if name else error))
    if found["bad"]:
        rows += [("to exclude them", f"--store.exclude {found['list']}")]
    table(store, rows)
    return found


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A command's result, for people; of two streams, each setting that differs has a row of its own."""
    plain = dict(found)
    differ = plain.pop("settings", {})
    shapes: dict[type, Any] = {float: number, bool: str}
    rows = [(name.replace("_", " "), shapes.get(type(value), shown)(value)) for name, value in plain.items()]
    return rows + [(name, f"{one} / {other}") for name, (one, other) in differ.items()]


def stream_settings(
    epochs: int,
    *,
    micro_batch_size: int = 64,
    global_batch_size: int = 0,
    seed: int = 0,
    shuffle: Shuffle = "auto",
    transform: str | list[dict[str, Any]] = "light",
    size: int = 224,
    mask_column: str = "",
    boxes_column: str = "",
    **columns: str,
) -> tuple[PlanConfig, TransformConfig, dict[str, str]]:
    """The options that commands on a run's stream have in common, as settings of the run and of `open_store`.

    Args:
        epochs: of the run.
        micro_batch_size: B, samples in a micro-batch.
        global_batch_size: samples in a step, a multiple of it; 0 = one micro-batch.
        seed: the run's seed.
        shuffle: global, window, off, or auto.
        transform: of training: preset, module:function, a list of Albumentations transforms, or a file of one
            (*.yaml, *.json).
        size: side of the images that a preset makes, in pixels.
        mask_column: column of masks; empty = none.
        boxes_column: column of boxes; empty = none.
    """
    cpu = TransformConfig(train=transform, size=size, mask_column=mask_column, boxes_column=boxes_column)
    plan = PlanConfig(epochs, micro_batch_size, global_batch_size, seed, shuffle)
    return plan, cpu, store_options(**columns)


def digest(
    store: str,
    *,
    val: str = "",
    epochs: int = 1,
    actors: int = 0,
    workers: int = 1,
    executions: int = 1,
    from_step: int = 0,
    to_step: int = 0,
    val_transform: str | list[dict[str, Any]] = "center",
    cache: Literal["off", "disk"] = "off",
    engine: Literal["ray", "inline"] = "ray",
    exclude: str = "",
    val_exclude: str = "",
    output: str = "",
    compare: str = "",
    trust: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Print the digest of a stream: a hash over index, label and pixels of every micro-batch, in order.

    Example: raypipe digest train.lmdb --epochs 2 --global-batch-size 256 --workers 2 --from-step 10 --to-step 20
    Example: raypipe digest runs/20261121-104600-3fa2 --to-step 50

    Args:
        store: the training store; or the folder of a run, a path or a URI, whose stream it is then.
        val: the validation store; empty = no validation segments.
        epochs: passes over the store.
        actors: transform actors; 0 = what the cluster has.
        workers: W, consumers that share each step.
        executions: G, Ray Data executions that share the workers.
        from_step: resume at this training step, counted through all epochs.
        to_step: end before this training step, a validation that lies before it included; 0 = at the end.
        val_transform: of validations, as transform.
        cache: keep decoded samples on each node, see pool.cache.
        engine: "inline": without Ray, in this process; actors, workers and executions are then nothing.
        exclude: list of bad samples of the training store, from `raypipe inspect --verify`, to exclude.
        val_exclude: the same, of the validation store.
        output: write the settings and the digest of every micro-batch to this file, a local path or a URI.
        compare: compare with such a file; exit code 1 where they differ.
        trust: audit a run in a folder that another user owns, and so run the code that it names.
    """
    from raypipe.storage.files import check_place
    from raypipe.streaming.digest import DigestFile, combine, digested, iterate_digests, settings_of
    from raypipe.streaming.digest import compare as compared_with
    from raypipe.streaming.inline import inline_batches
    from raypipe.streaming.spec import StreamSpec

    pool = PoolConfig(
        executions=executions, min_actors=max(1, actors // executions), max_actors=actors, cache=cache
    )
    if spec := _stream_of_run(store, trust):
        own = {"val": val, "epochs": epochs, "val_transform": val_transform, "exclude": exclude}
        _check_none_given(store, {**own, "val_exclude": val_exclude, **settings})
        spec = spec.replace(pool=pool)
    else:
        plan, cpu, options = stream_settings(epochs, **settings)
        spec = StreamSpec(
            open_store(store, **options),
            open_store(val, **options) if val else None,
            plan=plan,
            transform=dataclasses.replace(cpu, val=val_transform),
            pool=pool,
            exclude=exclude,
            val_exclude=val_exclude,
        )
    spec.plan.check_workers(workers)
    shares(workers, executions)
    total = spec.plan.config.epochs * spec.plan.steps_per_epoch
    to_step = to_step or total
    if not 0 <= from_step < to_step <= total:
        raise ConfigError(
            f"--from-step {from_step} and --to-step {to_step} are no range within the run's {total} steps"
        )
    expected = DigestFile.read(compare) if compare else None
    if output:
        check_place(output)
    spec = spec.replace(plan=spec.plan.until(to_step))
    cursor = spec.plan.cursor_at(from_step)
    if engine == "inline":
        most, digests = 0, list(digested(inline_batches(spec, cursor)))
    else:
        from raypipe.rayext.cluster import connect, preflight
        from raypipe.streaming.pipeline import splits

        # Asked for more actors than there are CPUs: let them share, so that any pool can be tried anywhere.
        connect(num_cpus=max(len(os.sched_getaffinity(0)), spec.pool.max_actors, spec.pool.executions))
        most = preflight(spec.pool).max_actors
        iterators = splits(spec, cursor, max_actors=most, world_size=workers)
        digests = list(iterate_digests(spec.plan, cursor, iterators))
    told = settings_of(spec, workers=workers, actors=most, from_step=from_step, to_step=to_step)
    made = DigestFile(output, told, {one.name: one.digest.hex() for one in digests})
    found: dict[str, Any] = {
        "digest": combine(one.digest for one in digests),
        "samples": sum(one.num_samples for one in digests),
        "micro_batches": len(digests),
    }
    if output:
        made.write()
        found["output"] = output
    if expected:
        found |= compared_with(expected, made)
    table(store, _rows(found))
    if expected:
        print(_verdict(found))
    return found


def _stream_of_run(address: str, trust: bool) -> StreamSpec | None:
    """The stream that a run with this folder has, or would have; None = there is no run."""
    from raypipe.commands.settings import parse_run
    from raypipe.streaming.spec import spec_of

    run_uri = as_uri(address)
    try:
        if not exists(join(run_uri, "config.yaml")):
            return None
    except (ConfigError, OSError):  # what is wrong with the address is told by those who open it as a store
        return None
    run = parse_run([f"--resume={address}", f"--trust={str(trust).lower()}"], None)
    return spec_of(run, run_uri).replace(quarantine="")


def _check_none_given(run: str, settings: dict[str, Any]) -> None:
    """Raise ConfigError where a setting of the stream is not as it is by default: the run has its own."""
    defaults = {
        name: parameter.default
        for function in (stream_settings, digest)
        for name, parameter in introspection.signature(function).parameters.items()
    }
    given = [name for name, value in settings.items() if value != defaults.get(name, value)]
    if given:
        option = given[0].replace("_", "-")
        raise ConfigError(f"{run} is a run, which has its own settings: leave out --{option}")


def digest_diff(first: str, second: str) -> dict[str, Any]:
    """Compare two files that `raypipe digest --output` wrote, over the micro-batches that both have.

    Exit code 1 where they differ. Example: raypipe digest-diff one-gpu.json four-gpus.json

    Args:
        first: a file of digests.
        second: the file to compare it with.
    """
    from raypipe.streaming.digest import DigestFile, compare

    found = compare(DigestFile.read(first), DigestFile.read(second))
    table(f"{first}, {second}", _rows(found))
    print(_verdict(found))
    return found


def _verdict(found: dict[str, Any]) -> str:
    if found["equal"]:
        return f"equal over {found['compared']} micro-batches"
    return f"{found['different']} of {found['compared']} micro-batches differ"


def report(run: str, *, against: str = "", output: str = "") -> dict[str, Any]:
    """Write the HTML page of a run, also of one that is still going on, or compare two runs on one page.

    Example: raypipe report runs/baseline --against runs/strong

    Args:
        run: the run's folder, a path or a URI.
        against: another run, to draw into the same charts.
        output: where to write the page, a local path or a URI; also -o; empty = report.html in the run's folder.
    """
    from raypipe.pages.report import write_report

    found = write_report(run, against, output)
    for summary in filter(None, (found, found["against"])):
        table(summary["run"], _rows({name: value for name, value in summary.items() if name != "against"}))
    return found
