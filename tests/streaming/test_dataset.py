"""An epoch of the stream as a `ray.data.Dataset`: its samples are those that a loader gives, in its order."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle
from ray.data.block import BlockAccessor
from ray.data.expressions import col
from without_ray import host_batches

import raypipe
from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.dataset import samples_of
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import Field, MicroBatch, Ragged

from pictures import picture  # isort: skip

Stores = dict[str, Path]

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)
SMALL = TransformConfig(train="light", val="center", size=24)
PLACE = ("epoch", "step", "micro")
STORE = MemoryStore(
    [picture(i) for i in range(20)], range(20), columns={"step": [1] * 20}
)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def without_progress_bars(ray_cluster: None) -> Any:
    import ray.data

    context = ray.data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = before


def corner(image: np.ndarray) -> np.ndarray:
    """A transform that needs no library: an actor is there 2 s earlier."""
    return np.ascontiguousarray(image[:9, :9])


CORNERS = {"train_transform": corner, "val_transform": corner}


def spec_of(stores: Stores, train: str = "train", **options: Any) -> StreamSpec:
    return raypipe.open_stream(
        str(stores[train]), str(stores["val"]), **{"plan": PLAN, **options}
    )


def check_batches(
    found: list[dict[str, Any]], batches: list[MicroBatch], channels_first: bool = False
) -> None:
    for columns, batch in zip(found, batches, strict=True):
        expected = samples_of(batch, channels_first)
        for name in ("image", "label", "index", "weight", *PLACE):
            np.testing.assert_array_equal(columns[name], expected[name])


@pytest.mark.cluster
def test_streaming_split_gives_each_rank_its_micro_batches(
    stores: Stores,
) -> None:
    import ray

    # a reader reads its groups
    spec = spec_of(stores, "parquet", plan=replace(PLAN, shuffle=3), **CORNERS)
    dataset = raypipe.dataset(spec, epoch=None, channels_first=True)
    splits = dataset.streaming_split(2, equal=True)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(
            pool.map(lambda split: list(split.iter_batches(batch_size=None)), splits)
        )
    batches = [batch for batch in host_batches(spec) if batch.position.split == "train"]
    for rank, found in enumerate(ranks):
        check_batches(found, batches[rank::2], channels_first=True)
    assert not ray.data.DataContext.get_current().execution_options.preserve_order, (
        "the user's context is as it was"
    )


@pytest.mark.cluster
def test_rows_are_samples_and_a_validation_counts_each_once(
    stores: Stores,
) -> None:
    spec = spec_of(stores, **CORNERS)
    counted = (
        raypipe.dataset(spec, split="val").filter(expr=col("weight") > 0).materialize()
    )
    rows = counted.take_all()
    assert [row["index"] for row in rows] == list(range(22))
    assert rows[0]["image"].shape == (9, 9, 3)


def test_columns_of_every_kind_become_columns_of_the_dataset() -> None:
    texts, blobs = ["é", "", "b"], [b"a\0\0", b"", b"\0"]
    tags = [np.arange(2), np.arange(0), np.arange(3)]
    fields: dict[str, Any] = {
        "view.small": np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3),
        "label": np.arange(3),
        "column.text": ragged("text", [text.encode() for text in texts]),
        "column.blob": ragged("bytes", blobs),
        "column.meta.json": ragged("json", [b'{"a": 1}', b"null", b"[2]"]),
        "column.tags": ragged("ragged", tags),
    }
    batch = MicroBatch(
        MicroBatchId("train", 1, 2, 3), np.arange(3), np.ones(3, np.float32), fields
    )
    table = BlockAccessor.batch_to_block(samples_of(batch, channels_first=True))
    assert table["text"].to_pylist() == texts and table["blob"].to_pylist() == blobs
    assert table["meta.json"].to_pylist() == ['{"a": 1}', "null", "[2]"]
    assert [values.tolist() for values in table["tags"].to_pylist()] == [
        [0, 1],
        [],
        [0, 1, 2],
    ]
    assert table["step"].to_pylist() == [2] * 3
    small = BlockAccessor.for_block(table).to_numpy("small")
    assert np.array_equal(small, fields["view.small"].transpose(0, 3, 1, 2))


def ragged(kind: Any, parts: list[Any]) -> Ragged:
    return Ragged.of(kind, parts, Field(kind, "int64"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 2}, "epoch is 2, and the plan has 2"),
        ({"first_step": 1}, "first_step is 1, and the epoch has 1 steps"),
        ({"split": "val"}, "no validation: give open_stream a second store"),
        ({"split": "test"}, "split must be 'train' or 'val', got 'test'"),
        ({"epoch": None, "first_step": 1}, "needs the number of an epoch"),
    ],
)
def test_a_dataset_that_the_plan_does_not_have_is_one_error(
    options: dict[str, Any], message: str
) -> None:
    spec = raypipe.open_stream(STORE, plan=PLAN, transform=SMALL)
    with pytest.raises(ConfigError, match=message):
        raypipe.dataset(spec, **options)


def test_a_column_with_the_name_of_a_place_is_refused() -> None:
    spec = raypipe.open_stream(STORE, plan=PLAN, transform=SMALL, columns=["step"])
    with pytest.raises(ConfigError, match="column 'step' has the name of an entry"):
        raypipe.dataset(spec)
