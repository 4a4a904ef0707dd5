"""Fields: the named parts of a sample; micro-batches of them; and their memory.

    field                one sample                           a micro-batch of B
    image                uint8 (H, W, 3), or as the           (B, H, W, 3)
                         transform makes arrays
    view.NAME            the same, or (n, H, W, 3)            (B, H, W, 3), (B, n, H, W, 3)
    targets              see `raypipe.transform.targets`      (B, …); rows of numbers are padded
    label                int64, or the target's array         (B,), (B, …)
    column.NAME          see `raypipe.transform.columns`      (B, …), or `Ragged`

`stream_fields` in `raypipe.transform.sample_maker` lists those of a stream. Arrays go to the training device.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.transform.block_memory import reused_arrays

FieldKind = Literal["array", "ragged", "text", "bytes", "json", "item"]
_Value = TypeVar("_Value")
Shape = tuple[int, ...]
SampleFields = dict[str, Any]
"""Values of one sample by the name of a field, of a column, or of a target."""
Arrays = dict[str, np.ndarray]
"""Arrays of samples, or of one, by the name of a field, or of a target."""

IMAGE = "image"
LABEL = "label"
VIEW = "view"
COLUMN = "column"
"""Groups of fields, whose names are GROUP.NAME."""


@dataclass(frozen=True)
class Field:
    """A field of a stream's samples: its kind, dtype, shape and filling.

    Attributes:
        kind: "array" (numbers of one shape), "ragged" (numbers of any length), "text", "bytes", or "json"; or
            "item", any object of a Dataset's, see `raypipe.streaming.items`.
        dtype: numpy's name of the numbers' type; empty = the first sample's.
        shape: shape of a sample's array, or of a ragged one's elements; None = the first sample's.
        fill: value of padding and of rows that do not count: a number, or one for each entry of the last axis.
        is_padded: a sample may have fewer entries along the first axis than the shape.
    """

    kind: FieldKind = "array"
    dtype: str = ""
    shape: Shape | None = None
    fill: float | tuple[float, ...] = 0
    is_padded: bool = False


class Ragged(NamedTuple):
    """The values of B samples of any length, end to end.

    Attributes:
        kind: the field's kind, not "array".
        values: numbers (n, …) for "ragged", else bytes, uint8 (n,).
        offsets: int64 (B + 1,); sample b is values[offsets[b] : offsets[b + 1]].
    """

    kind: FieldKind
    values: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def of(kind: FieldKind, samples: Sequence[Any], like: Field) -> Ragged:
        """Join values of samples: arrays or bytes; None = empty."""
        blank: Any = b"null" if kind == "json" else b""
        if kind == "ragged":
            blank = np.empty((0, *(like.shape or ())), like.dtype)
        parts = [blank if sample is None else sample for sample in samples]
        if kind == "ragged":
            values = np.concatenate([blank, *parts])
        else:
            values = np.frombuffer(b"".join(parts), np.uint8)
        return Ragged(kind, values, np.cumsum([0, *map(len, parts)], dtype=np.int64))

    def copied(self) -> Ragged:
        """Return a copy in new memory."""
        return Ragged(self.kind, self.values.copy(), self.offsets.copy())

    def unpacked(self) -> list[Any]:
        """B arrays, texts, bytes, or what JSON holds."""
        parts = [
            self.values[start:end]
            for start, end in itertools.pairwise(self.offsets.tolist())
        ]
        if self.kind == "ragged":
            return parts
        contents = [array.tobytes() for array in parts]
        if self.kind == "bytes":
            return contents
        texts = [content.decode("utf-8", "surrogatepass") for content in contents]
        if self.kind == "text":
            return texts
        return list(map(json.loads, texts))


BatchFields = dict[str, np.ndarray | Ragged]
"""Fields of a micro-batch by name."""


def in_group(fields: Mapping[str, _Value], group: str) -> dict[str, _Value]:
    """The entries of a group, by the names that they have in it."""
    prefix = f"{group}."
    return {
        name.removeprefix(prefix): value
        for name, value in fields.items()
        if name.startswith(prefix)
    }


def images_in(fields: Mapping[str, _Value]) -> dict[str, _Value]:
    """The fields that are images, by name: the only view, `image`, or all views."""
    return {
        name: value
        for name, value in fields.items()
        if name == IMAGE or name.startswith(f"{VIEW}.")
    }


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch in host memory, possibly read-only. Padding, and bad samples of a validation, have weight 0.

    Attributes:
        position: its place.
        index: int64 (B,), the sample that was delivered, so a substitute's own; -1 for padding.
        weight: float32 (B,), 1 or 0.
        fields: by name: arrays (B, …), and `Ragged`; images that a device has decoded are tensors (B, C, H, W).
        num_bad: samples that were replaced or left out.
        read_s, work_s: seconds that were spent on reading it, and on it in all.
        outage_s: part of read_s, waiting for object storage that did not answer.
        num_remembered: 1 if it was made before, maybe by another stream; else 0.
        stream_hash: 16 bytes over it, where a rank records them; else empty.
        ready: event behind the work on images that a device has decoded; None = it has none.
    """

    position: MicroBatchId
    index: np.ndarray
    weight: np.ndarray
    fields: BatchFields
    num_bad: int = 0
    read_s: float = 0.0
    work_s: float = 0.0
    outage_s: float = 0.0
    num_remembered: int = 0
    stream_hash: bytes = b""
    ready: Any = None

    def arrays(self) -> Arrays:
        """The arrays among the fields."""
        return {
            name: values
            for name, values in self.fields.items()
            if isinstance(values, np.ndarray)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        """An array among the fields."""
        values = self.fields[name]
        assert isinstance(values, np.ndarray)
        return values


class MadeRows(NamedTuple):
    """Rows of a micro-batch whose images are made.

    Attributes:
        rows: int64 (n,).
        params: of the first image of each, int64 (n, P), see `Program.draw`.
        sizes: (height, width) of the images before, int (n, 2).
        fields: fields of each that are not in arrays yet; None = there are none.
    """

    rows: np.ndarray
    params: np.ndarray
    sizes: np.ndarray
    fields: Sequence[SampleFields] | None = None


class Rows:
    """Rows of micro-batches, end to end, in one piece of memory. They are filled in any order.

    Args:
        fields: the stream's fields; the first sample completes them.
        num_rows: k·B.

    Attributes:
        index, weight: see `MicroBatch`; int64 and float32 (k·B,).
        arrays: arrays by field, (k·B, …); empty = their shapes are not known yet.
    """

    def __init__(self, fields: dict[str, Field], num_rows: int) -> None:
        self.fields = fields
        self.index = np.full(num_rows, PADDING, np.int64)
        self.weight = np.zeros(num_rows, np.float32)
        self.arrays = Arrays()
        self._lists = dict[str, list[Any]]()
        if bytes_per_row(fields) is not None:
            self._allocate()

    def put(self, row: int, index: int, sample: SampleFields) -> None:
        """Fill a row with a sample, by fields, or with those of them that it lacks."""
        self.learn(sample)
        for name, value in sample.items():
            array = self.arrays.get(name)
            if array is None:
                self.values(name)[row] = value
                continue
            field = self.fields[name]
            if field.is_padded:
                array[row, : len(value)] = value
                array[row, len(value) :] = field.fill
            else:
                array[row] = value
        self.index[row] = index
        self.weight[row] = 1

    def put_labels(
        self, rows: np.ndarray, indices: np.ndarray, labels: np.ndarray | int
    ) -> None:
        """Fill rows, int (n,), of which all but the label is there, and the index."""
        self.arrays[LABEL][rows] = labels
        self.index[rows] = indices
        self.weight[rows] = 1

    def put_items(
        self, name: str, rows: np.ndarray, indices: np.ndarray, values: list[Any]
    ) -> None:
        """Fill rows, int (n,), with values of one field and their indices; the label is 0."""
        column = self.values(name)
        for row, value in zip(rows.tolist(), values, strict=True):
            column[row] = value
        self.put_labels(rows, indices, 0)

    def leave_out(self, row: int, index: int = PADDING) -> None:
        """Mark a row that does not count: padding, or a sample that is bad."""
        self.index[row] = index
        self.weight[row] = 0

    def learn(self, sample: SampleFields) -> None:
        """Take the shapes that are not known yet from a sample."""
        if not self.arrays:
            learn(self.fields, sample)
            self._allocate()

    def sample(self, row: int) -> SampleFields:
        """Copy the fields of one row."""
        lists = {name: values[row] for name, values in self._lists.items()}
        return lists | {name: array[row].copy() for name, array in self.arrays.items()}

    def finish(self, rows: slice) -> BatchFields:
        """The fields of a micro-batch; rows that do not count hold what fills them."""
        missing = np.flatnonzero(self.weight[rows] == 0)
        finished = BatchFields()
        for name, field in self.fields.items():
            if field.kind == "array":
                array = self.arrays[name][rows]
                if len(missing):
                    array[missing] = field.fill
                finished[name] = array
            elif field.kind != "item":
                values = self.values(name)[rows]
                finished[name] = Ragged.of(field.kind, values, field)
        return finished

    def values(self, name: str) -> list[Any]:
        """Return the values of a field whose kind is not "array", k·B; None where there is none yet."""
        return self._lists.setdefault(name, [None] * len(self.index))

    def _allocate(self) -> None:
        self.arrays = reused_arrays(
            {
                name: ((len(self.index), *(field.shape or ())), np.dtype(field.dtype))
                for name, field in self.fields.items()
                if field.kind == "array"
            }
        )


def learn(fields: dict[str, Field], sample: SampleFields) -> None:
    """Note what a sample shows of its fields: shapes, dtypes, and the views that a function makes."""
    if images_in(sample).keys() - fields.keys():
        # views, where an image was expected
        fields.pop(IMAGE, None)
    for name, value in sample.items():
        field = fields.get(name) or Field()
        if field.kind == "array" and field.shape is None:
            fields[name] = replace(field, dtype=value.dtype.name, shape=value.shape)


def bytes_per_row(fields: Mapping[str, Field]) -> int | None:
    """Return the bytes of a row's arrays; None = some shape is not known yet."""
    num_bytes = 0
    for field in fields.values():
        if field.kind != "array":
            continue
        if field.shape is None:
            return None
        num_bytes += math.prod(field.shape) * np.dtype(field.dtype).itemsize
    return num_bytes
