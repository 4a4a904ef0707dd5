"""What stores hold of masks and boxes: what is understood, and what each malformed one is said to be."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
from image_files import png_chunk, saved
from PIL import Image
from torchvision import transforms

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.targets import (
    TARGETS,
    decode_boxes,
    decode_keypoints,
    decode_mask,
    marked,
    target_pipeline,
)

CLASSES = np.random.default_rng(0).integers(0, 4, (20, 30), dtype=np.uint8)
SIZE = (20, 30)


def png(pixels: np.ndarray, mode: str | None = None, **options: Any) -> bytes:
    image = (
        Image.fromarray(pixels)
        if mode is None
        else Image.fromarray(pixels).convert(mode)
    )
    if mode == "P":
        image = Image.frombytes("P", pixels.shape[::-1], pixels.tobytes())
        image.putpalette(
            np.random.default_rng(1).integers(0, 256, 768, dtype=np.uint8).tobytes()
        )
    return saved(image, "PNG", **options)


def test_each_target_has_a_setting_that_names_its_column() -> None:
    targets = {name: f"of {name}" for name in reversed(TARGETS)}
    named = TransformConfig(targets=targets).target_columns
    assert named == targets and [*named] == [*TARGETS]
    by_size = TransformConfig(targets={"boxes_xywh": "b"})
    assert (by_size.target_columns, by_size.boxes_format) == ({"boxes": "b"}, "xywh")
    for wrong in ({"box": "b"}, {"boxes": "b", "boxes_xywh": "b"}):
        with pytest.raises(ConfigError, match=r"transform\.targets must be columns"):
            TransformConfig(targets=wrong)


# Masks


@pytest.mark.parametrize(
    "data",
    [
        png(CLASSES),
        png(CLASSES, "P"),
        png(CLASSES, "P", bits=2),
        png(CLASSES, "P", bits=4, transparency=0),
        cv2.imencode(".png", CLASSES)[1].tobytes(),
    ],
    ids=["gray", "palette", "palette of 2 bits", "palette with transparency", "cv2"],
)
def test_a_mask_is_the_index_of_each_pixel(data: bytes) -> None:
    mask = decode_mask(data, SIZE)
    assert mask.dtype == np.uint8 and mask.flags.writeable
    np.testing.assert_array_equal(mask, CLASSES)


def test_one_bit_is_zero_and_one() -> None:
    np.testing.assert_array_equal(
        decode_mask(png((CLASSES > 1) * np.uint8(255), "1"), SIZE), CLASSES > 1
    )


@pytest.mark.parametrize("mode", ["L", "P"])
def test_all_256_values_stay_as_they_are(mode: str) -> None:
    every = np.arange(256, dtype=np.uint8).reshape(8, 32)
    np.testing.assert_array_equal(decode_mask(png(every, mode), (8, 32)), every)


def gray_of_bits(bits: int) -> bytes:
    """A PNG of one row of 8 pixels, grayscale of `bits` bits; Pillow cannot write it."""
    header = png_chunk("IHDR", struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0))
    row = png_chunk("IDAT", zlib.compress(b"\0" + bytes(bits)))
    return b"\x89PNG\r\n\x1a\n" + header + row + png_chunk("IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "the mask has no value"),
        (b"", "the mask has no value"),
        (b"abc", "no PNG: it starts with 61 62 63"),
        (7, "no PNG: it is a int"),
        (cv2.imencode(".jpg", CLASSES)[1].tobytes(), "no PNG: it starts with ff d8 ff"),
        (png(CLASSES)[:-40], "(truncated|damaged) PNG of a mask"),
        (png(CLASSES)[:20], "(truncated|damaged) PNG of a mask"),
        (
            png(CLASSES[:, :29]),
            r"the mask has 29x20 pixels \(width x height\), the image 30x20",
        ),
        (png(np.dstack([CLASSES] * 3)), "PNG of mode 'RGB' with 8 bits"),
        (png(CLASSES, "LA"), "PNG of mode 'LA' with 8 bits"),
        (png(CLASSES.astype(np.uint16)), "with 16 bits: it must have one channel of 8"),
    ],
)
def test_a_mask_that_is_none_is_a_bad_sample_with_the_reason(
    data: Any, message: str
) -> None:
    with pytest.raises(SampleError, match=message):
        decode_mask(data, SIZE)


@pytest.mark.parametrize("bits", [2, 4])
def test_grayscale_of_a_few_bits_has_no_plain_meaning(bits: int) -> None:
    with pytest.raises(SampleError, match=f"with {bits} bits"):
        decode_mask(gray_of_bits(bits), (1, 8))


@pytest.mark.parametrize("mode", ["P", "L"])
def test_any_damage_is_a_sample_error_and_no_other(mode: str) -> None:
    rng, good = np.random.default_rng(5), png(CLASSES, mode)
    for _ in range(300):
        data = bytearray(good[: rng.integers(8, len(good) + 1)])
        for at in rng.integers(8, len(data) + 1, 3):
            data[min(at, len(data) - 1)] = rng.integers(256)
        try:
            assert decode_mask(bytes(data), SIZE).shape == SIZE
        except SampleError as error:
            assert "mask" in str(error)


# Boxes

BOXES = [[1.5, 2.0, 11.0, 12.25, 3.0], [0.0, 0.0, 30.0, 20.0, 0.0]]
FLAT = [number for box in BOXES for number in box]


@pytest.mark.parametrize(
    "value",
    [
        BOXES,
        FLAT,
        np.array(BOXES),
        np.array(FLAT, np.float32),
        tuple(map(tuple, BOXES)),
        json.dumps(BOXES),
        json.dumps(FLAT),
        json.dumps(BOXES).encode() + b"\n",
        np.array(BOXES, "<f4").tobytes(),
    ],
    ids=[
        "lists",
        "flat",
        "array",
        "flat array",
        "tuples",
        "JSON",
        "flat JSON",
        "JSON as bytes",
        "float32",
    ],
)
def test_all_forms_of_boxes_mean_the_same(value: Any) -> None:
    boxes = decode_boxes(value, SIZE)
    assert boxes.dtype == np.float32
    np.testing.assert_array_equal(boxes, np.array(BOXES, np.float32))


@pytest.mark.parametrize(
    "value",
    [[], [[]], b"", "", "[]", b" [] ", np.empty((0, 5)), np.empty(0, np.float32)],
)
def test_what_is_empty_is_no_boxes(value: Any) -> None:
    assert decode_boxes(value, SIZE).shape == (0, 5)


def test_a_box_is_cut_at_the_edges_of_the_image() -> None:
    assert decode_boxes([[-0.5, -1, 31, 20.5, 1]], SIZE).tolist() == [[0, 0, 30, 20, 1]]


def box(*corners: float, label: float = 1) -> list[list[float]]:
    return [[0, 0, 5, 5, 1], [*corners, label]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the boxes have no value"),
        (
            box(0, 0, np.nan, 5),
            r"box 1 of 2, \[0.0, 0.0, nan, 5.0, 1.0\], is not finite",
        ),
        (json.dumps(box(0, 0, np.nan, 5)), "is not finite"),
        ([[1, 2, 3, None, 5]], "the boxes are not numbers"),
        (box(5, 0, 5, 5), r"box 1 of 2, \[5.0, 0.0, 5.0, 5.0, 1.0\], is empty"),
        (box(-0.9, 0, -0.1, 5), "is empty"),
        (
            box(0, 0, 31.5, 5),
            r"reaches out of the image of 30x20 pixels \(width x height\)",
        ),
        (box(0, -1.5, 5, 5), "reaches out of the image"),
        (box(0, 0, 5, 1e300), "is not finite as float32"),
        (
            box(0, 0, 5, 5, label=-1),
            "a label that is not a whole number from 0 to 16777216",
        ),
        (
            box(0, 0, 5, 5, label=2**24 + 1),
            "a label that is not a whole number from 0 to 16777216",
        ),
        ([[0, 0, 5, 5]], r"numbers of shape \(1, 4\): they must be five to a box"),
        ([[[0, 0, 5, 5, 1]]], r"numbers of shape \(1, 1, 5\)"),
        ("7", r"numbers of shape \(\)"),
        ([[0, 0, 5, 5, 1], [0, 0]], "the boxes are not numbers"),
        ('[{"x": 1}]', "the boxes are not numbers"),
        ("[[1, 2", "the boxes are not numbers"),
        ("[" * 100_000, "the boxes are not numbers"),
        (b"[" * 100_000 + b"]", "the boxes are not numbers"),
        (b"\0\0\0", "the boxes are not numbers"),
        (object(), "the boxes are not numbers"),
        ('[["0", "0", "5", "5", "1"]]', "the boxes are not numbers"),
    ],
)
def test_boxes_that_are_malformed_are_a_bad_sample_with_the_reason(
    value: Any, message: str
) -> None:
    with pytest.raises(SampleError, match=message):
        decode_boxes(value, SIZE)


# Pipelines


def test_the_limits_of_the_users_own_parameters_hold() -> None:
    params = A.BboxParams("pascal_voc", label_fields=["labels"], min_visibility=0.6)
    pipeline = A.Compose([A.Crop(0, 0, 10, 10)], bbox_params=params)
    image, boxes = (
        np.zeros((20, 30, 3), np.uint8),
        np.array([[5, 0, 15, 5, 1], [4, 0, 11, 5, 2]], np.float32),
    )
    assert target_pipeline(pipeline, ["boxes"])(image=image, bboxes=boxes)["bboxes"][
        :, 4
    ].tolist() == [2]
    assert params.label_fields == ["labels"]
    assert set(target_pipeline(pipeline, [])(image=image, mask=image[:, :, 0])) == {
        "image",
        "mask",
    }


@pytest.mark.parametrize(
    "transform",
    [
        A.HorizontalFlip(),
        A.ReplayCompose([]),
        transforms.Compose([transforms.RandomHorizontalFlip()]),
        lambda image: image,
    ],
    ids=["bare", "replay", "old torchvision", "function"],
)
def test_what_is_no_compose_is_refused_with_what_to_do(transform: Any) -> None:
    given = r"(albumentations\.[HR]\w+|torchvision\.Compose|function)"
    with pytest.raises(
        ConfigError,
        match=rf"an albumentations.Compose or .*v2, and the transform is a {given}: write",
    ):
        target_pipeline(transform, [])


def test_another_format_of_boxes_is_refused() -> None:
    pipeline = A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("coco"))
    with pytest.raises(ConfigError, match=r"format='coco'.* set format='pascal_voc'"):
        target_pipeline(pipeline, ["boxes"])


# Keypoints


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1, 2, 0], [-5, 60.5, 3]], "<f4").tobytes(),
        "[[1, 2, 0], [-5, 60.5, 3]]",
        b"[1, 2, 0, -5, 60.5, 3]",
        [[1, 2, 0], [-5, 60.5, 3]],
        np.array([1, 2, 0, -5, 60.5, 3]),
    ],
)
def test_keypoints_have_the_forms_of_boxes_and_may_lie_outside(value: Any) -> None:
    found = decode_keypoints(value, (40, 48))
    assert found.dtype == np.float32 and found.tolist() == [[1, 2, 0], [-5, 60.5, 3]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the keypoints have no value"),
        (
            [1, 2, 3, 4],
            r"numbers of shape \(4,\): they must be three to a keypoint, \[x, y, label\]",
        ),
        ([1, float("nan"), 0], "keypoint 0 of 1, .*, is not finite"),
        (
            [0, 0, 0, 1, 1, -1],
            "keypoint 1 of 2, .*, has a label that is not a whole number from 0 to 16777216",
        ),
        (
            [0, 0, 2**24 + 1],
            "has a label that is not a whole number from 0 to 16777216",
        ),
        (
            [1e39, 0, 0],
            r"keypoint 0 of 1, \[1e\+39, 0\.0, 0\.0\], is not finite as float32",
        ),
    ],
)
def test_malformed_keypoints_make_a_bad_sample(value: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        decode_keypoints(value, (40, 48))


def test_outside_keypoints_are_marked_and_keep_label_and_place() -> None:
    corners = [[0, 0, 0], [7.9, 5.9, 1], [8, 1, 0], [1, 6, 4], [-0.1, 1, 2]]
    found = marked(corners, (6, 8, 3))
    assert found[:, 2].tolist() == [0, 1, -2, -6, -4]
    assert np.allclose(found[:, :2], np.array(corners)[:, :2])
    assert marked([], (6, 8)).shape == (0, 3)
    with pytest.raises(SampleError, match="keypoint 1 of 2 is not finite"):
        marked([[0, 0, 0], [np.inf, 0, 1]], (6, 8))
