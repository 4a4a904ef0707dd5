"""The kernel refuses params beyond their limits; by all others the reference makes its pixels."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from fuzz_kernel import random_op

from raypipe import kernel
from raypipe.kernel import BAD_PARAMS, DONE, Job, Op, reference
from raypipe.kernel.ops import LINEAR, MAX_FILTER, MAX_RADIUS, NEAREST

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)

HEIGHT, WIDTH = 21, 17
IMAGE = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
MAX, MIN = (1 << 63) - 1, -(1 << 63)
# On both sides of each limit that an operation has.
LIMITS = [0, 3, 8, MAX_FILTER, 17, 21, MAX_RADIUS, 256, 1 << 14, -(1 << 14), 65_500]
LIMITS += [1 << 16, 6 << 16, 64 << 16, 1 << 31, 1 << 32]
EDGES = [MAX, MIN, *(limit + step for limit in LIMITS for step in (-1, 0, 1))]
RESIZING = (Op.CROP, Op.RESIZE, Op.PAD, Op.TURN)
BLUR = [1, 4, 1 << 13, 1 << 12, *[0] * (MAX_RADIUS - 1)]
FILTER = [3, 4, *[1 << 10] * 9, *[0] * (MAX_FILTER**2 - 9)]
JITTER = [0, 1, 2, 3, 1 << 16, 1 << 16, 1 << 16, 0]


def by_reference(op: int, params: list[int], image: np.ndarray = IMAGE) -> np.ndarray:
    table = np.array([[op, 0]], np.int32), np.array([1, *params], np.int64)
    return reference.apply_all(image, *table)


def by_kernel(
    op: int, params: list[int], image: np.ndarray = IMAGE
) -> np.ndarray | None:
    """The image, of the size that it had; None: the kernel has the status BAD_PARAMS."""
    out = np.zeros((1, *image.shape), np.uint8)
    job = Job(np.array([[op, 0]], np.int32), np.array([[1, *params]], np.int64), out)
    (status,) = kernel.run([image], [job])
    assert status in (DONE, BAD_PARAMS), status
    return out[0] if status == DONE else None


@pytest.mark.parametrize("op", [op for op in Op if op not in RESIZING])
def test_params_at_the_edges_that_the_kernel_takes_make_the_same_pixels(op: Op) -> None:
    num_refused = num_made = 0
    rng = np.random.default_rng(int(op))
    while num_made + num_refused < 600:
        _, params = random_op(rng, op)
        for _ in range(int(rng.integers(3)) if params else 0):
            # Of filters, mostly one of those before the many coefficients.
            place = int(rng.integers(min(len(params), 12)))
            params[place] = int(rng.choice(np.array(EDGES, object)))
        made = by_kernel(op, params)
        if made is None:
            num_refused += 1
        else:
            num_made += 1
            assert np.array_equal(made, by_reference(op, params)), params
    assert num_refused > 100 or op == Op.GRAY
    assert num_made > 50


PAD = [1, 1, 1, 1, 0, 0, 0, 0]
# An operation with good params, and a place among them with bad ones.
BAD: list[tuple[Op, list[int], int, list[int]]] = [
    (Op.CROP, [0, 0, 1, 1], 0, [-1, HEIGHT, MAX]),
    (Op.CROP, [0, 0, 1, 1], 2, [0, HEIGHT + 1, MAX]),
    (Op.RESIZE, [5, 5, 1], 0, [0, -1, 65_501, MAX, MIN]),
    (Op.RESIZE, [5, 65_500, 1], 0, [65_500]),
    (Op.RESIZE, [5, 5, 1], 2, [-1, 3]),
    (Op.PAD, PAD, 0, [-1, 65_500, MAX]),
    (Op.PAD, PAD, 4, [-1, 5]),
    (Op.PAD, PAD, 6, [-1, 256]),
    (Op.TURN, [0], 0, [-1, 8]),
]


@pytest.mark.parametrize(("op", "params", "place", "values"), BAD, ids=str)
def test_bad_params_of_each_kind_are_refused(
    op: Op, params: list[int], place: int, values: list[int]
) -> None:
    for value in values:
        bad = [*params[:place], value, *params[place + 1 :]]
        assert by_kernel(op, bad) is None, bad


@pytest.mark.parametrize(
    ("op", "params"),
    [
        (Op.JITTER, [-1, -1, -1, -1, 64 << 16, 0, 0, (6 << 16) - 1]),
        (Op.JITTER, [3, 3, 0, 0, 64 << 16, 0, 0, (6 << 16) - 1]),
        (Op.TABLE, [0, 256, 0, 255]),
        (Op.BLUR, BLUR),
        (
            Op.BLUR,
            [0, 0, 1 << 14, *[MAX] * MAX_RADIUS],
        ),  # those behind the radius are not read
        (Op.BLUR, [1, 0, 0, 1 << 13, *[-1] * (MAX_RADIUS - 1)]),
        (Op.FILTER, [1, 3, -(1 << 14), *[MIN] * (MAX_FILTER**2 - 1)]),
        (Op.FILTER, FILTER),
    ],
    ids=str,
)
def test_params_at_their_limits_are_taken(op: Op, params: list[int]) -> None:
    made = by_kernel(op, params)
    assert made is not None and np.array_equal(made, by_reference(op, params))


def test_affine_maps_of_any_side_and_border_are_the_references(simd: int) -> None:
    rng = np.random.default_rng(simd)
    for number in range(300):
        height, width = rng.integers(1, 40, 2).tolist()
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        # turns, scales and shifts, which have most of the image in sight
        near = np.array([1, 0, 0, 0, 1, 0]) + rng.normal(0, 0.2, 6) * (number % 4)
        numbers = near * [1, 1, width, 1, 1, height]
        params = (numbers * (1 << 32)).astype(np.int64).tolist()
        params += [number % 2, *rng.integers(0, [5, 256, 256, 256]).tolist()]
        made = by_kernel(Op.AFFINE, params, image)
        assert made is not None
        assert np.array_equal(made, by_reference(Op.AFFINE, params, image)), params


@pytest.mark.parametrize("interpolation", [NEAREST, LINEAR])
def test_numpy_resizes_as_opencv_does(
    interpolation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(interpolation)
    monkeypatch.setattr(reference, "cv2", None)
    sides = [*rng.integers(1, 90, (60, 4)).tolist(), [18, 34, 9, 17], [5, 7, 5, 7]]
    for height, width, *size in sides:
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        made = reference.resize(image, [*size, interpolation])
        expected = cv2.resize(image, size[::-1], interpolation=interpolation)
        assert np.array_equal(made, expected), (height, width, size)
        mask = np.ascontiguousarray(image[..., 0])
        of_mask = cv2.resize(mask, size[::-1], interpolation=cv2.INTER_NEAREST)
        assert np.array_equal(reference.nearest(mask, *size), of_mask)
