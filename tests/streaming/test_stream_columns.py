"""Columns of a store, from the store to the batch, on every way there is; without a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ray.data.block import BlockAccessor
from without_ray import digests, every_batch, host_batches

import raypipe
from raypipe.config import (
    PlanConfig,
    PoolConfig,
    RunConfig,
    StoreConfig,
    TransformConfig,
)
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.digest import plain_settings
from raypipe.streaming.maker import MicroBatchMaker, try_samples
from raypipe.streaming.opening import open_stream, renamed, spec_of
from raypipe.streaming.row import batches_of, block_row
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import COLUMN, MicroBatch, Ragged, in_group

from pictures import picture  # isort: skip

NUM = 20
LABELS = np.arange(NUM)
IMAGES = [picture(number) for number in range(NUM)]
VALUES: dict[str, Any] = {
    "caption": [f"picture {number} é" for number in range(NUM)],
    "embedding": np.arange(3 * NUM, dtype=np.float32).reshape(NUM, 3),
    "tags": [list(range(number % 4)) for number in range(NUM)],
    "raw": [bytes([number]) * (number % 3) for number in range(NUM)],
    "meta": [{"number": number} for number in range(NUM)],
}
ALL: dict[str, Any] = {
    "caption": {},
    "embedding": {},
    "tags": {"length": 3, "fill": -1},
    "raw": {},
    "meta": {},
}
ALL |= {"meta.number": {"dtype": "int32"}}
PLAN = PlanConfig(epochs=2, micro_batch_size=4, global_batch_size=8)
TRANSFORM = TransformConfig(train="light", val="center", size=8)
INLINE = PoolConfig(engine="inline")


def store(labels: Any = LABELS, **options: Any) -> MemoryStore:
    values = {**VALUES, **options.pop("values", {})}
    return MemoryStore(options.pop("images", IMAGES), labels, columns=values, **options)


def spec(train: Any = None, **options: Any) -> StreamSpec:
    given: dict[str, Any] = {
        "plan": PLAN,
        "transform": TRANSFORM,
        "pool": INLINE,
        "columns": ALL,
    }
    return open_stream(train or store(), **{**given, **options})


def columns_of(batch: MicroBatch) -> dict[str, Any]:
    found = in_group(batch.fields, COLUMN)
    return {
        name: values.unpacked() if isinstance(values, Ragged) else values
        for name, values in found.items()
    }


def values_of(index: int) -> dict[str, Any]:
    """The columns of a sample, as the store holds them; those of padding are empty."""
    if index == PADDING:
        empty = {"caption": "", "embedding": [0, 0, 0], "tags": [-1, -1, -1]}
        empty |= {"tags_length": 0, "raw": b"", "meta": None, "meta.number": 0}
        return empty
    tags = VALUES["tags"][index]
    return {
        "caption": VALUES["caption"][index],
        "embedding": VALUES["embedding"][index].tolist(),
        "tags": [*tags, -1, -1, -1][:3],
        "tags_length": len(tags),
        "raw": VALUES["raw"][index],
        "meta": VALUES["meta"][index],
        "meta.number": index,
    }


def check(batch: MicroBatch) -> None:
    """What is in a batch is what the store holds of its samples."""
    columns = {
        name: values.tolist() if isinstance(values, np.ndarray) else values
        for name, values in columns_of(batch).items()
    }
    for row, index in enumerate(batch.index.tolist()):
        expected = values_of(index)
        assert [*columns] == [*expected]
        assert {name: values[row] for name, values in columns.items()} == expected


def test_a_batch_has_the_columns_of_its_samples_and_padding_is_empty() -> None:
    batches = list(host_batches(spec(val=store())))
    assert {int((batch.index == PADDING).sum()) for batch in batches} == {0, 4}
    for batch in batches:
        check(batch)


def through_arrow(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row as a rank gets it, from a block of Ray's."""
    return BlockAccessor.for_block(BlockAccessor.batch_to_block(row)).to_numpy()  # type: ignore[return-value]


def test_a_block_of_padding_alone_travels() -> None:
    made = spec(val=store())
    maker, at = MicroBatchMaker(made), MicroBatchId("val", 0, 2, 1)
    (batch,) = batches_of(through_arrow(block_row([maker.make(at)[0]])))
    assert (batch.index == PADDING).all()
    check(batch)


def test_a_substitute_brings_its_own_columns_and_a_bad_value_is_recorded() -> None:
    captions = [
        None if number == 3 else caption
        for number, caption in enumerate(VALUES["caption"])
    ]
    images = [
        b"damaged" if number == 5 else image for number, image in enumerate(IMAGES)
    ]
    config = dataclasses.replace(TRANSFORM, max_bad_fraction=1)
    train = store(images=images, values={"caption": captions})
    maker = MicroBatchMaker(spec(train, val=train, transform=config))
    bad: dict[int, str] = {}
    for at in maker.plan.micro_batches(maker.plan.start()):
        batch, bad_of_batch = maker.make(at)
        bad |= {sample.index: sample.error for sample in bad_of_batch}
        captions_of = columns_of(batch)["caption"]
        assert not np.isin(batch.index[batch.weight > 0], [3, 5]).any()
        for row in np.flatnonzero(batch.weight).tolist():
            assert captions_of[row] == VALUES["caption"][batch.index[row]]
            assert batch["label"][row] == batch.index[row]
        for row in np.flatnonzero(batch.weight == 0).tolist():
            assert captions_of[row] == "" and batch["label"][row] == 0
    assert bad.keys() == {3, 5} and "column 'caption' has no value" in bad[3]


def test_a_bad_value_ends_the_run_where_that_is_asked_for() -> None:
    captions = [None, *VALUES["caption"][1:]]
    config = dataclasses.replace(TRANSFORM, max_bad_fraction=0)
    made = spec(store(values={"caption": captions}), transform=config)
    with pytest.raises(SampleError, match="sample 0: column 'caption' has no value"):
        digests(made)


@pytest.mark.parametrize("labels", [LABELS / 4, np.eye(NUM, 3, dtype=np.uint8), None])
def test_targets_of_any_numbers_reach_the_device(labels: Any) -> None:
    made = spec(
        store(labels),
        columns=["caption"],
        target_column=None if labels is None else "label",
    )
    assert (made.columns.target is None) == (labels is None)
    for batch in every_batch(raypipe.loader(made, device="cpu")):
        expected = np.zeros(4, np.int64) if labels is None else labels[batch.index]
        assert torch.equal(batch.target, torch.from_numpy(expected))
        assert [*batch.columns] == ["caption"] and np.array_equal(
            batch.target_host, expected
        )


def parquet_of(folder: Path, **columns: Any) -> str:
    """A file of the images and some columns."""
    path = folder / "a.parquet"
    pq.write_table(pa.table({"image": IMAGES, **columns}), path)
    return str(path)


def test_a_store_without_labels_is_refused_unless_no_target_is_wanted(
    tmp_path: Path,
) -> None:
    words = "; did you mean labels\\? its columns are image, labels, .* or to '' for batches without a target"
    path = parquet_of(tmp_path, labels=LABELS, caption=VALUES["caption"])
    making: Any = {
        "columns": ["caption"],
        "make_columns": lambda columns: {"length": len(columns["caption"])},
    }
    masks = {
        "columns": (),
        "transform": dataclasses.replace(TRANSFORM, targets={"mask": "caption"}),
    }
    for options in ({"columns": ()}, {"columns": ["caption"]}, making, masks):
        for given in (path, raypipe.open_store(path)):
            with pytest.raises(
                ConfigError,
                match=rf"a\.parquet has no column 'label' for target_column{words}",
            ):
                spec(given, **options)
            without = spec(given, **{**options, "target_column": None})
            assert not without.columns.has_target
        if "transform" not in options:
            assert all(not batch["label"].any() for batch in host_batches(without))
    (batch, *_) = host_batches(spec(path, columns=(), target_column="labels"))
    assert batch["label"].tolist() == batch.index.tolist()
    with pytest.raises(
        ConfigError,
        match=r"store\.columns names 'label', the target, and target_column is ''",
    ):
        spec(columns=["label"], target_column="")


def test_columns_are_named_for_addresses_as_in_a_runs_settings(tmp_path: Path) -> None:
    table = pa.table({"img": IMAGES, "fine": range(NUM), "caption": VALUES["caption"]})
    pq.write_table(table, tmp_path / "a.parquet")
    path, named = (
        str(tmp_path / "a.parquet"),
        {"image_column": "img", "target_column": "fine"},
    )
    options: Any = {"columns": {"fine": {"dtype": "float32"}}}
    config = RunConfig(
        StoreConfig(path, path, **named, **options),
        plan=PLAN,
        transform=TRANSFORM,
        pool=INLINE,
    )
    alone = spec(path, val=Path(path), **named, **options)
    for each in (
        alone,
        spec({"a": path, "b": Path(path)}, **named, **options),
        spec_of(config),
    ):
        (batch, *_) = host_batches(each)
        assert (
            batch["label"].dtype == np.float32
            and batch["label"].tolist() == (batch.index % NUM).tolist()
        )
    assert digests(spec_of(config)) == digests(alone)
    for setting, name in named.items():
        with pytest.raises(
            ConfigError, match=rf"{setting}='{name}' is for an address, and memory:"
        ):
            spec(**{setting: name})


def test_a_target_of_lists_has_its_declared_length(tmp_path: Path) -> None:
    lists = [[number % 2, 1] for number in range(NUM)]
    named = StoreConfig(parquet_of(tmp_path, tags=lists), target_column="tags")
    run = RunConfig(store=named, plan=PLAN, transform=TRANSFORM, pool=INLINE)
    with pytest.raises(
        ConfigError, match="is the target, and is lists of int64: targets are numbers"
    ):
        spec_of(run)
    columns = {"tags": {"length": 2, "dtype": "float32"}}
    made = spec_of(
        dataclasses.replace(run, store=dataclasses.replace(named, columns=columns))
    )
    for batch in host_batches(made):
        assert batch["label"].dtype == np.float32 and not columns_of(batch)
        assert batch["label"].tolist() == [lists[index] for index in batch.index]


def drawn(columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A word of each caption, dropped by the sample's key."""
    words = columns["caption"].split()
    return {"word": str(rng.choice(words)), "label": np.float32(len(words))}


def test_a_function_of_the_configuration_makes_columns_and_the_target() -> None:
    config = dataclasses.replace(TRANSFORM, make_columns=f"{__name__}:drawn")
    made = spec(columns=["caption"], transform=config)
    words = [columns_of(batch)["word"] for batch in host_batches(made)]
    again = spec(columns=["caption"], make_columns=drawn)
    assert words == [columns_of(batch)["word"] for batch in host_batches(again)]
    assert len({tuple(each) for each in words}) > 2
    assert {batch["label"].dtype for batch in host_batches(made)} == {
        np.dtype(np.float32)
    }


def test_what_cannot_go_with_columns_is_refused_before_the_run() -> None:
    mixing = raypipe.AugmentConfig(mixup_alpha=0.2)
    with pytest.raises(
        ConfigError,
        match=r"augment\.mixup_alpha mixes targets, and two that are int64 \(3,\)",
    ):
        raypipe.loader(
            spec(store(np.eye(NUM, 3, dtype=np.int64))), device="cpu", augment=mixing
        )


def test_stores_of_a_mixture_have_one_type_of_a_column() -> None:
    parts = {
        "a": store(),
        "b": store(images=IMAGES[::-1]),
    }
    made = spec(parts)
    for batch in host_batches(made):
        assert columns_of(batch)["caption"] == [
            VALUES["caption"][i % NUM] for i in batch.index
        ]
    with pytest.raises(
        ConfigError, match=r"column 'embedding' is float32 .* in .*, and float64"
    ):
        wider = {"embedding": VALUES["embedding"].astype(float)}
        spec({"a": store(), "b": store(values=wider)})


def test_the_target_is_named_in_columns_by_its_own_name() -> None:
    named = StoreConfig(
        target_column="score", columns={"score": {"dtype": "float32"}, "caption": {}}
    )
    assert [*renamed(named.columns, named.target_column)] == ["label", "caption"]


def test_classes_are_checked_and_other_targets_are_not() -> None:
    with pytest.raises(ConfigError, match=r"label \d+, outside"):
        try_samples(spec(store(LABELS + 50)), 10)
    try_samples(spec(store(LABELS + 50.5)), 10)


def test_a_column_with_the_name_of_an_entry_is_refused_by_plain_loaders() -> None:
    clash = spec(store(values={"weight": LABELS}), columns=["weight"])
    with pytest.raises(ConfigError, match="column 'weight' has the name of an entry"):
        raypipe.plain_loaders(raypipe.loader(clash, device="cpu"))


def test_the_settings_of_a_digest_name_the_columns() -> None:
    found = plain_settings(
        spec(columns=["caption"]), workers=1, actors=1, from_step=0, to_step=1
    )
    assert found["column.caption"] == "text"
