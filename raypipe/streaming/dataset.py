"""The stream for users of Ray Data: an epoch as a `ray.data.Dataset` whose rows are samples.

It runs as any other Dataset, under the user's own `DataContext`; only its order is fixed. A loader reads
`pipeline.block_dataset` instead: rows of whole blocks, under raypipe's own policies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raypipe.config import AtLeast1
from raypipe.errors import ConfigError
from raypipe.library_settings import of_this_process
from raypipe.mistakes import checks_keywords
from raypipe.plan.places import Split
from raypipe.plan.schedule import Plan, Segment
from raypipe.section import check
from raypipe.streaming.row import batches_of
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.worker import TransformWorker
from raypipe.transform.fields import COLUMN, LABEL, VIEW, MicroBatch, Ragged, images_in

if TYPE_CHECKING:
    from ray.data import Dataset

_PLACE = ("index", "weight", "epoch", "step", "micro")


@checks_keywords
def dataset(
    spec: StreamSpec,
    *,
    epoch: int | None = 0,
    split: Split = "train",
    first_step: int = 0,
    max_actors: int | None = None,
    channels_first: bool = False,
) -> Dataset:
    """Return an epoch of the stream as a `ray.data.Dataset`, for pipelines of Ray Data.

    A row is a sample, and a block is a micro-batch, in the order of the plan, with the pixels that a loader gives:

        image            uint8 (H, W, 3), or as the transform makes arrays; views by their names
        label            int64, or the target's array; masks, boxes and keypoints by their names
        NAME             a column of the stream
        index            int64, the sample's number in the store; -1 = padding of a validation
        weight           float32; 0 = padding, or a bad sample of a validation: do not count it
        epoch, step, micro   int64, the place of its micro-batch

    `streaming_split(W, equal=True)` gives split r the micro-batches m with m mod W = r, as rank r of W gets them.

    Args:
        spec: the stream.
        epoch: the epoch; None = the training of all epochs, one after the other.
        split: "train" or "val".
        first_step: steps of the epoch to leave out, without making them: where a stopped run continues.
        max_actors: transform actors that the pool may grow to; None = `pool.max_actors`, or as Ray Data decides.
        channels_first: images as (3, H, W) instead of (H, W, 3).

    Raises:
        ConfigError: the plan has no such epoch, step or validation, or two columns have one name.
    """
    check("raypipe.dataset: spec", spec, StreamSpec)
    check("raypipe.dataset: max_actors", max_actors, AtLeast1 | None)
    plan = _part_of(spec.plan, epoch, split, first_step)
    entry_names = {*_PLACE, LABEL, "image", *spec.transform.target_columns}
    if clash := entry_names & spec.columns.types.keys():
        raise ConfigError(
            f"raypipe.dataset: column {min(clash)!r} has the name of an entry: rename it"
        )

    import ray.data

    from raypipe.rayext.cluster import connect
    from raypipe.rayext.execution import single_rows
    from raypipe.rayext.placement import placement
    from raypipe.streaming.source import MicroBatchSource
    from raypipe.streaming.spec import check_pickles
    from raypipe.streaming.supervisor import start_supervisor

    check_pickles(spec)
    connect()
    supervisor = start_supervisor(spec.run, spec.log_format, watches=False)
    source = MicroBatchSource(
        replace(spec, plan=plan), plan.cursor(0, 0), spec.readers(), supervisor
    )
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    pool = spec.pool
    of_actor = replace(spec, library_settings=of_this_process())
    with ray.data.DataContext.current(context):
        places = ray.data.read_datasource(
            source, override_num_blocks=source.num_tasks, num_cpus=0
        )
        return single_rows(places).map_batches(
            SampleWorker,
            fn_constructor_args=(of_actor, supervisor, channels_first),
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=pool.cpus_per_actor,
            **placement(),
            compute=ray.data.ActorPoolStrategy(
                min_size=pool.min_actors, max_size=max_actors or pool.max_actors or None
            ),
        )


def _part_of(plan: Plan, epoch: int | None, split: Split, first_step: int) -> Plan:
    """Return a plan whose schedule is one segment, or the training of all epochs."""
    check("raypipe.dataset: split", split, Split)
    steps = plan.steps_per_epoch if split == "train" else plan.val_steps
    if not steps:
        raise ConfigError(
            "raypipe.dataset: this stream has no validation: give open_stream a second store"
        )
    if epoch is None:
        if split == "val" or first_step:
            raise ConfigError(
                "raypipe.dataset: a validation, or a first step, needs the number of an epoch"
            )
        return replace(plan, validation=None, num_val=0, num_val_rows=0)
    if not 0 <= check("raypipe.dataset: epoch", epoch, int) < plan.config.epochs:
        raise ConfigError(
            f"raypipe.dataset: epoch is {epoch}, and the plan has {plan.config.epochs} (plan.epochs)"
        )
    if not 0 <= check("raypipe.dataset: first_step", first_step, int) < steps:
        raise ConfigError(
            f"raypipe.dataset: first_step is {first_step}, and the epoch has {steps} steps"
        )
    if split == "train":
        return plan.only(plan.training_of(epoch, first_step))
    return plan.only(Segment(split, epoch, first_step, steps))


class SampleWorker:
    """Transform actor that maps a row of the source, which names a micro-batch, to the micro-batch's samples.

    Args:
        spec: the stream.
        supervisor: handle of its Supervisor.
        channels_first: whether images are (3, H, W).
    """

    def __init__(self, spec: StreamSpec, supervisor: Any, channels_first: bool) -> None:
        self._worker = TransformWorker(spec, supervisor)
        self._channels_first = channels_first

    def __call__(self, table: pa.Table) -> dict[str, Any]:
        """Return a micro-batch, by column."""
        (batch,) = batches_of(self._worker(table))
        return samples_of(batch, self._channels_first)


def samples_of(batch: MicroBatch, channels_first: bool = False) -> dict[str, Any]:
    """Return the columns of a micro-batch's samples: arrays (B, …), or lists of B values."""
    fields = dict(batch.fields)
    if channels_first:
        for name, image in images_in(batch.arrays()).items():
            fields[name] = np.ascontiguousarray(np.moveaxis(image, -1, -3))
    columns: dict[str, Any] = {}
    for name, values in fields.items():
        group, _, column_name = name.partition(".")
        columns[column_name if group in (COLUMN, VIEW) else name] = _column(values)
    columns |= {"index": batch.index, "weight": batch.weight}
    for name in ("epoch", "step", "micro"):
        columns[name] = np.full_like(batch.index, getattr(batch.position, name))
    return columns


def _column(values: np.ndarray | Ragged) -> Any:
    if isinstance(values, np.ndarray):
        return values
    if values.kind == "json":
        # rows of one column may have values of any kind: they stay text
        return Ragged("text", values.values, values.offsets).unpacked()
    return values.unpacked()
