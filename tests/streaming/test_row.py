from __future__ import annotations

import numpy as np
import pytest

from raypipe.plan.schedule import PADDING, MicroBatchId
from raypipe.stores.base import MemoryStore
from raypipe.streaming.row import (
    PLACE_SCHEMA,
    READ_SCHEMA,
    host_batch,
    made_row,
    read_of,
    read_samples,
    source_row,
)
from raypipe.transform.micro_batch import MicroBatchResult
from raypipe.transform.sample_transform import EncodedSample

AT = MicroBatchId("val", 3, 2, 1)


def store(size: int) -> MemoryStore:
    return MemoryStore([bytes([i]) * 3 for i in range(size)], np.arange(size) * 10)


def test_read_samples_gives_the_order_asked_for_with_padding_in_between() -> None:
    images, labels = read_samples(store(4), np.array([3, PADDING, 0, 3]))
    assert [sample.image for sample in images] == [b"\3\3\3", None, b"\0\0\0", b"\3\3\3"]
    assert labels.tolist() == [30, 0, 0, 30] and labels.dtype == np.int64


def test_read_samples_of_nothing_but_padding() -> None:
    images, labels = read_samples(store(4), np.full(3, PADDING))
    assert images == [EncodedSample(None)] * 3
    assert labels.tolist() == [0] * 3 and labels.dtype == np.int64


def test_padding_is_a_sample_of_nothing_where_there_are_targets() -> None:
    seg = MemoryStore([b"a"], [7], columns={"seg": [b"m"]})
    samples, labels = read_samples(seg, np.array([PADDING, 0]), {"mask": "seg"})
    assert samples == [EncodedSample(None), EncodedSample(b"a", b"m")] and labels.tolist() == [0, 7]


@pytest.mark.parametrize("mask", [None, b"m"])
def test_what_a_reader_has_read_is_what_an_actor_unpacks(mask: bytes | None) -> None:
    read = [EncodedSample(b"a", mask), EncodedSample(None)], np.array([7, 0])
    found = read_of(source_row(AT, read, READ_SCHEMA))
    assert found is not None and found[0] == read[0] and found[1].tolist() == [7, 0]
    assert read_of(source_row(AT, None, READ_SCHEMA)) is None
    assert read_of(source_row(AT, None, PLACE_SCHEMA)) is None


@pytest.mark.parametrize(
    "names", [("image",), ("image", "mask", "boxes"), ("data", "offsets", "crop", "flip", "ok")]
)
def test_a_finished_row_is_its_micro_batch(names: tuple[str, ...]) -> None:
    arrays = {name: np.full(2, number) for number, name in enumerate(names)}
    label, index, weight = np.array([1, 0]), np.array([5, PADDING]), np.array([1, 0], np.float32)
    batch = host_batch(made_row(AT, MicroBatchResult(arrays, label, index, weight, [{}]), 0.25, 0.5))
    assert (batch.at, batch.num_bad, batch.read_s, batch.work_s) == (AT, 1, 0.25, 0.5)
    assert batch.label is not None and [batch.label.tolist(), batch.index.tolist()] == [[1, 0], [5, PADDING]]
    found = {name: array for name, array in vars(batch).items() if name in names} | dict(batch.encoded or {})
    assert {name: array.tolist() for name, array in found.items() if array.size} == {
        name: array.tolist() for name, array in arrays.items()
    }
