"""The wire (csrc/wire.h): C is the reference to the bit, and what is lost is what 4:2:0 loses."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import simplejpeg

from raypipe import kernel
from raypipe.kernel import DONE, Job, yuv420
from raypipe.transform.decode.rgb import decode

SHAPES = [
    (1, 1),
    (1, 8),
    (9, 1),
    (2, 2),
    (3, 5),
    (16, 16),
    (17, 33),
    (33, 16),
    (64, 63),
    (67, 129),
    (224, 224),
]


def noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-60, 316, (*shape, 3)).clip(0, 255).astype(np.uint8)


@pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)
def test_the_kernel_equals_the_reference_and_writes_its_slots_alone(simd: None) -> None:
    rng = np.random.default_rng(0)
    for number in range(60):
        height, width = (
            SHAPES[number] if number < len(SHAPES) else rng.integers(1, 90, 2).tolist()
        )
        image = noise(rng, height, width)
        luma = np.full((3, height, width, 1), 77, np.uint8)
        chroma = np.full((3, *yuv420.chroma_shape(image.shape)), 77, np.uint8)
        job = Job(np.empty((0, 2), np.int32), np.empty((3, 0), np.int64), luma, chroma)
        assert kernel.run([None, image, None], [job])[1] == DONE
        assert (luma[::2] == 77).all() and (chroma[::2] == 77).all()
        expected = yuv420.numpy_planes(image)
        assert np.array_equal(luma[1], expected[0]) and np.array_equal(
            chroma[1], expected[1]
        )


@pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)
def test_slots_that_do_not_fit_are_refused() -> None:
    ops, params, image = (
        np.empty((0, 2), np.int32),
        np.empty((1, 0), np.int64),
        np.zeros((5, 5, 3), np.uint8),
    )
    luma, chroma = np.zeros((1, 5, 5, 1), np.uint8), np.zeros((1, 3, 3, 2), np.uint8)
    wrong: list[tuple[np.ndarray, np.ndarray | None]] = [
        (luma, None),
        (luma, chroma[:, :2]),
        (luma, chroma[:, :, :2]),
        (luma, chroma[..., :1]),
        (np.zeros((1, 5, 5, 3), np.uint8), chroma),
        (luma, np.zeros((2, 3, 3, 2), np.uint8)),
    ]
    for out, of_image in wrong:
        with pytest.raises(ValueError, match="must"):
            kernel.run([image], [Job(ops, params, out, of_image)])


def test_all_colors_are_near_and_those_without_a_color_are_the_same() -> None:
    levels = np.array([0, 1, 2, 63, 64, 127, 128, 129, 200, 254, 255], np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(-1, 1, 1, 3)
    back = yuv420.rgb(*yuv420.numpy_planes(colors))
    assert np.abs(back.astype(int) - colors).max() <= 2
    gray = (colors == colors[..., :1]).all(-1)
    assert np.array_equal(back[gray], colors[gray])
    luma, chroma = yuv420.numpy_planes(colors)
    assert (
        luma.max() == 255
        and luma.min() == 0
        and chroma.max() == 255
        and chroma.min() == 0
    )


def test_an_odd_side_is_an_even_one_whose_last_pixels_are_there_twice() -> None:
    image = noise(np.random.default_rng(1), 7, 9)
    even = np.pad(image, ((0, 1), (0, 1), (0, 0)), "edge")
    (luma, chroma), expected = yuv420.numpy_planes(image), yuv420.numpy_planes(even)
    assert np.array_equal(chroma, expected[1]) and np.array_equal(
        luma, expected[0][:7, :9]
    )
    assert np.array_equal(yuv420.rgb(luma, chroma), yuv420.rgb(*expected)[:7, :9])


def test_crops_of_several_views_are_each_by_themselves() -> None:
    images = noise(np.random.default_rng(2), 2, 3, 8, 7)
    luma, chroma = kernel.planes(images)
    assert luma.shape == (2, 3, 8, 7, 1) and chroma.shape == (2, 3, 4, 4, 2)
    for at in np.ndindex(2, 3):
        one = yuv420.numpy_planes(images[at])
        assert np.array_equal(luma[at], one[0]) and np.array_equal(chroma[at], one[1])


def test_a_smooth_picture_of_4_2_0_loses_next_to_nothing() -> None:
    rng, differences = np.random.default_rng(3), []
    for _ in range(8):
        small = rng.integers(40, 216, (4, 5, 3), np.uint8)
        pixels = cv2.resize(small, (320, 240), interpolation=cv2.INTER_CUBIC)
        image = decode(simplejpeg.encode_jpeg(pixels, 90, "RGB", "420"))
        differences.append(
            np.abs(yuv420.rgb(*yuv420.numpy_planes(image)).astype(int) - image)
        )
    difference = np.concatenate(differences)
    assert difference.mean() < 1.5 and np.quantile(difference, 0.999) < 12
