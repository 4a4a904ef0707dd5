"""A micro-batch on its way through the CPU: as read, as made, and as a rank gets it.

read_samples → Read → MicroBatchTransform, whose arrays are put into a Room → MicroBatchResult → HostBatch
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.stores.base import Store, title_of
from raypipe.stores.numbers import labels_of
from raypipe.transform.columns import LABEL, NO_COLUMNS, ColumnMaker, PackedColumn, SampleColumns
from raypipe.transform.sample_transform import Decoded, EncodedSample, Key

Read = tuple[list[EncodedSample], np.ndarray]
"""B samples, and labels int64 (B,); padding has no image, and label 0."""

Sample = EncodedSample | Decoded

ReadSample = Callable[[], tuple[EncodedSample, int]]
"""Reads a sample, and its label."""

Candidate = tuple[Sample | ReadSample, int, int, Key]
"""(sample, label, index, key); a label that is read with its sample stands for nothing here."""

Tried = tuple[Any, int, dict[str, Any]]
"""What a sample has become, its label, and its columns."""

ReadSubstitute = Callable[[int, int], Candidate]
"""(position in the micro-batch, attempt from 0) → another sample.
For the whole to be reproducible it must be a pure function of the plan."""

Arrays = dict[str, np.ndarray]
Take = Callable[[Callable[[int], Arrays]], Arrays]
"""Gives the arrays (B, …) to put a micro-batch in, from a function that makes those of k; see `Room`."""
Make = Callable[[int, np.ndarray | None], Any]
"""(position in the micro-batch, place for the image, if it is known) → what `one` makes of the sample; None for
padding, or a bad sample that is left out."""

NO_LABEL = int(np.iinfo(np.int64).min)
"""Stands for a label that is missing or damaged, or that int64 cannot hold: its sample is a bad one."""
WRONG_LABEL = "the label is missing, damaged, or no integer of 64 bits with a sign"
NUM_SUBSTITUTES = 8  # at the default budget of 1 % bad samples, 8 bad substitutes in a row have a chance of 1e-16


@dataclass
class MicroBatchResult:
    """B transformed samples. Padding, and bad samples of a validation, have weight 0, label 0 and black pixels.

    Attributes:
        arrays: what the Content makes.
        label: int64 (B,), or what the target's column holds, (B, …); 0 for padding.
        index: int64 (B,), the sample that was delivered, so a substitute's own; -1 for padding.
        weight: float32 (B,), 1 or 0.
        bad: one record per bad sample: `store` (address), `index`, `name` (the store's own, "" where it has
            none), `substitute` (index, or None in a validation), `error` (reason), `fault` ("store", or
            "transform").
        columns: see `ColumnMaker.pack`, without the target's.
    """

    arrays: dict[str, np.ndarray]
    label: np.ndarray
    index: np.ndarray
    weight: np.ndarray
    bad: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, PackedColumn] = field(default_factory=dict)


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch in host memory, possibly read-only; the device's `Batch` has what is not described here.

    Attributes:
        image: uint8 (B, H, W, 3), or with `transform.decode_as: array` (B, H, W, C) of any dtype; empty where the
            device is to decode, or there are views.
        label: see `MicroBatchResult`.
        encoded: what the device is to decode.
        columns: by name.
        views: by name, likewise, or (B, n, H, W, 3) of n crops.
    """

    at: MicroBatchId
    image: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    index: np.ndarray
    num_bad: int
    read_s: float = 0.0
    work_s: float = 0.0
    encoded: dict[str, np.ndarray] | None = None
    mask: np.ndarray | None = None
    boxes: np.ndarray | None = None
    keypoints: np.ndarray | None = None
    columns: dict[str, PackedColumn] = field(default_factory=dict)
    views: dict[str, np.ndarray] = field(default_factory=dict)


def read_samples(
    store: Store,
    indices: np.ndarray,
    targets: Mapping[str, str] | None = None,
    columns: SampleColumns = NO_COLUMNS,
) -> Read:
    """Samples and labels of int64 indices (B,), of which some may be PADDING; see `read_encoded`."""
    real = indices != PADDING
    read, read_labels = read_encoded(store, indices[real], targets, columns)
    if real.all():
        return read, read_labels
    samples = [EncodedSample(None)] * len(indices)
    labels = np.zeros(len(indices), np.int64)
    for position, sample in zip(np.flatnonzero(real), read, strict=True):
        samples[position] = sample
    labels[real] = read_labels
    return samples, labels


def read_encoded(
    store: Store,
    indices: np.ndarray,
    targets: Mapping[str, str] | None = None,
    columns: SampleColumns = NO_COLUMNS,
) -> tuple[list[EncodedSample], np.ndarray]:
    """Samples, and labels int64 (n,), of int64 indices (n,); NO_LABEL where a label is none.

    Args:
        targets: columns of masks and boxes, see `TransformConfig.target_columns`.
        columns: further ones. Labels are 0 where they are not read as classes, see `SampleColumns.reads_class`.
    """
    targets = targets or {}
    found = store.read(indices, tuple(dict.fromkeys(("image", *columns.read, *targets.values()))))
    nothing = [None] * len(indices)
    of_image = (found[targets[name]] if name in targets else nothing for name in ("mask", "boxes", "keypoints"))
    samples = [EncodedSample(*values) for values in zip(found["image"], *of_image, strict=True)]
    if columns:
        rows = zip(*(found[name] for name in columns.stored), strict=True)
        samples = [sample._replace(columns=row) for sample, row in zip(samples, rows, strict=True)]
    labels = found[LABEL] if columns.reads_class else np.zeros(len(indices), np.int64)
    if isinstance(labels, np.ndarray) and (labels.ndim != 1 or labels.dtype.kind == "f"):
        raise ConfigError(
            f"{store.address} has labels of {labels.dtype} {labels.shape[1:]}, which are no classes: name label "
            "in store.columns, or set label_is_class = False in the store's class"
        )
    labels = labels_of(labels)
    if isinstance(labels, list):
        labels = np.array([NO_LABEL if each is None else each for each in labels], np.int64)
    return samples, labels


class Content(Protocol):
    """What samples become, see `raypipe.transform.contents`: one sample, and the arrays of B samples.

    Attributes:
        draws_globally: it draws from generators that all threads share.
    """

    draws_globally: bool

    def one(self, sample: Sample, key: Key, out: np.ndarray | None = None) -> Any: ...

    def pack(self, make: Make, num_samples: int, take: Take) -> Arrays: ...


class Room:
    """Where the arrays of `count` micro-batches are written, one after the other, and shipped from.

    Args:
        count: 0 = each micro-batch has arrays of its own, for those of several sizes.

    Attributes:
        arrays: each (count, B, …), made when the first micro-batch tells their shapes; empty if nothing is put in.
    """

    def __init__(self, count: int = 1) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._count, self._taken = count, 0

    def take(self, make: Callable[[int], Arrays]) -> Arrays:
        """The arrays (B, …) of the next micro-batch; `make` makes those of so many."""
        if not self._count:
            return {name: array[0] for name, array in make(1).items()}
        self.arrays = self.arrays or make(self._count)
        self._taken += 1
        return {name: array[self._taken - 1] for name, array in self.arrays.items()}


# Bytes. Below, malloc has memory at hand.
_LEAST_REUSED = 1 << 20
_ALIGNED = 8  # the widest numbers
# One that is being filled, and one that is being shipped.
_spare: deque[mmap.mmap] = deque(maxlen=2)


def reused_memory(shape: tuple[int, ...]) -> np.ndarray:
    """An empty array uint8; its memory serves the next one of its size once nobody holds on to it.

    A block's new memory costs 0.1 ms for each image of 224 x 224 pixels: the system clears it page by page.
    """
    num_bytes = math.prod(shape)
    if num_bytes < _LEAST_REUSED:
        return np.empty(shape, np.uint8)
    memory = None
    with contextlib.suppress(IndexError):  # there is none, or another thread has taken it
        memory = _spare.pop()
    if memory is None or len(memory) != num_bytes:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Views hold on to the array whose memory it is: to this one, since that of a mapping is no array's.
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _spare.append, memory).atexit = False
    return array.reshape(shape)


def reused_arrays(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype[Any]] | None = None
) -> Arrays:
    """Empty arrays of these shapes, in one piece of `reused_memory`; uint8 where there are no dtypes."""
    kinds = {name: (dtypes or {}).get(name, np.dtype(np.uint8)) for name in shapes}
    sizes = [math.prod(shape) * kinds[name].itemsize for name, shape in shapes.items()]
    if any(kind.itemsize > 1 for kind in kinds.values()):
        sizes = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    memory, arrays, at = reused_memory((sum(sizes),)), {}, 0
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        used = memory[at : at + math.prod(shape) * kinds[name].itemsize]
        arrays[name] = used.view(kinds[name]).reshape(shape)
        at += size
    return arrays


@dataclass(frozen=True)
class Attempt:
    """What earlier attempts at a micro-batch have taught.

    Attributes:
        bad: index → reason, of samples that must not be touched.
        before_sample: called with the index of each sample before it is touched, which begins with reading it.
    """

    bad: Mapping[int, str] = field(default_factory=dict)
    before_sample: Callable[[int], None] | None = None


FIRST_ATTEMPT = Attempt()


class MicroBatchTransform:
    """Makes the arrays of micro-batches, and judges bad samples.

    Args:
        content: what samples become.
        on_bad_sample: "raise", or "substitute" another sample.
        exact: for a validation: a bad sample is not substituted, its row has weight 0.
        store_address: named in errors and records.
        sample_name: what the store calls a sample, by its index, for errors and records.
        decoded: of a cache of this store, and of the same settings of the decode, see `SampleCache.decoded`.
        columns: makes those of each sample; None = there are none.
    """

    def __init__(
        self,
        content: Content,
        *,
        on_bad_sample: Literal["substitute", "raise"] = "substitute",
        exact: bool = False,
        store_address: str = "",
        sample_name: Callable[[int], str] = lambda _: "",
        decoded: Callable[[int, int, bytes | None], Decoded | None] | None = None,
        columns: ColumnMaker | None = None,
    ) -> None:
        self.content, self._columns = content, columns
        self._on_bad_sample, self._exact, self._decoded = on_bad_sample, exact, decoded
        self._store_address, self._sample_name = store_address, sample_name

    @property
    def draws_globally(self) -> bool:
        """Whether it draws from generators that all threads share."""
        return self.content.draws_globally or bool(self._columns and self._columns.draws_globally)

    def run(
        self,
        columns: dict[str, Any],
        keys: np.ndarray,
        read_substitute: ReadSubstitute | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        room: Room | None = None,
    ) -> MicroBatchResult:
        """Transform one micro-batch.

        Args:
            columns: `image`, a list of B EncodedSample, Decoded, or ReadSample, which then also gives the label;
                `label` and `index`, int64 (B,). A row whose index is -1 is padding, its sample is not looked at.
            keys: uint64 (B, 2), one key per sample.
            read_substitute: gives the stand-ins for bad samples, up to 8 for each.
            attempt: what is known of the micro-batch.
            room: where its arrays are put; None = it has its own.

        Raises:
            SampleError: a bad sample under "raise"; or one for which no good substitute was found.
            ConfigError: a result is of another kind or size than it must be.
        """
        label = np.array(columns["label"], np.int64)
        index = np.array(columns["index"], np.int64)
        result = MicroBatchResult({}, label, index, np.ones(len(index), np.float32))
        samples, key_of = columns["image"], keys.tolist()
        of_rows: list[dict[str, Any] | None] = [None] * len(index)

        def make(position: int, out: np.ndarray | None) -> Any:
            """The content of a sample, None for weight 0; the rest of its row in the result is filled."""
            wanted = int(index[position])
            if wanted < 0:
                label[position], index[position], result.weight[position] = 0, -1, 0
                return None
            candidate = samples[position], int(label[position]), wanted, key_of[position]
            try:
                made, label[position], of_rows[position] = self._try(candidate, out, attempt)
            except SampleError as error:
                bad = f"{self._title(wanted)}: {error}"
                substitute: int | None = None
                if self._on_bad_sample == "raise":
                    hint = f"transform.on_bad_sample='substitute' would go on without it; or {error.advice}"
                    raise type(error)(f"{bad} ({hint})") from error
                if self._exact:
                    made, label[position], result.weight[position] = None, 0, 0
                elif read_substitute is None:
                    raise SampleError(f"{bad} (and there is nothing to read a substitute with)") from error
                else:
                    others = (read_substitute(position, number) for number in range(NUM_SUBSTITUTES))
                    (made, label[position], of_rows[position]), substitute = self._first_good(
                        others, bad, out, attempt
                    )
                    index[position] = substitute
                record = {"store": self._store_address, "index": wanted, "name": self._sample_name(wanted)}
                record |= {"substitute": substitute, "error": str(error), "fault": error.fault}
                result.bad.append(record)
            return made

        result.arrays = self.content.pack(make, len(index), (room or Room()).take)
        if self._columns is not None:
            result.columns = self._columns.pack(of_rows)
            if LABEL in result.columns:
                result.label = result.columns.pop(LABEL).values
        return result

    def _try(self, candidate: Candidate, out: np.ndarray | None, attempt: Attempt) -> Tried:
        """The content of a sample, its label, and its columns."""
        sample, label, index, key = candidate
        if attempt.before_sample:
            attempt.before_sample(index)
        if index in attempt.bad:
            raise SampleError(attempt.bad[index])
        if callable(sample):
            sample, label = sample()
        if label == NO_LABEL:
            raise SampleError(WRONG_LABEL)
        try:
            found: dict[str, Any] = {}
            if self._columns is not None:
                assert isinstance(sample, EncodedSample), "a cache of decoded samples keeps no columns"
                found = self._columns.one(sample.columns, key)  # first: it costs less than an image
            if self._decoded is not None and isinstance(sample, EncodedSample):
                sample = self._decoded(index, label, sample.image) or sample
            return self.content.one(sample, key, out), label, found
        except ConfigError as error:
            raise ConfigError(f"{self._title(index)}: {error}") from error

    def _first_good(
        self, candidates: Iterable[Candidate], bad: str, out: np.ndarray | None, attempt: Attempt
    ) -> tuple[Tried, int]:
        """What the first of several becomes that is not bad as well, and its index."""
        for candidate in candidates:
            index = int(candidate[2])
            try:
                return self._try(candidate, out, attempt), index
            except SampleError as error:
                last, kind = f"{self._title(index)}: {error}", type(error)
        raise kind(f"{bad}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one {last}; {kind.advice}")

    def _title(self, index: int) -> str:
        return title_of(self._store_address, index, self._sample_name(index))
