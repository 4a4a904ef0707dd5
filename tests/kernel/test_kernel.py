"""The kernel against the reference and the usual decoders.

    csrc/geometry.h, resize.h, resize_taps.h    programs of operations
    csrc/resize_loops.h, resize_simd.h          the same, by each level of vector instructions
    csrc/jpeg_header.h                          limits, and what is cut short
    csrc/kernel.c, program.h, image.h           slots between guard bytes, jobs, threads, statuses, bad arrays

jpeg_crop.h and jpeg_huffman.h: test_jpeg_extension.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from fuzz_kernel import fuzz_run

from raypipe import kernel
from raypipe.kernel import CUBIC, LINEAR, NEAREST, Job, Op, extension, reference

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)

CROP, RESIZE, PAD = tuple(Op)[:3]


def noise(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def one(image: Any, op: Op, params: list[int], size: Sequence[int]) -> Any:
    """The image by one operation, made between guard bytes; or the status."""
    memory = np.full((3, *size, 3), 77, np.uint8)
    ops, row = np.array([[op, 0]], np.int32), np.array([[1, *params]], np.int64)
    status = kernel.run([image], [Job(ops, row, memory[1:2])])[0]
    assert (memory[[0, 2]] == 77).all()
    return memory[1] if status == kernel.DONE else int(status)


def test_resize_is_that_of_opencv_to_the_bit_at_all_sizes(simd: int) -> None:
    rng = np.random.default_rng(simd)
    for number in range(400):
        largest = 4 if number % 5 == 0 else 400 if number % 7 == 0 else 70
        source, result = rng.integers(1, largest, 2), rng.integers(1, largest, 2)
        if number % 6 == 0:
            source = result * 2
        image, size = noise(rng, *source), result.tolist()
        for interpolation in (NEAREST, LINEAR):
            expected = cv2.resize(image, size[::-1], interpolation=interpolation)
            found = one(image, RESIZE, [*size, interpolation], size)
            assert np.array_equal(found, expected), (source, result)


def test_cubic_is_that_of_the_reference_and_within_a_level_of_opencv(simd: int) -> None:
    rng = np.random.default_rng(simd)
    for number in range(150):
        image = noise(rng, *rng.integers(1, 90, 2))
        size = rng.integers(1, 4 if number % 5 == 0 else 90, 2).tolist()
        expected = reference.resize(image, [*size, CUBIC])
        assert np.array_equal(one(image, RESIZE, [*size, CUBIC], size), expected)
        exact = cv2.resize(image, size[::-1], interpolation=cv2.INTER_CUBIC)
        assert abs(expected - exact.astype(int)).max() <= 1


@pytest.mark.parametrize("border", range(5))
def test_pad_is_that_of_opencv(border: int) -> None:
    rng = np.random.default_rng(border)
    for size in ((1, 1), (1, 5), (3, 1), (6, 7)):
        image, sides = noise(rng, *size), [int(side) for side in rng.integers(0, 20, 4)]
        params = [*sides, border, 9, 8, 7]
        expected = cv2.copyMakeBorder(image, *sides, border, value=(9, 8, 7))
        assert np.array_equal(reference.pad(image, params), expected)
        found = one(image, PAD, params, expected.shape[:2])
        assert np.array_equal(found, expected)


def test_an_operation_that_does_not_apply_and_a_wrong_size() -> None:
    image = np.zeros((10, 10, 3), np.uint8)
    out = np.zeros((1, 10, 10, 3), np.uint8)
    ops, params = (
        np.array([[CROP, 0]], np.int32),
        np.array([[0, 99, 99, 99, 99]], np.int64),
    )
    assert kernel.run([image], [Job(ops, params, out)])[0] == kernel.DONE
    params[0] = [1, 0, 0, 5, 5]
    assert kernel.run([image], [Job(ops, params, out)])[0] == kernel.WRONG_SIZE


@pytest.mark.parametrize(
    "change",
    [
        {"ops": np.array([[99, 0]], np.int32)},
        {"ops": np.array([[CROP, 1]], np.int32)},
        {"params": np.zeros((3, 5), np.int64)},
        {"out": np.zeros((2, 4, 8, 3), np.uint8)[:, :, ::2]},
        {"out": np.broadcast_to(np.zeros((4, 4, 3), np.uint8), (2, 4, 4, 3))},
        {"out": np.zeros((1, 4, 4, 3), np.uint8)},
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_are_errors(change: dict[str, np.ndarray]) -> None:
    arrays = Job(
        np.array([[CROP, 0]], np.int32),
        np.zeros((2, 5), np.int64),
        np.zeros((2, 4, 4, 3), np.uint8),
    )
    with pytest.raises((ValueError, BufferError)):
        kernel.run([None, None], [arrays._replace(**change)])


def test_it_accepts_only_the_damaged_bytes_that_decode_does() -> None:
    accepted, refused, wrong = fuzz_run(0, 1000)
    assert not wrong and accepted > 30 and refused > 300


def test_without_the_extension_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "available", lambda: False)
    assert kernel.sizes([b"x", None])[0].tolist() == [[0, 0], [0, 0]]
    assert kernel.run([b"x", None], []).tolist() == [kernel.UNREADABLE, kernel.SKIPPED]


@pytest.mark.parametrize("sampling", ["444", "422", "420", "Gray"])
def test_codes_of_the_longest_values_are_skipped(simd: int, sampling: str) -> None:
    """In black and white noise at quality 100: three looks would take more bits than a refill has."""
    rng = np.random.default_rng(simd)
    for channels in (1, 3):
        image = np.repeat(
            rng.integers(0, 2, (256, 256, channels)).astype(np.uint8) * 255,
            3 // channels,
            2,
        )
        data = simplejpeg.encode_jpeg(image, 100, "RGB", sampling)
        expected = simplejpeg.decode_jpeg(data, "RGB")[210:250, 3:43]
        assert np.array_equal(one(data, CROP, [210, 3, 40, 40], (40, 40)), expected)
