"""Images that stay on a device: it makes of them what the CPU transform does, with the same draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from budgets import Counted
from raypipe.device.resident import ResidentImages, free_bytes
from raypipe.transform.resident import ResidentContent, ResidentTransform

from raypipe.errors import ConfigError
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import EncodedSample, SampleTransform

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
SHAPE = (40, 36)
IMAGES = RNG.integers(0, 256, (12, *SHAPE, 3), np.uint8)
KEYS = [tuple(key) for key in RNG.integers(0, 2**64, (24, 2), np.uint64).tolist()]

CROP, FLIP = {"RandomCrop": {"height": 20, "width": 33}}, {"HorizontalFlip": {}}
TURNED = [
    {"VerticalFlip": {"p": 0.6}},
    FLIP,
    CROP,
    {"VerticalFlip": {}},
    {"CenterCrop": {"height": 9, "width": 30}},
]
WINDOWS: dict[str, Any] = {
    **{name: name for name in ("none", "flip-crop", "center", "resize")},
    "each step once, some twice": [*TURNED, FLIP, {"HorizontalFlip": {"p": 0.0}}],
    "fixed steps first": [{"Resize": {"height": 50, "width": 44}}, {"HorizontalFlip": {"p": 1.0}}, *TURNED],
    "a border of another kind": [{"Pad": {"padding": 9, "border_mode": 4, "fill": 7}}, CROP, FLIP],
    "a border of a colour": [{"Pad": {"padding": [1, 2, 3, 40], "fill": [10, 200, 30]}}, CROP],
}
RESAMPLED: dict[str, Any] = {
    "light": "light",
    "small": "small",
    "crops of other sides, flipped before and after": [
        FLIP,
        {"RandomResizedCrop": {"size": [21, 35], "scale": [0.1, 1.0]}},
        *TURNED[:2],
    ],
    "now and then, twice": [
        {"Affine": {"rotate": [-90, 90], "scale": [0.5, 2.0], "shear": [-20, 20], "p": 0.7}},
        CROP,
        {"Affine": {"translate_px": [-9, 9], "p": 1.0}},
    ],
}


def both(transform: Any, limit: int = 99) -> tuple[list[np.ndarray], np.ndarray]:
    """What a CPU makes of samples in turn, and what a device does, which gets a row of padding as well."""
    on_cpu, split = (
        SampleTransform(build_transform(transform, 24)),
        ResidentTransform(build_transform(transform, 24)),
    )
    expected = [on_cpu(IMAGES[number % 12].copy(), key) for number, key in enumerate(KEYS)]
    held = np.stack([split.first(image) for image in IMAGES])
    pixels = torch.from_numpy(np.concatenate([held, np.zeros_like(held[:1])]))
    content = ResidentContent(split, (held.shape[1], held.shape[2]), len(IMAGES), [])
    images = ResidentImages({"train": pixels}, {"train": content.stages})
    made: Any = [content.one(EncodedSample(row % 12), key) for row, key in enumerate(KEYS)]  # type: ignore[arg-type]
    drawn = content.pack(lambda position, _: [*made, None][position], len(KEYS) + 1, lambda make: make(1))
    tensors = {name.removeprefix("drawn."): torch.from_numpy(array) for name, array in drawn.items()}
    with Counted(0) as seen:
        found = images.gather("train", tensors).numpy()
    assert sum(seen.operations.values()) <= limit, seen.operations
    return expected, found


@pytest.mark.parametrize("transform", WINDOWS.values(), ids=WINDOWS)
def test_what_only_moves_pixels_gives_those_of_the_cpu(transform: Any) -> None:
    expected, found = both(transform)
    assert np.array_equal(np.stack(expected), found[:-1]) and not found[-1].any()
    if transform not in ("none", "center", "resize"):
        assert len({image.tobytes() for image in found[::12]}) > 1, "one sample, several keys"


@pytest.mark.parametrize("transform", RESAMPLED.values(), ids=RESAMPLED)
def test_what_interpolates_differs_by_one_level_at_most(transform: Any) -> None:
    expected, found = both(transform)
    difference = np.abs(np.stack(expected).astype(int) - found[:-1])
    assert difference.max() <= 1 and (difference > 0).mean() < 0.2
    assert not found[-1].any() and len({image.tobytes() for image in found[::12]}) > 1


REFUSED: dict[str, tuple[Any, str]] = {
    "heavy": ("heavy", "has MotionBlur, which the device has no equivalent of.*augment.preset"),
    "tv-light": ("tv-light", "is no list of Albumentations steps"),
    "a function": (lambda image: image, "is no list of Albumentations steps"),
    "unknown first": ([{"GaussNoise": {}}, FLIP], "is no list of Albumentations steps"),
    "a resize of crops": ([CROP, {"Resize": {"height": 9, "width": 9}}], "has Resize behind a step that draws"),
    "a border of crops": ([CROP, {"Pad": {"padding": 2}}], "has Pad behind a step that draws"),
    "sizes": ([{"RandomCrop": {"height": 9, "width": 9, "p": 0.5}}], "has RandomCrop with p=0.5"),
    "cubic": ([{"RandomResizedCrop": {"size": [9, 9], "interpolation": 2}}], "another interpolation"),
    "by area": ([{"RandomResizedCrop": {"size": [9, 9], "area_for_downscale": "image"}}], "area_for_downscale"),
    "filled": ([{"Affine": {"rotate": 9, "fill": 3}}], "something other than black"),
    "wrapped": ([{"Affine": {"rotate": 9, "border_mode": 3}}], "something other than black"),
}


@pytest.mark.parametrize(("transform", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_equivalent_is_refused_by_its_name_with_what_to_do(transform: Any, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"pool\.cache='device': transform\.train .*{message}.*pool\.cache='disk'"
    ):
        ResidentTransform(build_transform(transform, 24), "transform.train")


def test_a_crop_of_more_than_the_image_is_refused_at_once() -> None:
    split = ResidentTransform(build_transform([{"RandomCrop": {"height": 60, "width": 9}}], 24))
    with pytest.raises(ConfigError, match="raised CropSizeError"):
        split.stages(SHAPE)


@pytest.mark.parametrize(("transform", "limit"), [("none", 1), ("flip-crop", 5), ("light", 18), ("small", 15)])
def test_a_micro_batch_takes_few_operations(transform: str, limit: int) -> None:
    both(transform, limit)


def test_only_what_interpolates_says_that_its_pixels_differ() -> None:
    for transforms, expected in ((WINDOWS, False), (RESAMPLED, True)):
        for transform in transforms.values():
            assert ResidentTransform(build_transform(transform, 24)).resamples is expected


def test_the_free_memory_of_the_machine_is_found() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50
