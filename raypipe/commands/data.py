"""The commands that inspect, verify, convert and draw stores: they call the library with the settings of a run.

Ray, torch and the decoders are imported where a command needs them, so that a help text or a typo takes no time.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.printing import print_table

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec


def inspect_store(run: RunConfig, target: str = "") -> dict[str, Any]:
    """Describe a store: format, columns, classes, and a few of its images.

    Examples:
        raypipe inspect train.lmdb
        raypipe inspect 's3://bucket/train-*.parquet' --store.image-column img
    """
    from raypipe.commands.inspection import describe
    from raypipe.streaming.opening import open_train
    from raypipe.transform.checks import check_target_columns

    store = open_train(run)
    targets = run.transform.target_columns
    check_target_columns(store, targets)
    return describe(store, targets, run.transform.boxes_format)


def verify_store(
    run: RunConfig, target: str = "", *, output: str = ""
) -> dict[str, Any]:
    """Read and decode every sample of a store, and list the bad ones.

    Examples:
        raypipe verify train.lmdb
        raypipe verify s3://bucket/train.parquet --output bad.json

    Args:
        output: where to write the list of bad samples, for --store.exclude, a local path or a URI; empty =
            NAME.bad.json in this folder, if any sample is bad.
    """
    from raypipe.commands import inspection
    from raypipe.streaming.opening import open_train, run_columns
    from raypipe.transform.checks import check_target_columns

    store = open_train(run)
    targets = run.transform.target_columns
    check_target_columns(store, targets)
    columns = run_columns(run, store)
    form = run.transform.boxes_format
    summary = inspection.verify(
        store, output, targets=targets, columns=columns, boxes_format=form
    )
    return {"store": store.address, **summary}


def print_verified(summary: dict[str, Any]) -> None:
    """Print a verification: each reason with the first sample that has it, and how to exclude them."""
    rows = {
        name: value
        for name, value in summary.items()
        if name not in ("store", "reasons")
    }
    for reason in summary["reasons"]:
        if reason["samples"] > 1:
            more = f" and {reason['samples'] - 1:,} more"
        else:
            more = ""
        name = f" ({reason['name']})" if reason["name"] else ""
        rows[f"sample {reason['index']}{more}"] = reason["error"] + name
    if summary["bad_samples"]:
        rows["to exclude them"] = f"--store.exclude {summary['list']}"
    print_table(summary["store"], rows)


def convert_store(
    run: RunConfig,
    src: str,
    dst: str,
    *,
    short_side: int = 0,
    quality: int = 90,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    sizes: bool = True,
    seekable: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Copy any store or format into an LMDB or Parquet store, and verify it.

    Other formats are TFRecord, HDF5, MXNet .rec, zip, .npz, .pt, MDS, LitData, and Arrow (save_to_disk).

    Examples:
        raypipe convert imagenet.tar imagenet.lmdb --short-side 256 --quality 92
        raypipe convert 'imagenet/train-*-of-01024' train.lmdb
        raypipe convert train.h5 train.lmdb --store.image-column frames --store.target-column y
        raypipe convert 'train-*.parquet' s3://bucket/train.lmdb --on-bad-sample skip

    Args:
        run: Here the options of store.* that say how to read, and, for sizes, transform.apply_exif matter.
        src: a store or another format; several files as 'train-*.parquet'; or MODULE:NAME, your own function that
            yields samples, such as {'image': bytes, 'label': 3}.
        dst: a path or a URI, such as s3://bucket/train.lmdb, that ends in .lmdb or .parquet.
        short_side: decode, and store JPEGs with this shorter side, in pixels; 0 = the bytes as they are.
        quality: JPEG quality for --short-side, 1 to 100.
        shards: files of the new store; 0 = 1 GiB each.
        on_bad_sample: stop with an error, or skip samples that have no bytes or cannot be decoded.
        sizes: add columns width and height, in pixels; -1 = not in the image's header.
        seekable: store JPEGs so that crops decode faster, with the same pixels.
        overwrite: replace a store at DST.
    """
    # no other command needs all formats
    return import_module("raypipe.commands.convert").convert(
        src,
        dst,
        image_column=run.store.image_column,
        target_column=run.store.target_column,
        trust_pickles=run.store.trust_pickles,
        short_side=short_side,
        quality=quality,
        shards=shards,
        on_bad_sample=on_bad_sample,
        sizes=sizes,
        exif=run.transform.apply_exif,
        seekable=seekable,
        overwrite=overwrite,
    )


def draw_preview(
    run: RunConfig,
    target: str = "",
    *,
    output: str = "preview.png",
    show_epochs: int = 3,
    samples: int = 6,
    indices: list[int] = [],  # noqa: B006  no code changes it
) -> dict[str, Any]:
    """Draw samples as a run feeds them: transformed, augmented, mixed.

    Examples:
        raypipe preview train.lmdb -o grid.png --augment.preset strong --augment.cutmix-alpha 1
        raypipe preview --config run.yaml --indices [3,14,15]

    Args:
        output: the PNG to write.
        show_epochs: how many epochs to show, evenly spread over the run.
        samples: how many samples to show, the first of the run.
        indices: show these samples instead, as in [3,14,15].
    """
    from raypipe.commands import preview as preview_module
    from raypipe.streaming.opening import open_train, spec_of

    opened = open_train(run)
    store = replace(
        run.store,
        val="",
        target_column=run.store.target_column if "label" in opened.schema.names else "",
    )

    def spec_at(size: int) -> StreamSpec:
        plan = replace(
            run.plan, micro_batch_size=size, global_batch_size=size * run.plan.per_step
        )
        return spec_of(replace(run, plan=plan, store=store))

    try:
        spec = spec_at(run.plan.micro_batch_size)
    except ConfigError:
        # a first look at a few samples, fewer than a step; another mistake is met again
        spec = spec_at(min(run.plan.micro_batch_size, spec_at(1).plan.steps_per_epoch))
    return preview_module.preview(
        spec,
        output,
        augment=run.augment,
        epochs=show_epochs,
        samples=samples,
        indices=indices,
    )
