"""The row of the stream, which is one block of k micro-batches, of one rank and one segment: its columns.

from the source   split int8, epoch int64; step, micro int64, lists of k: their places, all that an actor needs
                  if it reads; and a reader's data, null in a split that actors read: image, label,
                  lists of k·B; columns, of all samples, a stream of Arrow's, null if there are none; read_s,
                  outage_s float64, seconds that the reader spent on the block, and waited for a storage
from an actor     split, epoch (1,); step, micro (1, k); index int64 (1, k, B), weight float32 (1, k, B); num_bad
                  and num_remembered int64 (1, k); read_s, work_s, outage_s float64 (1, k): seconds spent
                  on each micro-batch, reading, by the actor or a reader, in all by the actor, and waited for a
                  storage; and each field, see `raypipe.transform.fields`, in the form that forms, JSON in uint8
                  (1, n), gives for it:

                      flat     (1, n), all end to end; NAME:shapes int64 (1, k, d) has their shapes
                      apart    NAME:0 to NAME:k-1, each (1, B, …), such as images that come from k places: Ray
                               copies them once into the object store, and they are not put together before
                      KIND     (1, n), all end to end, of a `Ragged` of that kind; NAME:offsets int64 (1, k, B + 1)
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raypipe.metrics.tracer import traced
from raypipe.plan.places import MicroBatchId, Split
from raypipe.rayext.iteration import rows
from raypipe.stores.arrow_columns import image_taker
from raypipe.stores.base import Columns
from raypipe.streaming.blocks import Block
from raypipe.transform.fields import MicroBatch, Ragged

if TYPE_CHECKING:
    from ray.data import DataIterator

_SPLITS: tuple[Split, ...] = ("train", "val")
_FLAT = "flat"
_APART = "apart"
# Bytes of a micro-batch's array. A column costs Ray as much CPU time as to copy about 100 KB.
_LEAST_APART = 1 << 20
_NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})
_SHAPES = ":shapes"
_OFFSETS = ":offsets"
_BINARIES = pa.list_(pa.large_binary())
_NUMBERS = pa.list_(pa.int64())
SOURCE_SCHEMA = pa.schema(
    {
        "split": pa.int8(),
        "epoch": pa.int64(),
        "step": _NUMBERS,
        "micro": _NUMBERS,
        "image": _BINARIES,
        "label": _NUMBERS,
        "columns": pa.large_binary(),
        "read_s": pa.float64(),
        "outage_s": pa.float64(),
    }
)


def source_row(block: Block, samples: Columns | None) -> pa.Table:
    """The row of the source, as Ray has it: a block's places, and its samples, end to end, if a reader reads."""
    row: dict[str, Any] = {
        "split": _SPLITS.index(block[0].split),
        "epoch": block[0].epoch,
        "step": [position.step for position in block],
        "micro": [position.micro for position in block],
    }
    if samples is not None:
        row |= {"image": samples.images, "label": samples.labels.tolist()}
        if samples.table.num_columns:
            row["columns"] = _ipc_bytes(samples.table)
        row |= {"read_s": samples.read_s, "outage_s": samples.outage_s}
    return pa.Table.from_pylist([row], SOURCE_SCHEMA)


def of_source_row(table: pa.Table) -> tuple[Block, Columns | None]:
    """The block of a `source_row`, and its samples, whose images are views of the table's memory."""
    (row,) = table.drop_columns("image").to_pylist()
    block = _places(row["split"], row["epoch"], row["step"], row["micro"])
    images = table["image"].combine_chunks()
    if images.null_count:
        return block, None
    columns = pa.table({})
    if row["columns"]:
        columns = pa.ipc.open_stream(row["columns"]).read_all()
    views = image_taker(images.flatten())(np.arange(len(row["label"])))
    labels = np.array(row["label"], np.int64)
    seconds = row["read_s"], row["outage_s"]
    return block, Columns(list(views), columns, labels, *seconds)


def _ipc_bytes(table: pa.Table) -> bytes:
    """Return a table as a stream of Arrow's."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _places(split: int, epoch: int, steps: list[int], micros: list[int]) -> Block:
    split_epoch = (_SPLITS[int(split)], int(epoch))
    return [
        MicroBatchId(*split_epoch, step, micro)
        for step, micro in zip(steps, micros, strict=True)
    ]


def block_row(
    batches: Sequence[MicroBatch], arrays: Mapping[str, np.ndarray] = _NO_ARRAYS
) -> dict[str, np.ndarray]:
    """The row of a finished block.

    Args:
        arrays: arrays of all by field, (k, B, …), that need no copy.
    """
    places = [batch.position for batch in batches]
    columns: dict[str, Any] = {
        "step": [position.step for position in places],
        "micro": [position.micro for position in places],
        **{
            name: [getattr(batch, name) for batch in batches]
            for name in ("index", "weight", *_NUMBERS_OF)
        },
    }
    forms: dict[str, str] = {}
    for name in batches[0].fields:
        parts: list[Any] = [batch.fields[name] for batch in batches]
        forms[name], joined = _joined(name, parts, arrays.get(name))
        columns |= joined
    columns["forms"] = np.frombuffer(json.dumps(forms).encode(), np.uint8)
    return {
        "split": np.array([_SPLITS.index(places[0].split)], np.int8),
        "epoch": np.array([places[0].epoch]),
        **{name: np.asarray(column)[None] for name, column in columns.items()},
    }


_NUMBERS_OF = ("num_bad", "read_s", "work_s", "outage_s", "num_remembered")


def _joined(
    name: str, parts: list[Any], whole: np.ndarray | None
) -> tuple[str, dict[str, Any]]:
    """The form of a field in a row, and its columns there."""
    if isinstance(parts[0], Ragged):
        offsets = [value.offsets for value in parts]
        return parts[0].kind, {
            name: np.concatenate([value.values for value in parts]),
            name + _OFFSETS: offsets,
        }
    shapes = [value.shape for value in parts]
    if whole is not None:
        return _FLAT, {name: whole.reshape(-1), name + _SHAPES: shapes}
    if min(value.nbytes for value in parts) >= _LEAST_APART:
        return _APART, {f"{name}:{number}": part for number, part in enumerate(parts)}
    flat = np.concatenate([value.reshape(-1) for value in parts])
    return _FLAT, {name: flat, name + _SHAPES: shapes}


def batches_of(row: Mapping[str, Any]) -> Iterator[MicroBatch]:
    """The micro-batches of a finished row, in host memory: views of its arrays."""
    columns = {name: column[0] for name, column in row.items()}
    places = _places(
        columns["split"],
        columns["epoch"],
        columns["step"].tolist(),
        columns["micro"].tolist(),
    )
    forms = json.loads(columns["forms"].tobytes())
    num = len(places)
    parts = {name: _parts(name, form, columns, num) for name, form in forms.items()}
    for number, position in enumerate(places):
        numbers = {name: columns[name][number].item() for name in _NUMBERS_OF}
        yield MicroBatch(
            position,
            columns["index"][number],
            columns["weight"][number],
            {name: of_field[number] for name, of_field in parts.items()},
            **numbers,
        )


def _parts(
    name: str, form: Any, columns: Mapping[str, np.ndarray], num: int
) -> Sequence[np.ndarray | Ragged]:
    """A field of each of the `num` micro-batches of a row."""
    if form == _APART:
        return [columns[f"{name}:{number}"] for number in range(num)]
    values = columns[name]
    if form == _FLAT:
        shapes = columns[name + _SHAPES]
        flat = _cut(values, shapes.prod(axis=1))
        return [array.reshape(shape) for array, shape in zip(flat, shapes, strict=True)]
    offsets = columns[name + _OFFSETS]
    flat = _cut(values, offsets[:, -1])
    return [
        Ragged(form, array, of_part)
        for array, of_part in zip(flat, offsets, strict=True)
    ]


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return views of the parts of an array that holds them end to end."""
    return np.split(values, np.cumsum(lengths)[:-1])


def host_batches(iterator: DataIterator) -> Generator[MicroBatch, None, None]:
    """The micro-batches of a rank's split, in host memory, zero-copy and read-only.

    Raises:
        RaypipeError: the error that an actor raised, without the layers around it.
    """
    with closing(rows(iterator)) as row_iterator:
        while True:
            with traced("split") as arrival:
                row = next(row_iterator, None)
                batches = [] if row is None else list(batches_of(row))
                if arrival is not None:
                    arrival += [batch.position for batch in batches]
            if row is None:
                return
            del row
            yield from batches
            # the block's memory is to be free before the next one arrives
            del batches
