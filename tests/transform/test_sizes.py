from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pictures import picture

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.transform.encoded import CROP, EncodedTransform, center_box, random_resized_crop
from raypipe.transform.presets import PRESETS, build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import EncodedSample
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
    assert [size_in(SCHEDULE, "train", epoch, bucket) for epoch in (0, 10, 20)] == [(110, 146), (137, 183), bucket]
    assert size_in(SCHEDULE, "val", 0, bucket) == bucket == size_in(TransformConfig(size=7), "train", 0, bucket)


@pytest.mark.parametrize("size", [0, {}, {1: 32}, {0: 0}, {0: 32, -1: 16}, {0: 32, 2: -1}])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"transform\.size.* must be (a whole number|one, or {EPOCH: SIZE, …})"):
        TransformConfig(size=size)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_images_of_any_height_and_width(name: str) -> None:
    made = SampleTransform(build_transform(name, (24, 40)))(picture_of(60, 90), (1, 2))
    assert made.shape == (24, 40, 3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_square_of_two_numbers_is_the_square_of_one_to_the_bit(name: str) -> None:
    one, two = (
        SampleTransform(build_transform(name, size))(picture_of(60, 90), (3, 4)) for size in (32, (32, 32))
    )
    np.testing.assert_array_equal(one, two)


def picture_of(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_random_crops_have_ratios_about_that_of_the_size() -> None:
    rng = np.random.default_rng(0)
    for aspect in (0.5, 1.0, 2.0):
        boxes = [random_resized_crop(1000, 1000, rng, aspect) for _ in range(500)]
        ratios = np.array([width / height for _, _, height, width in boxes]) / aspect
        assert 0.74 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.35
        assert np.exp(np.log(ratios).mean()) == pytest.approx(1, abs=0.05)


def test_the_centre_box_has_the_ratio_of_the_size() -> None:
    top, left, height, width = center_box(400, 300, (112, 224))
    assert height / width == pytest.approx(0.5, abs=0.01)
    assert (2 * top + height, 2 * left + width) == pytest.approx((400, 300), abs=1)
    assert width == pytest.approx(300 * 224 / 256, abs=1)


def test_what_the_device_is_to_cut_follows_the_size() -> None:
    config = TransformConfig(train="center", decode="gpu", size={0: 32, 1: 64})
    for size, ratio in (((32, 64), 2.0), ((64, 32), 0.5), (None, 1.0)):
        made = EncodedTransform("center", config, size).one(EncodedSample(picture(0)), (0, 0))
        _, _, height, width = made[CROP]
        assert width / height == pytest.approx(ratio, rel=0.07)
