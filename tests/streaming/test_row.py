from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micro_batches import EncodedSample, as_samples, each, plain

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import PADDING, Cursor, MicroBatchId
from raypipe.rayext.iteration import Ended
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import (
    batches_of,
    block_row,
    host_batches,
    of_source_row,
    source_row,
)
from raypipe.transform.fields import Field, MicroBatch, Ragged
from raypipe.transform.samples import NO_LABEL

BLOCK = [MicroBatchId("val", 3, 2, 0), MicroBatchId("val", 3, 2, 1)]


COLUMNS = [
    {"seg": b"m", "note": "ré", "boxes": [[0.5, 1.5], [2.0]]},
    {"seg": None, "note": "", "boxes": []},
]


@pytest.mark.parametrize("columns", [[{}, {}], COLUMNS])
def test_what_a_reader_has_read_is_what_an_actor_unpacks(
    columns: list[dict[str, Any]],
) -> None:
    samples = as_samples(
        [
            EncodedSample(b"a", 7, columns[0]),
            EncodedSample(None, 0, columns[1]),
            EncodedSample(None, -1, columns[0]),
            EncodedSample(b"b", NO_LABEL, columns[1]),
        ]
    )
    samples.read_s = 0.5
    samples.outage_s = 0.25
    block, given = of_source_row(source_row(BLOCK, samples))
    assert given is not None
    assert (block, given.read_s, given.outage_s) == (BLOCK, 0.5, 0.25)
    np.testing.assert_equal(each(given), each(samples))
    assert of_source_row(source_row(BLOCK, None)) == (BLOCK, None)


def made(at: MicroBatchId, fields: dict[str, Any]) -> MicroBatch:
    index, weight = np.array([at.micro, PADDING]), np.array([1, 0], np.float32)
    label = np.array([at.step, 0])
    return MicroBatch(
        at, index, weight, {**fields, "label": label}, at.micro, 0.25, 0.5
    )


def assert_same(found: list[MicroBatch], expected: list[MicroBatch]) -> None:
    assert [plain(batch) for batch in found] == [plain(batch) for batch in expected]
    assert [list(batch.fields) for batch in found] == [
        list(batch.fields) for batch in expected
    ]


def test_images_and_lists_of_any_size_come_out_of_a_block_unchanged() -> None:
    tags = Field("ragged", "int16", (2,))
    lists = [[np.ones((3, 2), np.int16), None], [None, None]]
    texts, json = [[b"a", b"bcd"], [None, b"e"]], [[b"[1]", None], [None, b"{}"]]
    all_made = [
        made(
            at,
            {
                "image": np.full((2, 3 + at.micro, 4, 3), at.micro, np.uint8),
                "view.a.b": np.full((2, 5, 1, 3), 1 + at.micro, np.uint8),
                "column.tags": Ragged.of("ragged", lists[at.micro], tags),
                "column.text": Ragged.of("text", texts[at.micro], Field("text")),
                "column.json": Ragged.of("json", json[at.micro], Field("json")),
            },
        )
        for at in BLOCK
    ]
    found = list(batches_of(block_row(all_made)))
    assert_same(found, all_made)
    assert [batch["image"].shape for batch in found] == [(2, 3, 4, 3), (2, 4, 4, 3)]


def test_a_stream_at_its_end_needs_no_execution(stores: dict[str, Path]) -> None:
    spec = open_stream(
        stores["train"],
        plan=PlanConfig(epochs=1, micro_batch_size=4, global_batch_size=8),
    )
    end = Cursor(1, 0, spec.plan.fingerprint)
    for apart in (False, True):
        found = splits(spec, end, max_actors=1, world_size=2, apart=apart)
        assert [list(host_batches(iterator)) for iterator in found] == [[], []]
        assert isinstance(found[0], Ended)  # it runs nothing that could be told of
    with pytest.raises(ConfigError, match="3 workers cannot share"):
        splits(spec, end, max_actors=1, world_size=3)
