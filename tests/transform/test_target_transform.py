"""Masks and boxes go where their pixels go, images stay what they are without them, and bad ones are judged."""

from __future__ import annotations

import io
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
from albumentations.pytorch import ToTensorV2
from image_files import saved
from jpeg_headers import exif
from micro_batches import (
    EncodedSample,
    MicroBatchTransform,
    run,
    slow_one,
    transform_of,
)
from PIL import Image, ImageOps

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.packages import installed_version
from raypipe.stores.memory import MemoryStore
from raypipe.transform.checks import check_transforms
from raypipe.transform.decode.rgb import encode_jpeg
from raypipe.transform.presets import build_transform
from raypipe.transform.targets import IGNORE, by_pipeline, marked, target_pipeline

BOTH = {"mask": "seg", "boxes": "objects"}
KEYS = np.random.SeedSequence(3).generate_state(80, np.uint64).reshape(40, 2)


def scene(index: int, height: int = 192, width: int = 256) -> EncodedSample:
    """A bright square on black; its mask is 1, the background's 0, and it has the one box, of label `index`."""
    rng = np.random.default_rng(index)
    left, top, side = rng.integers(
        [0, 0, 60], [width - 100, height - 100, 100]
    ).tolist()
    mask = np.zeros((height, width), np.uint8)
    mask[top : top + side, left : left + side] = 1
    image = encode_jpeg(np.repeat(mask[:, :, None] * np.uint8(240), 3, axis=2))
    boxes = [[left, top, left + side, top + side, index]]
    columns = {"seg": cv2.imencode(".png", mask)[1].tobytes(), "objects": boxes}
    return EncodedSample(image, 10 + index, columns)


def other(column: str, value: Any) -> EncodedSample:
    """The second scene with another value in a column."""
    return SCENES[1]._replace(columns={**SCENES[1].columns, column: value})


SCENES = [scene(index) for index in range(12)]


def both(
    transform: Any, columns: dict[str, str] = BOTH, num_most: int = 4, **settings: Any
) -> MicroBatchTransform:
    config = TransformConfig(targets={**columns, "max": num_most}, **settings)
    return transform_of(transform, config, store_address="x.lmdb")


def one(
    transform: Any, sample: EncodedSample, key: Any, **settings: Any
) -> dict[str, Any]:
    return slow_one(both(transform, **settings).sample_maker, sample, key)


# Geometry

STEPS = {
    "perspective": lambda: [A.Perspective(p=1, fill_mask=IGNORE), A.Resize(128, 128)],
    "rotate": lambda: [A.Resize(128, 128), A.RandomRotate90(p=1), A.Transpose(p=0.5)],
    "random sized crop": lambda: [A.RandomSizedCrop((100, 190), (128, 128))],
    "affine": lambda: [
        A.Affine(scale=(0.6, 1.2), translate_percent=(-0.2, 0.2), p=1),
        A.Resize(128, 128),
    ],
    "one of": lambda: [
        A.OneOf([A.HorizontalFlip(p=1), A.VerticalFlip(p=1)], p=0.9),
        A.Resize(128, 128),
    ],
    "grid distortion": lambda: [A.GridDistortion(p=1), A.Resize(64, 64)],
    "grid dropout": lambda: [A.GridDropout(p=1), A.Resize(64, 64)],
    "some of": lambda: [
        A.SomeOf(
            [A.HorizontalFlip(p=0.5), A.GaussNoise(p=0.5), A.RandomGamma(p=0.5)], n=2
        ),
        A.Resize(64, 64),
    ],
    "random order": lambda: [
        A.RandomOrder([A.Affine(shear=(-20, 20), p=0.7), A.MotionBlur(p=0.5)], n=2),
        A.Resize(64, 64),
    ],
    "sequential": lambda: [
        A.Sequential([A.Compose([A.VerticalFlip()], p=0.5), A.ISONoise(p=1)], p=0.9),
        A.Resize(64, 64),
    ],
}
PRESETS = ["light", "heavy", "center", "resize", "flip-crop", "small"]


def pipeline(name: str) -> Any:
    if name in PRESETS:
        return build_transform(name, 128)
    return A.Compose(STEPS[name]())


@pytest.mark.parametrize("name", ["flip-crop", "small"])
def test_what_a_preset_pads_is_no_class(name: str) -> None:
    padded = [
        (one(pipeline(name), SCENES[0], key)["mask"] == IGNORE).mean()
        for key in KEYS.tolist()
    ]
    assert 0 < max(padded) < 0.5


# The image is the same


@pytest.mark.parametrize("name", [*PRESETS, *STEPS])
def test_the_image_has_the_pixels_that_it_has_without_targets(name: str) -> None:
    made = pipeline(name)
    columns = ({}, BOTH, {"mask": "seg"}, {"boxes": "objects"})
    makers = [both(made, each).sample_maker for each in columns]
    for key, sample in zip(KEYS.tolist(), SCENES, strict=False):
        plain, *others = (slow_one(maker, sample, key)["image"] for maker in makers)
        for image in others:
            np.testing.assert_array_equal(image, plain)


# Micro-batches


def test_a_micro_batch_has_rows_of_all_three_and_padding_has_nothing() -> None:
    batch, _ = run(both(pipeline("resize")), SCENES[:3], KEYS, padding=1)
    image, mask, boxes = (batch[name] for name in ("image", "mask", "boxes"))
    assert image.shape == (4, 128, 128, 3) and mask.shape == (4, 128, 128)
    assert boxes.shape == (4, 4, 5)
    assert (image.dtype, mask.dtype, boxes.dtype) == (np.uint8, np.uint8, np.float32)
    assert boxes[:3, 0, 4].tolist() == [0, 1, 2] and (boxes[:3, 1:, 4] == -1).all()
    assert (
        not image[3].any()
        and (mask[3] == IGNORE).all()
        and (boxes[3, :, 4] == -1).all()
    )


BAD = {
    "image": (SCENES[1]._replace(image=b"bad"), "not an image"),
    "mask": (other("seg", b"bad"), "the mask is no PNG"),
    "no mask": (other("seg", None), "the mask has no value"),
    "size": (
        other("seg", scene(0, height=191).columns["seg"]),
        "the mask has 256x191 pixels",
    ),
    "boxes": (other("objects", [[5, 5, 4, 6, 1]]), "is empty"),
    "no boxes": (other("objects", None), "the boxes have no value"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_substitute_brings_its_own_mask_and_boxes(name: str) -> None:
    sample, message = BAD[name]
    made = build_transform("light", 128)
    k0, k1 = KEYS[9].tolist()
    batch, (bad,) = run(
        both(made), [SCENES[0], sample], KEYS, lambda _: [(SCENES[9], 77, (k0, k1))]
    )
    assert batch.index.tolist() == [20, 77] and message in bad["error"]
    assert batch["label"].tolist() == [10, 19]
    alone = one(made, SCENES[9], (k0, k1))
    np.testing.assert_array_equal(batch["mask"][1], alone["mask"])
    np.testing.assert_array_equal(
        batch["boxes"][1, : len(alone["boxes"])], alone["boxes"]
    )
    assert (batch["boxes"][1, len(alone["boxes"]) :, 4] == -1).all()


def test_more_boxes_than_there_is_room_for_end_the_run() -> None:
    far = other("objects", [[0, 0, 3, 3, 1]] * 5)
    transform = both(A.Compose([A.Crop(50, 50, 100, 100)]))
    with pytest.raises(
        ConfigError,
        match=r"x.lmdb sample 21: it has 5 boxes, .* transform.targets.max is 4: raise it",
    ):
        run(transform, [SCENES[1], far], KEYS)


def test_a_mask_that_is_none_any_more_is_a_config_error() -> None:
    def halved(mask: np.ndarray, **_: Any) -> np.ndarray:
        return mask / 2

    floats = A.Compose([A.Lambda(mask=halved)])
    with pytest.raises(ConfigError, match="the transform made a mask of float64"):
        run(both(floats), SCENES[:1], KEYS)


@pytest.mark.parametrize("last", [[], [A.Normalize(p=0.5)]])
def test_a_mask_may_be_a_tensor_at_the_end_of_a_pipeline(last: list[Any]) -> None:
    steps = [A.Resize(96, 128), A.HorizontalFlip(p=1)]
    found = one(A.Compose([*steps, *last, ToTensorV2()]), SCENES[0], (1, 2))
    expected = one(A.Compose(steps), SCENES[0], (1, 2))
    assert np.array_equal(found["mask"], expected["mask"])
    assert np.array_equal(found["boxes"], expected["boxes"])


class Mine(A.DualTransform):
    def apply(self, img: np.ndarray, **_: Any) -> np.ndarray:
        return img[::-1]


@pytest.mark.skipif(
    installed_version("albumentationsx") is not None,
    reason="AlbumentationsX leaves the boxes where they are",
)
def test_a_transform_that_cannot_move_boxes_is_named_by_bad_samples() -> None:
    with pytest.raises(
        SampleError,
        match=r"the transform failed at .*: NotImplementedError: BBoxes .* Mine",
    ):
        one(A.Compose([Mine(p=1)]), SCENES[0], (1, 2))


def test_keypoints_that_a_distortion_loses_are_outside() -> None:
    pipeline = target_pipeline(
        A.Compose([A.Crop(0, 0, 20, 20), A.GridDistortion(5, (0, 0), p=1)]),
        ["keypoints"],
    )
    points, image = (
        np.array([[90, 90, 5], [4, 6, 7], [30, 2, 5]], np.float32),
        np.zeros((100, 100, 3), np.uint8),
    )
    made = by_pipeline(pipeline, image, {"keypoints": points})
    expected = [[-1, -1, -7], [4, 6, 7], [-1, -1, -7]]
    # the library is a pixel off
    assert np.abs(marked(made["keypoints"], (20, 20)) - expected).max() <= 1
    assert made["keypoints"][:, 2].tolist() == [5, 7, 5]
    mirror = A.Compose([A.PadIfNeeded(200, 200, border_mode=cv2.BORDER_REFLECT_101)])
    with pytest.raises(
        ConfigError,
        match=r"made \d+ keypoints of 3: a border that repeats pixels repeats keypoints",
    ):
        by_pipeline(
            target_pipeline(mirror, ["keypoints"]), image, {"keypoints": points}
        )


def test_boxes_that_a_transform_cuts_into_more_than_there_is_room_for() -> None:
    cut = both(A.Compose([A.RandomGridShuffle((6, 6), p=1)]), num_most=1)
    with pytest.raises(
        ConfigError,
        match=r"sample 20: it has \d+ boxes, and transform.targets.max is 1: raise it",
    ):
        run(cut, SCENES[:1], KEYS)


# Photos that metadata turns

ALL = {**BOTH, "keypoints": "points"}


def turned(orientation: int, kind: str) -> tuple[EncodedSample, EncodedSample]:
    """A scene as an upright picture, and as a photo that is stored turned; both with the upright one's targets."""
    sides = (256, 192) if orientation < 5 else (192, 256)
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    photo = saved(cv2.resize(noise, sides), kind, exif=exif(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(photo)))
    points = {"points": [[30, 40, 1], [200, 100, 2]]}
    scene = SCENES[3]._replace(columns={**SCENES[3].columns, **points})
    return scene._replace(image=saved(upright, kind)), scene._replace(image=photo)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("preset", ["light", "center", "perspective"])
def test_a_turned_photo_is_used_with_its_targets_as_the_upright_picture(
    preset: str, orientation: int
) -> None:
    upright, stored = turned(orientation, "PNG")
    transform = both(pipeline(preset), ALL, apply_exif=True, size=128)
    batch, _ = run(transform, [upright, stored], KEYS[:1].repeat(2, 0))
    for name, values in batch.fields.items():
        assert np.array_equal(values[0], values[1]), name


def test_targets_that_do_not_fit_a_turned_photo_say_so() -> None:
    _, stored = turned(6, "JPEG")
    with pytest.raises(
        SampleError,
        match=r"256x192 .*EXIF orientation 6\), .*apply_exif is off: set it",
    ):
        one("center", stored, (1, 2))
    aside = np.zeros((256, 192), np.uint8)
    wrong = stored._replace(
        columns={**stored.columns, "seg": cv2.imencode(".png", aside)[1].tobytes()}
    )
    with pytest.raises(
        SampleError,
        match=r"transform.apply_exif is on: targets must be those of the upright",
    ):
        one("center", wrong, (1, 2), apply_exif=True)


# Settings


def test_a_number_of_targets_below_one_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"transform\.targets\['max'\] must be .*at least 1"
    ):
        TransformConfig(targets={"mask": "seg", "max": 0})


def test_stores_and_transforms_are_checked_before_anything_starts() -> None:
    store = MemoryStore([b""], [0], columns={"seg": [b""]})
    good = TransformConfig(targets={"mask": "seg"})
    check_transforms(
        good, {"train": "light", "val": None}, {"train": store, "val": store}
    )
    with pytest.raises(
        ConfigError,
        match=r"has no column 'objects' for transform.targets.boxes; its columns are",
    ):
        check_transforms(
            TransformConfig(targets={"boxes": "objects"}),
            {"train": "light"},
            {"train": store},
        )
    with pytest.raises(ConfigError, match="the transform is a function"):
        check_transforms(good, {"train": lambda image: image}, {"train": store})
    check_transforms(
        TransformConfig(), {"train": lambda image: image}, {"train": store}
    )
