"""The kernel against the reference and the usual decoders.

    csrc/geometry.h, resize.h, resize_taps.h    programs of operations
    csrc/resize_loops.h, resize_simd.h          the same, by each level of vector instructions
    csrc/jpeg_header.h                          limits, and what is cut short
    csrc/kernel.c, program.h, image.h           slots between guard bytes, jobs, threads, statuses, bad arrays

jpeg_crop.h and jpeg_huffman.h: test_jpeg_extension.py.
"""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from fuzz_kernel import fuzz_run
from fuzz_kernel import random_op as any_op
from PIL import Image

from raypipe import kernel
from raypipe.kernel import CUBIC, LINEAR, NEAREST, Job, extension, ops, reference
from raypipe.kernel import Op as Code
from raypipe.kernel.ops import AREA
from raypipe.kernel.reference import OPERATIONS
from raypipe.transform.decode.jpeg import sizes_by_header
from raypipe.transform.decode.rgb import decode

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)

CROP, RESIZE, PAD, TURN, AFFINE, DROPOUT = tuple(Code)[:6]
Op = tuple[int, list[int]]


def noise(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def job(out: np.ndarray, *programs: list[Op]) -> Job:
    """A program for each image, of the same operations."""
    ops, rows, at = [], [[] for _ in programs], 0
    for number, (code, params) in enumerate(programs[0]):
        ops.append([code, at])
        for row, program in zip(rows, programs, strict=True):
            row += [1, *program[number][1]]
        at += 1 + len(params)
    params = np.array(rows, np.int64).reshape(len(programs), -1)
    return Job(np.array(ops, np.int32).reshape(-1, 2), params, out)


def one(image: Any, program: list[Op], size: tuple[int, int]) -> np.ndarray | int:
    """The image, made between guard bytes; or the status."""
    memory = np.full((3, *size, 3), 77, np.uint8)
    status = kernel.run([image], [job(memory[1:2], program)])[0]
    assert (memory[[0, 2]] == 77).all()
    return memory[1] if status == 0 else int(status)


def check(image: np.ndarray, program: list[Op]) -> None:
    expected = image
    for code, params in program:
        expected = OPERATIONS[code](expected, params)
    result = one(image, program, expected.shape[:2])
    assert np.array_equal(result, expected), (image.shape, program)


def test_resize_is_that_of_opencv_to_the_bit_at_all_sizes(simd: int) -> None:
    rng = np.random.default_rng(simd)
    for number in range(400):
        largest = 4 if number % 5 == 0 else 400 if number % 7 == 0 else 70
        source, result = rng.integers(1, largest, 2), rng.integers(1, largest, 2)
        if number % 6 == 0:
            source = result * 2
        image = noise(rng, *source)
        for interpolation in (NEAREST, LINEAR):
            expected = cv2.resize(
                image, tuple(map(int, result[::-1])), interpolation=interpolation
            )
            program: list[Op] = [(RESIZE, [*map(int, result), interpolation])]
            assert np.array_equal(one(image, program, expected.shape[:2]), expected), (
                source,
                result,
            )


def test_cubic_is_that_of_the_reference_and_within_a_level_of_opencv(simd: int) -> None:
    rng = np.random.default_rng(simd)
    for number in range(150):
        source, (height, width) = (
            rng.integers(1, 90, 2),
            map(int, rng.integers(1, 4 if number % 5 == 0 else 90, 2)),
        )
        image = noise(rng, *source)
        check(image, [(RESIZE, [height, width, CUBIC])])
        exact = cv2.resize(
            image, (width, height), interpolation=cv2.INTER_CUBIC
        ).astype(int)
        assert abs(reference.resize(image, [height, width, CUBIC]) - exact).max() <= 1


def test_area_is_that_of_opencv_or_refused(simd: int) -> None:
    rng = np.random.default_rng(simd)
    num_refused = 0
    for number in range(200):
        result = rng.integers(1, 40, 2)
        source = (
            result * rng.integers(1, 7, 2) if number % 2 else rng.integers(1, 60, 2)
        )
        height, width = map(int, result)
        image = noise(rng, *source)
        made = one(image, [(RESIZE, [height, width, AREA])], (height, width))
        if isinstance(made, int):
            num_refused += 1
            assert (
                made == kernel.BAD_PARAMS
                and number % 2 == 0
                and (source >= result).all()
            )
        else:
            assert np.array_equal(
                made, cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
            )
    assert num_refused < 60


@pytest.mark.parametrize("border", range(5))
def test_pad_is_that_of_opencv(border: int) -> None:
    rng = np.random.default_rng(border)
    for size in ((1, 1), (1, 5), (3, 1), (6, 7)):
        image, sides = noise(rng, *size), [int(side) for side in rng.integers(0, 20, 4)]
        expected = cv2.copyMakeBorder(image, *sides, border, value=(9, 8, 7))
        assert np.array_equal(reference.pad(image, [*sides, border, 9, 8, 7]), expected)
        assert np.array_equal(
            one(image, [(PAD, [*sides, border, 9, 8, 7])], expected.shape[:2]), expected
        )


MAX, MIN = (1 << 63) - 1, -(1 << 63)


HOSTILE = [
    MIN,
    -(1 << 32),
    -1,
    0,
    1,
    3,
    255,
    256,
    65_500,
    65_501,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) + 1,
    MAX,
]


@pytest.mark.parametrize("op", list(ops.Op), ids=lambda op: op.name)
def test_whatever_the_params_an_image_is_written_into_its_slot_alone(
    op: ops.Op, simd: int
) -> None:
    rng, num_refused = np.random.default_rng([op, simd]), 0
    for number in range(300):
        pixels = noise(rng, *rng.integers(1, 40, 2))
        image: Any = encode(pixels, quality=90) if number % 2 else pixels
        good = any_op(rng, op)
        hostile = [*good[1]]
        if number % 10:  # the others may be refused as well, or not fit
            for place in rng.integers(
                0, max(1, min(len(hostile), 12)), 3 * bool(hostile)
            ):
                hostile[place] = int(rng.choice(np.array(HOSTILE, object)))
        height, width = pixels.shape[:2]
        if op == RESIZE:
            height, width = good[1][:2]
        elif op == PAD:
            height, width = height + sum(good[1][:2]), width + sum(good[1][2:4])
        elif op == CROP:
            height, width = good[1][2:4]
        elif op == TURN and good[1][0] & 4:
            height, width = width, height
        # Two rows of guard bytes between slots, and a slot's worth around them.
        memory = np.full((5, height + 2, width, 3), 77, np.uint8)
        (code, _), neighbor = good, noise(rng, height, width)
        params = np.array([[1, *hostile], [0, *good[1]], [0, *good[1]]], np.int64)
        table = Job(np.array([[code, 0]], np.int32), params, memory[1:4, :height])
        statuses = kernel.run([image, neighbor, None], [table], threads=1 + number % 2)
        num_refused += statuses[0] != kernel.DONE
        assert statuses[1:].tolist() == [kernel.DONE, kernel.SKIPPED]
        assert np.array_equal(memory[2, :height], neighbor), "another image's slot"
        assert (memory[[0, 3, 4]] == 77).all() and (memory[:, height:] == 77).all()
    assert num_refused < 300


def encode(image: np.ndarray, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "JPEG", **options)
    return out.getvalue()


def test_jpegs_have_the_pixels_of_the_usual_decoder_by_crop_and_whole() -> None:
    rng = np.random.default_rng(0)
    for options in (
        {},
        {"progressive": True},
        {"optimize": True},
        {"subsampling": 0},
        {"restart_marker_rows": 1},
    ):
        data = encode(noise(rng, 61, 83), quality=90, **options)
        whole = decode(data)
        assert kernel.sizes([data, None, whole, b""])[0].tolist() == [
            [61, 83],
            [0, 0],
            [0, 0],
            [0, 0],
        ]
        assert np.array_equal(one(data, [], (61, 83)), whole)
        box = [7, 9, 20, 31]
        assert np.array_equal(
            one(data, [(CROP, box)], (20, 31)), reference.crop(whole, box)
        )
        program: list[Op] = [(CROP, box), (RESIZE, [24, 24, LINEAR]), (TURN, [1])]
        expected = cv2.resize(reference.crop(whole, box), (24, 24))[:, ::-1]
        assert np.array_equal(one(data, program, (24, 24)), expected)
    assert one(data, [(CROP, [0, 0, 62, 1])], (62, 1)) == kernel.BAD_PARAMS


def test_an_image_without_tables_does_not_use_those_of_the_one_before() -> None:
    rng = np.random.default_rng(0)
    good, other = (
        encode(noise(rng, 24, 24), quality=90),
        encode(noise(rng, 24, 24), quality=30),
    )
    without_quant = bytearray(other)
    at = without_quant.index(b"\xff\xdb")
    while (at := without_quant.find(b"\xff\xdb", at)) >= 0:
        without_quant[at + 1] = 0xEC  # application data
    for broken in (bytes(without_quant), other.replace(b"\xff\xc4", b"\xff\xec")):
        alone, behind = (
            np.zeros((1, 24, 24, 3), np.uint8),
            np.zeros((2, 24, 24, 3), np.uint8),
        )
        first = kernel.run([broken], [job(alone, [])])[0]
        second = kernel.run([good, broken], [job(behind, [], [])])
        assert first == second[1] and second[0] == 0
        if first == 0:
            assert np.array_equal(alone[0], behind[1]) and np.array_equal(
                alone[0], decode(broken)
            )


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
        {"ops": np.array([[CROP, -1]], np.int32)},
        {"ops": np.array([[CROP, 0]], np.int64)},
        {"params": np.zeros((3, 5), np.int64)},
        {"params": np.zeros((2, 5), np.int32)},
        {"out": np.zeros((2, 4, 8, 3), np.uint8)[:, :, ::2]},
        {"out": np.zeros((2, 4, 4, 4), np.uint8)},
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


def test_what_settings_turn_is_not_left_to_the_kernel() -> None:
    def sizes(images: list[bytes | None], apply_exif: bool = False) -> list[list[int]]:
        found: list[list[int]] = sizes_by_header(images, apply_exif).tolist()
        return found

    image = noise(np.random.default_rng(0), 64, 80)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encode(image), encode(image, exif=exif)
    assert sizes([plain, turned, None]) == [[64, 80], [64, 80], [0, 0]]
    assert sizes([plain, turned], apply_exif=True) == [[64, 80], [0, 0]]


def test_headers_above_the_limits_are_refused() -> None:
    data = bytearray(encode(noise(np.random.default_rng(0), 16, 16)))
    at = data.index(b"\xff\xc0") + 5
    for height, width in ((65_501, 1), (0, 5), (5, 0), (30_000, 30_000)):
        data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
        assert kernel.sizes([bytes(data)])[0].tolist() == [[0, 0]]
        assert one(bytes(data), [], (16, 16)) == kernel.UNREADABLE
    for end in range(len(data)):
        assert kernel.sizes([bytes(data[:end])])[0].tolist() == [[0, 0]]


def test_it_accepts_only_the_damaged_bytes_that_decode_does() -> None:
    accepted, refused, wrong = fuzz_run(0, 3000)
    assert not wrong and accepted > 100 and refused > 1000


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
        assert np.array_equal(one(data, [(CROP, [210, 3, 40, 40])], (40, 40)), expected)
