"""The row of the stream, which is one block of k micro-batches, of one rank and one segment: its columns.

from the source   split int8, epoch int64; step, micro int64, lists of k: their places, which is all that an actor
                  needs that reads
from a reader     the same; encoded, mask, boxes, label, and of streams that have them keypoints, and columns (of
                  each sample in one value), lists of k·B; null in a split left to the actors
from an actor     split, epoch (1,); step, micro (1, k); image uint8 (1, k, B, H, W, 3), or, for the device to
                  decode, the arrays of an EncodedMicroBatch, each (1, k, …), but `data` (1, n), all end to end,
                  or, of each view, view.NAME uint8 (1, k, B, H, W, 3), of n crops (1, k, B, n, H, W, 3); of
                  streams that have them, mask uint8 (1, k, B, H, W), boxes float32 (1, k, B, K, 5), keypoints
                  float32 (1, k, B, K, 3), and columns as columns.NAME.array (1, k, B, …), or columns.NAME.KIND
                  (1, n, …), all end to end, and columns.NAME.offsets int64 (1, k, B + 1), see `PackedColumn`;
                  with transform.decode_as "array", image and views (…, H, W, C) of any dtype;
                  label int64 (1, k, B), or as the target is; index int64 (1, k, B), weight float32 (1, k, B);
                  num_bad int64 (1, k); read_s, work_s float64 (1, k): seconds that the actor spent on each
                  micro-batch, reading, and in all. What has other shapes in other micro-batches, such as images of
                  buckets, is flat.NAME (1, n), all end to end, and shape.NAME int64 (1, k, …)
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raypipe.failures import cause_of
from raypipe.plan.places import MicroBatchId, Split
from raypipe.streaming.blocks import Block
from raypipe.streaming.values import pack_values, unpack_values
from raypipe.transform.batch import HostBatch, MicroBatchResult, Read, Room
from raypipe.transform.columns import PackedColumn
from raypipe.transform.sample_transform import VIEW, EncodedSample
from raypipe.transform.targets import as_bytes

if TYPE_CHECKING:
    from ray.data import DataIterator

_SPLITS: tuple[Split, ...] = ("train", "val")
# The arrays of an EncodedMicroBatch, in the order in which they are hashed.
_ENCODED = ("data", "offsets", "crop", "flip", "ok")
_COLUMNS, _FLAT, _SHAPE = "columns.", "flat.", "shape."
_BINARIES = pa.list_(pa.large_binary())
_NUMBERS = pa.list_(pa.int64())
PLACE_SCHEMA = pa.schema([("split", pa.int8()), ("epoch", pa.int64()), ("step", _NUMBERS), ("micro", _NUMBERS)])
_READ = {"encoded": _BINARIES, "mask": _BINARIES, "boxes": _BINARIES, "label": _NUMBERS}
READ_SCHEMA = pa.schema([*PLACE_SCHEMA, *_READ.items()])

_RAY_DATA_THREAD = "iter_threaded"
_MAKES_BATCHES = "_create_batch_iterator"
_THREAD_S = 5.0  # for a call to Ray that it is in


@dataclass(frozen=True)
class Made:
    """A micro-batch that was made.

    Attributes:
        at: its place.
        result: what the transform made.
        read_s, work_s: seconds spent reading, and in all.
        num_kept: samples that were in the cache.
    """

    at: MicroBatchId
    result: MicroBatchResult
    read_s: float
    work_s: float
    num_kept: int = 0

    def host_batch(self) -> HostBatch:
        """As the rank gets it."""
        return _host_batch(self.at, vars(self) | vars(self.result) | self.result.arrays, len(self.result.bad))


def block_of(table: pa.Table) -> Block:
    """The block that a row of the source names."""
    (row,) = table.select(PLACE_SCHEMA.names).to_pylist()
    return _places(row["split"], row["epoch"], row["step"], row["micro"])


def _places(split: int, epoch: int, steps: list[int], micros: list[int]) -> Block:
    at = (_SPLITS[int(split)], int(epoch))
    return [MicroBatchId(*at, step, micro) for step, micro in zip(steps, micros, strict=True)]


def read_schema(keypoints: bool, columns: bool) -> pa.Schema:
    """Of a reader's rows, of streams that have keypoints and columns or not."""
    more = {"keypoints": keypoints, "columns": columns}
    return pa.schema([*READ_SCHEMA, *((name, _BINARIES) for name, there in more.items() if there)])


def source_row(block: Block, reads: Sequence[Read] | None, schema: pa.Schema) -> pa.Table:
    """A row of the source, or, with what was read of each micro-batch, of a reader."""
    row: list[Any] = [_SPLITS.index(block[0].split), block[0].epoch]
    row += [[at.step for at in block], [at.micro for at in block]]
    if reads is None:
        row += [None] * (len(schema) - len(row))
    else:
        images, masks, boxes, keypoints, columns = zip(
            *chain.from_iterable(samples for samples, _ in reads), strict=True
        )
        row += [images, *([as_bytes(value) for value in column] for column in (masks, boxes))]
        row.append(np.concatenate([labels for _, labels in reads]))
        if "keypoints" in schema.names:
            row.append([as_bytes(value) for value in keypoints])
        if "columns" in schema.names:
            row.append(list(map(pack_values, columns)))
    arrays = [pa.array([value], field.type) for value, field in zip(row, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def reads_of(table: pa.Table) -> list[Read] | None:
    """What a reader has put into a row, for each micro-batch; None if the actor reads."""
    if "encoded" not in table.column_names or not table["encoded"][0].is_valid:
        return None
    columns = [table[name][0].as_py() for name in ("encoded", "mask", "boxes")]
    has_keypoints = "keypoints" in table.column_names
    columns.append(table["keypoints"][0].as_py() if has_keypoints else [None] * len(columns[0]))
    if "columns" in table.column_names:
        columns.append(map(unpack_values, table["columns"][0].as_py()))
    samples = [EncodedSample(*sample) for sample in zip(*columns, strict=True)]
    labels = np.split(np.asarray(table["label"][0].values), len(table["step"][0]))
    size = len(labels[0])
    return [(samples[size * number :][:size], each) for number, each in enumerate(labels)]


def made_row(all_made: Sequence[Made], room: Room) -> dict[str, np.ndarray]:
    """The row of a finished block.

    Args:
        room: holds the arrays that were put there; the others belong to each micro-batch.
    """
    places, results = [made.at for made in all_made], [made.result for made in all_made]
    # Those that were put there belong to all of them; of some contents there are others beside these.
    own = [{name: each for name, each in result.arrays.items() if name not in room.arrays} for result in results]
    arrays = room.arrays | _joined(own)
    columns = {
        "step": [at.step for at in places],
        "micro": [at.micro for at in places],
        **arrays,
        **_joined_columns([result.columns for result in results]),
        "label": [result.label for result in results],
        "index": [result.index for result in results],
        "weight": [result.weight for result in results],
        "num_bad": [len(result.bad) for result in results],
        "read_s": [made.read_s for made in all_made],
        "work_s": [made.work_s for made in all_made],
    }
    return {
        "split": np.array([_SPLITS.index(places[0].split)], np.int8),
        "epoch": np.array([places[0].epoch]),
        **{name: np.asarray(column)[None] for name, column in columns.items()},
    }


def _joined(of_batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of micro-batches as those of a row."""
    joined: dict[str, np.ndarray] = {}
    for name in of_batches[0]:
        parts = [arrays[name] for arrays in of_batches]
        if name == "data":
            joined[name] = np.concatenate(parts)
        elif len({part.shape for part in parts}) == 1:
            joined[name] = np.stack(parts)
        else:
            joined[f"{_FLAT}{name}"] = np.concatenate([part.reshape(-1) for part in parts])
            joined[f"{_SHAPE}{name}"] = np.array([part.shape for part in parts])
    return joined


def _parted(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The parts, views, of what lies end to end."""
    return np.split(values, np.cumsum(lengths)[:-1])


def _taken_flat(of_block: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Take the arrays of unlike shapes out of a row's: by name, those of each micro-batch, which are views."""
    found = {}
    for key in [key for key in of_block if key.startswith(_FLAT)]:
        shapes = of_block.pop(key.replace(_FLAT, _SHAPE, 1))
        parts = _parted(of_block.pop(key), shapes.prod(axis=1))
        found[key.removeprefix(_FLAT)] = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return found


def _joined_columns(of_batches: Sequence[Mapping[str, PackedColumn]]) -> dict[str, Any]:
    """The columns of micro-batches as those of a row."""
    joined: dict[str, Any] = {}
    for name, first in of_batches[0].items():
        parts = [columns[name] for columns in of_batches]
        values = [part.values for part in parts]
        joined[f"{_COLUMNS}{name}.{first.kind}"] = values if first.offsets is None else np.concatenate(values)
        if first.offsets is not None:
            joined[f"{_COLUMNS}{name}.offsets"] = [part.offsets for part in parts]
    return joined


def _taken_columns(of_block: dict[str, Any], num: int) -> list[dict[str, PackedColumn]]:
    """Take the columns out of a row's arrays, by micro-batch."""
    found: list[dict[str, PackedColumn]] = [{} for _ in range(num)]
    for key in [key for key in of_block if key.startswith(_COLUMNS)]:
        name, _, found_kind = key.removeprefix(_COLUMNS).rpartition(".")
        if found_kind == "offsets":
            continue
        kind: Any = found_kind
        values, offsets = of_block.pop(key), of_block.pop(f"{_COLUMNS}{name}.offsets", None)
        parts = values if offsets is None else _parted(values, offsets[:, -1])
        for number, columns in enumerate(found):
            columns[name] = PackedColumn(kind, parts[number], None if offsets is None else offsets[number])
    return found


def batches_of(row: Mapping[str, Any]) -> Iterator[HostBatch]:
    """The micro-batches of a finished row, in host memory: views of its arrays."""
    of_block = {name: column[0] for name, column in row.items()}
    split, epoch = of_block.pop("split"), of_block.pop("epoch")
    if "data" in of_block:
        of_block["data"] = _parted(of_block["data"], of_block["offsets"][:, -1])
    places = _places(split, epoch, of_block["step"].tolist(), of_block["micro"].tolist())
    columns = _taken_columns(of_block, len(places))
    of_block |= _taken_flat(of_block)
    for number, at in enumerate(places):
        arrays = {name: column[number] for name, column in of_block.items()}
        arrays["columns"] = columns[number]
        yield _host_batch(at, arrays, int(arrays["num_bad"]))


def _host_batch(at: MicroBatchId, arrays: Mapping[str, Any], num_bad: int) -> HostBatch:
    encoded = {name: arrays[name] for name in _ENCODED if name in arrays}
    return HostBatch(
        at=at,
        image=arrays.get("image", np.empty(0, np.uint8)),
        encoded=encoded or None,
        label=arrays["label"],
        weight=arrays["weight"],
        index=arrays["index"],
        num_bad=num_bad,
        read_s=float(arrays["read_s"]),
        work_s=float(arrays["work_s"]),
        mask=arrays.get("mask"),
        boxes=arrays.get("boxes"),
        keypoints=arrays.get("keypoints"),
        columns=arrays["columns"],
        views={name.removeprefix(VIEW): each for name, each in arrays.items() if name.startswith(VIEW)},
    )


class Ended:
    """A rank's split of a stream that has ended; Ray Data would run an execution for it, and log that."""

    def iter_batches(self, **options: Any) -> Iterator[dict[str, np.ndarray]]:
        """Nothing."""
        return iter(())


def host_batches(iterator: DataIterator) -> Iterator[HostBatch]:
    """The rows of a stream's split as micro-batches in host memory, zero-copy and read-only.

    Raises:
        RaypipeError: the error that an actor raised, without the layers around it.
    """
    with closing(host_blocks(iterator)) as blocks:
        for block in blocks:
            yield from block


def host_blocks(iterator: DataIterator) -> Generator[Iterator[HostBatch], None, None]:
    """The same, block by block: take all of a block's micro-batches before the next block."""
    failure: BaseException | None = None
    before, threads = set(threading.enumerate()), list[threading.Thread]()
    made = _record_batch_iterators(iterator)
    try:
        for row in iterator.iter_batches(
            batch_size=None,  # type: ignore[arg-type]
            batch_format="numpy",
            prefetch_batches=1,
        ):
            if not threads:
                threads = [t for t in threading.enumerate() if t.name == _RAY_DATA_THREAD and t not in before]
            yield batches_of(row)
            del row  # or its block would be held until the next one has come
    except Exception as error:
        failure = cause_of(error)
    finally:
        vars(iterator).pop(_MAKES_BATCHES, None)
        del iterator
        for each in made:
            # Ray Data stops its prefetcher's thread at the end alone: left before, the thread waits for ever.
            getattr(getattr(each, "_prefetcher", None), "stop", lambda: None)()
        made.clear()
        # An execution is a ring of references. As long as it is not collected, actors that it has let go of may
        # keep their CPUs, and a cluster that is in use no more looks busy to the next run.
        gc.collect()
        # Nobody waits for these. One that calls Ray after `ray.shutdown()` ends the process: exit code 1, no word.
        for thread in threads:
            thread.join(_THREAD_S)
    # Here, and not above: the error would hold on to the frames of the execution.
    if failure is not None:
        raise failure


def _record_batch_iterators(iterator: Any) -> list[Any]:
    """A list that gets what Ray Data will make to iterate this iterator's batches."""
    made = list[Any]()
    if make := getattr(iterator, _MAKES_BATCHES, None):

        def create(*args: Any, **options: Any) -> Any:
            made.append(make(*args, **options))
            return made[-1]

        setattr(iterator, _MAKES_BATCHES, create)
    return made
