"""Streams of buckets, made in this process."""

from __future__ import annotations

import numpy as np
import pytest
from without_ray import digests, host_batches

from raypipe.config import AugmentConfig
from raypipe.errors import ConfigError
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash
from raypipe.transform.fields import MicroBatch
from raypipe.transform.sizes import pixel_range

from bucketed import BOTH, SIDES, pictures, spec_of  # isort: skip


STORED = {(12, 16): (40, 60), (14, 14): (50, 50), (16, 12): (60, 40)}
"""The sides of the images of each bucket."""


def shapes(batches: list[MicroBatch], split: str = "train") -> set[tuple[int, ...]]:
    return {
        batch["image"].shape[1:3] for batch in batches if batch.position.split == split
    }


def test_micro_batches_have_their_buckets_shape_and_validations_their_own() -> None:
    spec = spec_of()
    found = list(host_batches(spec))
    assert shapes(found) == SIDES and shapes(found, "val") == {(8, 8)}
    pixels = [height * width for height, width in SIDES]
    assert pixel_range(spec.transform, spec.plan.config.sides_in("train")) == (
        min(pixels),
        max(pixels),
    )
    assert all(
        batch["image"].shape[1:3] == spec.plan.bucket_of(batch.position)
        for batch in found
        if batch.position.split == "train"
    )
    tail = digests(spec_of(), 4)
    assert tail == [batch_hash(batch) for batch in found][-len(tail) :] and 0 < len(
        tail
    ) < len(found)


def test_a_bad_sample_is_replaced_by_one_of_its_bucket_and_source() -> None:
    num_bad, bad = 0, {3, 8, 52}
    for train in (
        pictures(50, (3, 8)),
        {"a": pictures(50, (3, 8)), "b": pictures(20, (2,))},
    ):
        spec = spec_of(train, {"weights": 0.5}, max_bad_fraction=1.0)
        columns = spec.stores["train"].read(
            np.arange(len(spec.stores["train"])), ("width", "height")
        )
        for batch in host_batches(spec):
            num_bad += batch.num_bad
            if batch.position.split == "train":
                assert not bad & set(batch.index.tolist()) and batch.weight.all()
                (sides,) = set(
                    zip(
                        columns["height"][batch.index],
                        columns["width"][batch.index],
                        strict=True,
                    )
                )
                assert sides == STORED[batch["image"].shape[1:3]]
                planned = spec.plan.indices(batch.position)
                assert ((planned < 50) == (batch.index < 50)).all()
    assert num_bad >= 4


def test_validations_in_buckets_have_each_sample_once_in_its_shape() -> None:
    val = pictures(23)
    spec = spec_of(plan={"buckets": BOTH}, val_store=val, size={0: 4, 1: 8})
    sides = val.read(np.arange(23), ("height", "width"))
    seen: dict[int, list[int]] = {0: [], 1: []}
    for epoch in loader(spec, augment=AugmentConfig()).epochs():
        list(epoch.train)
        for batch in epoch.val:
            counted = batch.index[batch.weight > 0].tolist()
            seen[epoch.number] += counted
            # the same in both epochs: a schedule is of the training alone
            shape = tuple(batch.image.shape[2:])
            found = {(sides["height"][i], sides["width"][i]) for i in counted}
            assert found <= {STORED[shape]}
            assert (
                batch.target[batch.weight > 0] == batch.index[batch.weight > 0] % 5
            ).all()
    assert sorted(seen[0]) == list(range(23)) and seen[0] == seen[1]


def test_a_validation_of_one_size_and_a_store_without_sizes_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"transform\.val is .*CenterCrop, which is made once, and plan\.buckets has",
    ):
        spec_of(
            plan={"buckets": BOTH},
            val_store=pictures(9),
            val=[{"CenterCrop": {"height": 8, "width": 8}}],
        )
    with pytest.raises(ConfigError, match=r"no column 'width' for plan\.buckets"):
        spec_of(plan={"buckets": BOTH})
