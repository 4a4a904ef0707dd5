from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.cursor import Cursor
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.rayext.iteration import Ended
from raypipe.stores.base import MemoryStore
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import (
    PLACE_SCHEMA,
    READ_SCHEMA,
    Made,
    batches_of,
    block_of,
    host_batches,
    made_row,
    reads_of,
    source_row,
)
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.batch import HostBatch, MicroBatchResult, Room, read_samples
from raypipe.transform.encoded import pack
from raypipe.transform.sample_transform import EncodedSample

BLOCK = [MicroBatchId("val", 3, 2, 0), MicroBatchId("val", 3, 2, 1)]


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
    reads = [
        ([EncodedSample(b"a", mask), EncodedSample(None)], np.array([7, 0])),
        ([EncodedSample(None), EncodedSample(b"b")], np.array([0, 8])),
    ]
    table = source_row(BLOCK, reads, READ_SCHEMA)
    found = reads_of(table)
    assert found is not None and block_of(table) == BLOCK
    assert [(samples, labels.tolist()) for samples, labels in found] == [
        (samples, labels.tolist()) for samples, labels in reads
    ]
    assert reads_of(source_row(BLOCK, None, READ_SCHEMA)) is None
    assert reads_of(source_row(BLOCK, None, PLACE_SCHEMA)) is None


def made(at: MicroBatchId, arrays: dict[str, np.ndarray]) -> Made:
    label, index, weight = np.array([at.step, 0]), np.array([at.micro, PADDING]), np.array([1, 0], np.float32)
    return Made(at, MicroBatchResult(arrays, label, index, weight, [{}] * at.micro), 0.25, 0.5)


def contents(batch: HostBatch) -> dict[str, object]:
    found = {**vars(batch), **(batch.encoded or {})}
    found.pop("encoded")
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


@pytest.mark.parametrize("names", [("image",), ("image", "mask", "boxes")])
def test_a_finished_row_has_its_micro_batches_and_no_copy_of_what_is_in_the_room(names: tuple[str, ...]) -> None:
    room = Room(2)
    all_made = []
    for number, at in enumerate(BLOCK):
        arrays = room.take(lambda count: {name: np.zeros((count, 2, 3), np.uint8) for name in names})
        for place, array in enumerate(arrays.values()):
            array[:] = 10 * number + place
        all_made.append(made(at, arrays))
    row = made_row(all_made, room)
    found = list(batches_of(row))
    assert [contents(batch) for batch in found] == [contents(one.host_batch()) for one in all_made]
    assert [(batch.at, batch.num_bad, batch.work_s) for batch in found] == [(at, at.micro, 0.5) for at in BLOCK]
    for name in names:
        assert all(np.shares_memory(room.arrays[name], getattr(batch, name)) for batch in found)


def test_encoded_micro_batches_of_unlike_lengths_come_out_of_a_block_as_they_went_in() -> None:
    all_made = []
    for at, images in zip(BLOCK, [(b"abc", b""), (b"d", b"efghi")], strict=True):
        cuts = [(image, (0, 0, 1, 1), at.micro == 0) if image else None for image in images]
        all_made.append(made(at, pack(cuts)))
    found = list(batches_of(made_row(all_made, Room(2))))
    assert [contents(batch) for batch in found] == [contents(one.host_batch()) for one in all_made]
    assert found[1].encoded is not None and list(found[1].encoded) == ["data", "offsets", "crop", "flip", "ok"]
    assert bytes(found[1].encoded["data"]) == b"defghi" and found[1].encoded["offsets"].tolist() == [0, 1, 6]


def test_a_block_is_let_go_before_the_next_one_is_awaited() -> None:
    class Array(np.ndarray):
        pass

    blocks = []

    def row() -> dict[str, np.ndarray]:
        all_made = [made(at, pack([(b"abc", (0, 0, 1, 1), True), None])) for at in BLOCK]
        found = {name: column.view(Array) for name, column in made_row(all_made, Room(2)).items()}
        blocks.append(weakref.ref(found["data"]))
        return found

    class Iterator:
        def iter_batches(self, **options: Any) -> Any:
            for _ in range(3):
                assert all(block() is None for block in blocks)
                yield row()

    assert len(list(map(contents, host_batches(Iterator())))) == 6  # type: ignore[arg-type]


def test_of_a_stream_at_its_end_ranks_get_nothing_and_no_execution_is_needed(stores: dict[str, Path]) -> None:
    spec = StreamSpec(stores["train"], plan=PlanConfig(epochs=1, micro_batch_size=4, global_batch_size=8))
    end = Cursor(1, 0, spec.plan.fingerprint)
    for apart in (False, True):
        found = splits(spec, end, max_actors=1, world_size=2, apart=apart)
        assert [list(host_batches(iterator)) for iterator in found] == [[], []]
        assert isinstance(found[0], Ended)  # it runs nothing that could be told of
    with pytest.raises(ConfigError, match="3 workers cannot share"):
        splits(spec, end, max_actors=1, world_size=3)
