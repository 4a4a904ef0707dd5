from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.transform.presets import PRESETS, build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.sizes import size_in

SCHEDULE = TransformConfig(size={20: 224, 0: 128, 10: 160})


def test_a_schedule_holds_from_its_epochs_and_validations_have_the_last() -> None:
    assert [size_in(SCHEDULE, "train", epoch) for epoch in (0, 9, 10, 19, 20, 99)] == [
        128,
        128,
        160,
        160,
        224,
        224,
    ]
    assert {size_in(SCHEDULE, "val", epoch) for epoch in (0, 10, 20)} == {224}
    assert size_in(TransformConfig(size=32), "train", 5) == 32


def test_a_bucket_grows_with_the_schedule_to_its_written_size() -> None:
    bucket = (192, 256)
    assert [size_in(SCHEDULE, "train", epoch, bucket) for epoch in (0, 10, 20)] == [
        (110, 146),
        (137, 183),
        bucket,
    ]
    assert (
        size_in(SCHEDULE, "val", 0, bucket)
        == bucket
        == size_in(TransformConfig(size=7), "train", 0, bucket)
    )


@pytest.mark.parametrize(
    "size", [0, {}, {1: 32}, {0: 0}, {0: 32, -1: 16}, {0: 32, 2: -1}]
)
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"transform\.size.* must be (a whole number|one, or {EPOCH: SIZE, …})",
    ):
        TransformConfig(size=size)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_images_of_any_height_and_width(name: str) -> None:
    made = SampleTransform(build_transform(name, (24, 40)))(picture_of(60, 90), (1, 2))
    assert made.shape == (24, 40, 3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_square_of_two_numbers_is_the_square_of_one_to_the_bit(name: str) -> None:
    one, two = (
        SampleTransform(build_transform(name, size))(picture_of(60, 90), (3, 4))
        for size in (32, (32, 32))
    )
    np.testing.assert_array_equal(one, two)


def picture_of(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
