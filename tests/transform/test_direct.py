"""A pipeline without Compose gives what Compose gives, to the bit, and writes it where it is wanted."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from micro_batches import run

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
import albumentations as A  # noqa: N812

from raypipe.config import TransformConfig
from raypipe.transform.batch import MicroBatchTransform
from raypipe.transform.contents import Images
from raypipe.transform.decode import encode_jpeg
from raypipe.transform.direct import direct_pipeline
from raypipe.transform.fields import BlockMemory
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import EncodedSample

RNG = np.random.default_rng(0)
# Of the target's size, smaller, larger, odd, long, and a single pixel.
SIZES = [(32, 32), (24, 24), (23, 25), (31, 47), (60, 80), (200, 33), (12, 300), (1, 1), (9, 250), (240, 320)]
IMAGES = [RNG.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
GREY = np.repeat(RNG.integers(0, 256, (40, 50, 1), np.uint8), 3, axis=2)
KEYS = RNG.integers(0, 2**64, (15, 2), np.uint64).tolist()
TARGET = 24

DIRECT: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(build_transform, name, TARGET)
        for name in ("light", "flip-crop", "small", "center", "resize")
    },
    "crop now and then": lambda: A.Compose([A.RandomResizedCrop((24, 24), p=0.7), A.Resize(24, 24)]),
    "crop of other sides": lambda: A.Compose(
        [A.RandomResizedCrop((20, 31), (0.5, 0.6), (0.2, 5)), A.VerticalFlip()]
    ),
    "crop by area": lambda: A.Compose([A.RandomResizedCrop((20, 30), area_for_downscale="image")]),
    "crop, cubic": lambda: A.Compose([A.RandomResizedCrop((40, 24), interpolation=cv2.INTER_CUBIC)]),
    "flips, always and never": lambda: A.Compose(
        [A.HorizontalFlip(p=1), A.VerticalFlip(p=0), A.HorizontalFlip(p=0.1), A.VerticalFlip(p=0.9)]
    ),
    "four sides of a colour": lambda: A.Compose(
        [A.Pad((1, 2, 3, 40), fill=(10.0, 200.0, 30.0)), A.RandomCrop(1, 33, p=0.5)]
    ),
    "two sides of grey": lambda: A.Compose([A.Pad((3, 50), fill=77, p=0.5), A.Pad(0), A.Pad(2, fill=9.5)]),
    "reflected": lambda: A.Compose([A.Pad(9, border_mode=cv2.BORDER_REFLECT_101), A.RandomCrop(13, 13)]),
    "resized at random": lambda: A.Compose([A.Resize(17, 41, interpolation=cv2.INTER_AREA, p=0.5)]),
    "smallest side of a side": lambda: A.Compose([A.SmallestMaxSize(max_size_hw=(None, 19))]),
    "part of the smallest": lambda: A.Compose(
        [A.SmallestMaxSize(30, interpolation=cv2.INTER_AREA), A.CenterCrop(29, 24)]
    ),
    "affine": lambda: A.Compose(
        [
            A.Affine(scale={"x": (0.5, 2), "y": (0.9, 1)}, translate_px={"x": (-5, 5), "y": (0, 9)}, p=0.8),
            A.Affine(rotate=45, shear=(-20, 20), fill=(1.0, 2.0, 3.0), interpolation=cv2.INTER_CUBIC, p=1),
            A.Affine(scale=(0.5, 2), balanced_scale=True, keep_ratio=True, border_mode=cv2.BORDER_WRAP, p=1),
        ]
    ),
    "affine that changes nothing": lambda: A.Compose([A.Affine(p=1), A.Affine(rotate=1e-9, p=1)]),
}
WITH_REST: dict[str, Callable[[], Any]] = {
    "heavy": lambda: build_transform("heavy", TARGET),
    "unknown arguments": lambda: A.Compose(
        [
            A.HorizontalFlip(),
            A.RandomCrop(200, 200, pad_if_needed=True, pad_position="random"),
            A.Resize(31, 33, area_for_downscale="image"),
            A.Affine(rotate=30, fit_output=True, p=1),
            A.SmallestMaxSize([20, 30, 40]),
            A.CenterCrop(300, 300, pad_if_needed=True),
        ]
    ),
    "known steps behind unknown ones": lambda: A.Compose(
        [A.VerticalFlip(), A.GaussNoise(p=0.5), A.RandomResizedCrop((9, 8)), A.HorizontalFlip()]
    ),
    "nested": lambda: A.Compose(
        [A.Resize(30, 40), A.OneOf([A.Blur(p=1), A.ToGray(p=1)], p=0.7), A.Sequential([A.HorizontalFlip()])]
    ),
}


def by_compose(pipeline: Any) -> SampleTransform:
    """The transform as it was before there was another way."""
    transform = SampleTransform(pipeline)
    transform._direct = None
    return transform


def outcome(transform: SampleTransform, image: np.ndarray, key: Any, out: np.ndarray | None = None) -> Any:
    """The image, or the error."""
    try:
        return transform.with_targets(image.copy(), {}, key, out)["image"]
    except Exception as error:  # as of a crop that is larger than its image
        return repr(error)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, str) or isinstance(found, str):
        return bool(found == expected)
    return found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("name", [*DIRECT, *WITH_REST])
def test_pixels_are_those_of_compose_to_the_bit(name: str) -> None:
    pipeline = (DIRECT | WITH_REST)[name]()
    found = direct_pipeline(pipeline)
    assert found is not None, "Albumentations has changed: hold the new version against this test, and list it"
    assert bool(found.rest) == (name in WITH_REST)
    transform, compose = SampleTransform(pipeline), by_compose(pipeline)
    num_images = 0
    for image in [*IMAGES, GREY]:
        for key in KEYS:
            expected = outcome(compose, image, key)
            out = np.empty(expected.shape if isinstance(expected, np.ndarray) else (1, 1, 3), np.uint8)
            assert same(outcome(transform, image, key), expected)
            assert same(outcome(transform, image, key, out), expected)
            num_images += isinstance(expected, np.ndarray)
    assert num_images >= 2 * len(KEYS)


@pytest.mark.parametrize("name", DIRECT)
def test_the_generators_stand_where_compose_leaves_them(name: str) -> None:
    transform, compose = SampleTransform(DIRECT[name]()), by_compose(DIRECT[name]())
    for key in KEYS[:10]:
        for each in (transform, compose):
            each._seed(*key)
            each._direct(IMAGES[4]) if each._direct else each.transform(image=IMAGES[4])
        assert transform._random.getstate() == compose._random.getstate()
        assert repr(transform._keyed.generator.bit_generator.state) == repr(
            compose._keyed.generator.bit_generator.state
        )


@pytest.mark.parametrize("name", ["light", "flip-crop", "small", "center", "resize"])
def test_presets_write_where_the_result_is_wanted(name: str) -> None:
    transform, image = SampleTransform(DIRECT[name]()), IMAGES[4]
    if name == "flip-crop":
        image = IMAGES[1]
    for key in KEYS[:10]:
        room = np.zeros((3, TARGET, TARGET, 3), np.uint8)
        made = transform.with_targets(image.copy(), {}, key, room[1])["image"]
        assert np.shares_memory(made, room) and np.array_equal(room[1], made)
        assert not room[[0, 2]].any()


def test_a_place_of_another_size_is_left_alone() -> None:
    out = np.zeros((TARGET, TARGET + 1, 3), np.uint8)
    made = SampleTransform(DIRECT["light"]()).with_targets(IMAGES[4].copy(), {}, (1, 2), out)["image"]
    assert made.shape == (TARGET, TARGET, 3) and not out.any()


class Mine(A.HorizontalFlip):
    pass


def replayed() -> Any:
    pipeline = A.Compose([A.HorizontalFlip()])
    pipeline.set_deterministic(True)
    return pipeline


@pytest.mark.parametrize(
    "pipeline",
    [
        None,
        lambda image: image,
        A.HorizontalFlip(),
        A.Compose([]),
        A.Compose([A.ToGray(), A.HorizontalFlip()]),
        A.Compose([Mine()]),
        A.Compose([A.Compose([A.HorizontalFlip()])]),
        A.Compose([A.HorizontalFlip()], p=0.5),
        A.Compose([A.HorizontalFlip()], save_applied_params=True),
        A.Compose([A.HorizontalFlip()], additional_targets={"other": "image"}),
        A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("pascal_voc")),
        A.Compose([A.RandomCrop(9, 9, pad_if_needed=True)]),
        A.ReplayCompose([A.HorizontalFlip()]),
        A.Sequential([A.HorizontalFlip()], p=1),
        replayed(),
    ],
)
def test_what_is_not_surely_known_is_left_to_compose(pipeline: Any) -> None:
    assert direct_pipeline(pipeline) is None


def test_another_version_of_the_library_is_left_to_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(A, "__version__", "2.0.9")
    assert direct_pipeline(A.Compose([A.HorizontalFlip()])) is None


@pytest.mark.parametrize("name", ["light", "flip-crop", "heavy"])
def test_micro_batches_are_the_same_and_a_bad_sample_leaves_nothing_behind(name: str) -> None:
    config = TransformConfig(train=name, size=TARGET)
    encoded = [encode_jpeg(cv2.resize(image, (TARGET, TARGET))) for image in IMAGES[:4]]
    samples = [EncodedSample(data) for data in [*encoded[:2], encoded[0][:-90], b"", encoded[3]]]
    keys = np.array(KEYS[:5], np.uint64)
    batches = []
    for direct in (True, False):
        content = Images(build_transform(name, TARGET), config)
        if not direct:
            content._transform._direct = None
        transform, memory = MicroBatchTransform(content, exact=True), BlockMemory(content.fields, 2)
        for indices in ([0, 1, 2, 3, 4], [0, 1, 2, -1, 4]):
            run(transform, samples, keys, indices=indices, memory=memory)
        batches.append(memory.arrays["image"])
    assert np.array_equal(*batches)
    assert not batches[0][:, 2:4].any() and batches[0][:, [0, 1, 4]].any((2, 3, 4)).all()
