"""The row of the stream, which is one micro-batch and one Ray block: its columns, dtypes and shapes.

from the source   split int8; epoch, step, micro int64: its place, which is all that an actor needs that reads
from a reader     the same; encoded, mask, boxes, label, lists of B; null in a split left to the actors
from an actor     the same, (1,) each; image uint8 (1, B, H, W, 3), or, for the device to decode, the arrays of an
                  EncodedMicroBatch, each (1, …); of streams that have them, mask uint8 (1, B, H, W), boxes
                  float32 (1, B, K, 5); label, index int64 (1, B), weight float32 (1, B), num_bad int64 (1,),
                  read_s, work_s float64 (1,): seconds that the actor spent on it, reading, and in all
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raypipe.failures import cause_of
from raypipe.plan.schedule import PADDING, MicroBatchId, Split
from raypipe.stores.base import Store
from raypipe.transform.micro_batch import HostBatch, MicroBatchResult, read_encoded
from raypipe.transform.sample_transform import EncodedSample
from raypipe.transform.targets import as_bytes

if TYPE_CHECKING:
    from ray.data import DataIterator

_SPLITS: tuple[Split, ...] = ("train", "val")
# The arrays of an EncodedMicroBatch, in the order in which they are hashed.
_ENCODED = ("data", "offsets", "crop", "flip", "ok")
_BINARIES = pa.list_(pa.large_binary())
PLACE_SCHEMA = pa.schema(
    [("split", pa.int8()), ("epoch", pa.int64()), ("step", pa.int64()), ("micro", pa.int64())]
)
_READ = {"encoded": _BINARIES, "mask": _BINARIES, "boxes": _BINARIES, "label": pa.list_(pa.int64())}
READ_SCHEMA = pa.schema([*PLACE_SCHEMA, *_READ.items()])

_RAY_DATA_THREAD = "iter_threaded"
_THREAD_S = 5.0  # for a call to Ray that it is in

Read = tuple[list[EncodedSample], np.ndarray]
"""B samples, and labels int64 (B,); padding has no image, and label 0."""


def place_of(row: Mapping[str, Any]) -> MicroBatchId:
    """The place in the run of one row of scalars."""
    return MicroBatchId(_SPLITS[int(row["split"])], int(row["epoch"]), int(row["step"]), int(row["micro"]))


def read_samples(store: Store, indices: np.ndarray, targets: Mapping[str, str] | None = None) -> Read:
    """Samples and labels of int64 indices (B,).

    Args:
        targets: see `read_encoded`.
    """
    real = indices != PADDING
    read, read_labels = read_encoded(store, indices[real], targets)
    if real.all():
        return read, read_labels
    samples = [EncodedSample(None)] * len(indices)
    labels = np.zeros(len(indices), np.int64)
    for position, sample in zip(np.flatnonzero(real), read, strict=True):
        samples[position] = sample
    labels[real] = read_labels
    return samples, labels


def source_row(at: MicroBatchId, read: Read | None, schema: pa.Schema) -> pa.Table:
    """A row of the source, or, with what was read, of a reader."""
    row: list[Any] = [_SPLITS.index(at.split), at.epoch, at.step, at.micro]
    if read is None:
        row += [None] * (len(schema) - len(row))
    else:
        images, *targets = zip(*read[0], strict=True)
        row += [images, *([as_bytes(value) for value in column] for column in targets), read[1]]
    arrays = [pa.array([value], field.type) for value, field in zip(row, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def read_of(table: pa.Table) -> Read | None:
    """What a reader has put into a row; None where it is left to the actor."""
    if "encoded" not in table.column_names or not table["encoded"][0].is_valid:
        return None
    columns = [table[name][0].as_py() for name in ("encoded", "mask", "boxes")]
    samples = [EncodedSample(*sample) for sample in zip(*columns, strict=True)]
    return samples, np.asarray(table["label"][0].values)


def made_row(at: MicroBatchId, result: MicroBatchResult, read_s: float, work_s: float) -> dict[str, np.ndarray]:
    """The row of a finished micro-batch."""
    return {
        "split": np.array([_SPLITS.index(at.split)], np.int8),
        "epoch": np.array([at.epoch]),
        "step": np.array([at.step]),
        "micro": np.array([at.micro]),
        **{name: array[None] for name, array in result.arrays.items()},
        "label": result.label[None],
        "index": result.index[None],
        "weight": result.weight[None],
        "num_bad": np.array([len(result.bad)]),
        "read_s": np.array([read_s]),
        "work_s": np.array([work_s]),
    }


def host_batch(row: Mapping[str, Any]) -> HostBatch:
    """A finished row as a micro-batch in host memory."""
    first = {name: column[0] for name, column in row.items()}
    encoded = {name: first[name] for name in _ENCODED if name in first}
    return HostBatch(
        at=place_of(first),
        image=first.get("image", np.empty(0, np.uint8)),
        encoded=encoded or None,
        label=first["label"],
        weight=first["weight"],
        index=first["index"],
        num_bad=int(first["num_bad"]),
        read_s=float(first["read_s"]),
        work_s=float(first["work_s"]),
        mask=first.get("mask"),
        boxes=first.get("boxes"),
    )


def host_batches(iterator: DataIterator) -> Iterator[HostBatch]:
    """The rows of a stream's split as micro-batches in host memory, zero-copy and read-only.

    Raises:
        RaypipeError: what went wrong in an actor, without the layers around it.
    """
    failure: BaseException | None = None
    before, threads = set(threading.enumerate()), list[threading.Thread]()
    try:
        for row in iterator.iter_batches(
            batch_size=None,  # type: ignore[arg-type]
            batch_format="numpy",
            prefetch_batches=1,
        ):
            if not threads:
                threads = [t for t in threading.enumerate() if t.name == _RAY_DATA_THREAD and t not in before]
            yield host_batch(row)
    except Exception as error:
        failure = cause_of(error)
    finally:
        del iterator
        # An execution is a ring of references. As long as it is not collected, actors that it has let go of may
        # keep their CPUs, and a cluster that is in use no more looks busy to the next run.
        gc.collect()
        # Nobody waits for these. One that calls Ray after `ray.shutdown()` ends the process: exit code 1, no word.
        for thread in threads:
            thread.join(_THREAD_S)
    # Here, and not above: the error would hold on to the frames of the execution.
    if failure is not None:
        raise failure
