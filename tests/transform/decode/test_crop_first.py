from __future__ import annotations

import functools
import os
import pickle
from typing import Any

import cv2
import numpy as np
import pytest

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
import albumentations as A  # noqa: N812
import torch
import torchvision
from ray import cloudpickle
from torchvision.transforms import v2

from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform

RNG = np.random.default_rng(0)
# Wide and tall ones too, for which the ten draws fail and the crop is centerd.
IMAGES = [
    cv2.resize(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8), size)
    for size in [
        (60, 80),
        (41, 33),
        (200, 90),
        (300, 12),
        (9, 250),
        (33, 33),
        (1, 1),
        (640, 480),
    ]
]
KEYS = [(number, 7 * number) for number in range(5)]

PIPELINES = {
    "light": lambda: build_transform("light", 24),
    "heavy": lambda: build_transform("heavy", 24),
    **{
        name: functools.partial(build_transform, name, 24)
        for name in ("tv-light", "autoaugment", "augmix")
    },
    "steps": lambda: build_transform(
        [{"RandomResizedCrop": {"size": [24, 24]}}, {"Blur": None}], 24
    ),
    "cubic": lambda: A.Compose(
        [A.RandomResizedCrop((33, 33), interpolation=cv2.INTER_CUBIC)]
    ),
    "part of it": lambda: A.Compose(
        [A.RandomResizedCrop((9, 9), (0.2, 0.3), (0.1, 9.0)), A.GaussNoise(p=1)]
    ),
    "torchvision": lambda: v2.Compose(
        [v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2)]
    ),
    "torchvision without antialias": lambda: v2.Compose(
        [v2.RandomResizedCrop((24, 30), antialias=False)]
    ),
    "torchvision bicubic": lambda: v2.Compose(
        [v2.RandomResizedCrop([24], interpolation=3), v2.RandAugment()]
    ),
}


def by_crop(
    transform: SampleTransform, image: np.ndarray, key: tuple[int, int]
) -> tuple[np.ndarray, list[Any]]:
    asked = []

    def decode_box(box: tuple[int, int, int, int]) -> np.ndarray:
        asked.append(box)
        top, left, height, width = box
        return image[top : top + height, left : left + width].copy()

    return transform((image.shape[:2], decode_box), key), asked


@pytest.mark.parametrize("name", PIPELINES)
def test_the_crop_alone_gives_what_the_whole_image_gives(name: str) -> None:
    transform = SampleTransform(PIPELINES[name]())
    target = transform.crop_target
    sizes = set()
    for image in IMAGES:
        for key in KEYS:
            whole = transform(image.copy(), key)
            part, asked = by_crop(transform, image, key)
            assert np.array_equal(part, whole)
            (box,) = asked  # once, and of plain integers inside of the image
            assert all(type(value) is int for value in box)
            assert (
                box[0] + box[2] <= image.shape[0] and box[1] + box[3] <= image.shape[1]
            )
            sizes.add(box[2:])
            assert part.shape[:2] == target
    assert len(sizes) > 12, "the crop hardly varies"


@pytest.mark.parametrize("name", ["heavy", "torchvision"])
def test_neither_history_nor_pickling_shows(name: str) -> None:
    transform = SampleTransform(PIPELINES[name]())
    forward = [by_crop(transform, IMAGES[0], key)[0].copy() for key in KEYS]
    again = pickle.loads(cloudpickle.dumps(transform))
    assert again.crop_target == transform.crop_target
    backward = [by_crop(again, IMAGES[0], key)[0].copy() for key in reversed(KEYS)][
        ::-1
    ]
    assert all(np.array_equal(a, b) for a, b in zip(forward, backward, strict=True))


def test_an_error_of_the_decoder_comes_through() -> None:
    def bad(_: object) -> np.ndarray:
        raise OSError("damaged")

    for name in ("light", "torchvision"):
        transform = SampleTransform(PIPELINES[name]())
        with pytest.raises(OSError, match="damaged"):
            transform(((48, 64), bad), KEYS[1])
        assert np.array_equal(
            by_crop(transform, IMAGES[0], KEYS[2])[0],
            transform(IMAGES[0].copy(), KEYS[2]),
        )


class Mine(A.RandomResizedCrop):
    pass


class MyCompose(v2.Compose):
    pass


def hooked() -> Any:
    pipeline = v2.Compose([v2.RandomResizedCrop(9)])
    pipeline.transforms[0].register_forward_pre_hook(lambda module, given: None)
    return pipeline


OTHERS = {
    "nothing": lambda: None,
    "empty": lambda: A.Compose([]),
    "another crop": lambda: A.Compose([A.RandomCrop(9, 9)]),
    "not at first": lambda: A.Compose(
        [A.HorizontalFlip(), A.RandomResizedCrop((9, 9))]
    ),
    "now and then": lambda: A.Compose([A.RandomResizedCrop((9, 9), p=0.5)]),
    "a pipeline now and then": lambda: A.Compose([A.RandomResizedCrop((9, 9))], p=0.5),
    "a subclass": lambda: A.Compose([Mine((9, 9))]),
    "replay": lambda: A.ReplayCompose([A.RandomResizedCrop((9, 9))]),
    "saved parameters": lambda: A.Compose(
        [A.RandomResizedCrop((9, 9))], save_applied_params=True
    ),
    "one of": lambda: A.OneOf([A.RandomResizedCrop((9, 9))], p=1),
    "another compose": lambda: MyCompose([v2.RandomResizedCrop(9)]),
    "v1": lambda: torchvision.transforms.Compose(
        [torchvision.transforms.RandomResizedCrop(9)]
    ),
    "sequential": lambda: torch.nn.Sequential(v2.RandomResizedCrop(9)),
    "hooked": hooked,
    "plain": lambda: lambda image: image,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_surely_a_random_resized_crop_gets_the_whole_image(
    name: str,
) -> None:
    assert SampleTransform(OTHERS[name]()).crop_target is None
