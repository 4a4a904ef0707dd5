"""What actors send for the device to decode: encoded images, and maps of their crops, resizes and flips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from encoded import encoded, keys_of, saved
from micro_batches import EncodedSample, run, samples_of, slow_one, transform_of

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.transform.encoded_map import (
    DATA,
    MAP,
    box_of_map,
    sides_of_map,
)
from raypipe.transform.fields import Ragged
from raypipe.transform.sample_maker import SampleMaker

DEVICE = TransformConfig(size=96, decode="device")
IMAGES = [
    saved(0),
    saved(1, sides=(300, 200)),
    saved(2, "PNG"),
    saved(3, mode="L", sides=(97, 113)),
]


@pytest.mark.parametrize("transform", ["light", "center", "resize", "flip-crop"])
def test_images_travel_as_stored_and_maps_are_those_of_samples_one_by_one(
    transform: str,
) -> None:
    batch, content = encoded(IMAGES, transform), SampleMaker(transform, DEVICE)
    data = batch.fields[DATA]
    assert isinstance(data, Ragged) and data.unpacked() == IMAGES
    for row, (image, key) in enumerate(zip(IMAGES, keys_of(4).tolist(), strict=True)):
        one = slow_one(content, EncodedSample(image), key)
        assert (one[DATA], one[MAP].tolist()) == (image, batch[MAP][row].tolist())


def test_crops_are_those_of_the_cpu_road() -> None:
    program = SampleMaker("light", TransformConfig(size=96))._transforms[0].program
    assert program is not None
    sizes = np.array([(240, 320), (300, 200), (240, 320), (97, 113)])
    params, _ = program.draw(keys_of(4), sizes)
    for row, of_map in enumerate(encoded(IMAGES)[MAP]):
        top, left, height, width = params[row, 1:5].tolist()
        assert box_of_map(of_map) == (top, left, top + height, left + width)
        assert sides_of_map(of_map) == tuple(sizes[row])


@pytest.mark.parametrize(
    ("transform", "part"),
    [
        ("heavy", "the step MotionBlur"),
        ("small", "the step Affine"),
        ("none", "images have their own sizes"),
        ("tv-light", "Compose is not a list of Albumentations"),
        ("simclr", "several views"),
        ([{"HorizontalFlip": {}}], "no fixed size"),
        (
            [{"Resize": {"height": 9, "width": 9}}, {"GaussNoise": {}}],
            "the step GaussNoise",
        ),
        (
            [{"Resize": {"height": 9, "width": 9, "interpolation": 0}}],
            "Resize with interpolation=0",
        ),
        (
            [
                {"Pad": {"padding": 2, "border_mode": 4}},
                {"RandomCrop": {"height": 9, "width": 9}},
            ],
            "Pad with border",
        ),
        (lambda image: image, "function is not a list"),
    ],
)
def test_what_needs_pixels_is_named_with_its_remedy(transform: Any, part: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{part}.*: transform.decode='device' has .*augment.ops",
    ):
        SampleMaker(transform, DEVICE)


def test_what_a_header_or_a_missing_end_shows_is_bad_at_the_actor() -> None:
    images = [saved(0)[:-400], b"no image", None, saved(1)]
    good = [(EncodedSample(saved(9), 5), 9, (1, 2))]
    batch, bad = run(
        transform_of("light", DEVICE), samples_of(images), keys_of(4), lambda _: good
    )
    assert batch.index.tolist() == [9, 9, 9, 23] and batch["label"].tolist() == [
        5,
        5,
        5,
        9,
    ]
    assert [record["error"][:14] for record in bad] == [
        "truncated JPEG",
        "not an image: ",
        "no value: it i",
    ]


def test_a_crop_larger_than_the_image_is_a_bad_sample() -> None:
    steps = [{"RandomCrop": {"height": 250, "width": 250}}]
    good = [(EncodedSample(saved(1, sides=(260, 260))), 9, (1, 2))]
    for decode in ("device", "cpu"):
        config = TransformConfig(decode=decode)
        batch, bad = run(
            transform_of(steps, config),
            samples_of([saved(0)]),
            keys_of(1),
            lambda _: good,
        )
        assert (
            batch.index.tolist() == [9]
            and "exceeds image dimensions" in bad[0]["error"]
        )


TURNED_CROP = [
    {"RandomCrop": {"height": 60, "width": 200}},
    {"Transpose": {"p": 0.5}},
    {"Resize": {"height": 96, "width": 96}},
]


@pytest.mark.parametrize("transform", ["light", TURNED_CROP], ids=["light", "turned"])
def test_boxes_and_masks_follow_as_on_the_cpu_road(transform: Any) -> None:
    columns = {
        "m": saved(5, "PNG", "L"),
        "b": np.array([[20, 30, 200, 220, 1]], np.float32),
    }
    made = []
    for decode in ("device", "cpu"):
        config = TransformConfig(
            size=96,
            decode=decode,
            targets={"mask": "m", "boxes_xyxy": "b"},
        )
        samples = [EncodedSample(saved(row), row, columns) for row in range(3)]
        made.append(run(transform_of(transform, config), samples, keys_of(3))[0])
    assert np.array_equal(made[0]["mask"], made[1]["mask"]) and np.array_equal(
        made[0]["boxes"], made[1]["boxes"]
    )
    assert made[0]["mask"].shape == (3, 96, 96)
