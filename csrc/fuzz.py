"""Mutated JPEGs and random programs through the extension: what it accepts has the pixels of the usual way.

A third of the inputs go to decode_crop, and are held against simplejpeg; a third to run(), with a program, which
`raypipe.transform.decode` and `reference` have to agree with, in a slot between guard bytes, as RGB and as the
planes of `raypipe.transform.wire`; and a third to to_seekable, whose result has to have the pixels of its input,
and is then itself changed: with its checksum it must be refused, and with one that fits it must only do no harm,
since a file can say anything of itself. Levels of vector instructions take turns.

    python csrc/fuzz.py [FIRST [COUNT]]        COUNT inputs from number FIRST on; 0 and 4,000
    csrc/sanitize.sh [FIRST [COUNT]]           the same, by a build under sanitizers

Input number n is a pure function of n, and so is the box of it that is decoded. The last line says how many were
accepted and refused; exit code 1 where one of them had other pixels.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from raypipe.errors import SampleError
from raypipe.transform import reference, wire
from raypipe.transform.decode import decode
from raypipe.transform.ops import MAX_FILTER, MAX_RADIUS, Op

HEIGHT, WIDTH = 40, 52
_MOST_PIXELS = 1_000_000  # a header may be made to declare 65,500 x 65,500
_EXTRA_COLUMNS = 39  # see raypipe.transform.jpeg
_TAG = b"raypipe seekable"
OPTIONS: list[dict[str, Any]] = [
    {"quality": 75},
    {"quality": 95},
    {"quality": 100},
    {"quality": 90, "optimize": True},  # tables of the image's own, with codes of all lengths
    {"quality": 90, "restart_marker_blocks": 1},
    {"quality": 60, "restart_marker_rows": 1},
    {"quality": 80, "progressive": True},
]


def originals() -> list[bytes]:
    """Undamaged images: noise, which uses all coefficients, and smooth ones, in all options and samplings."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))
    smooth = noise.resize((7, 6)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    images = []
    for image, options, sampling in itertools.product((noise, smooth), OPTIONS, ("4:4:4", "4:2:2", "4:2:0", None)):
        out = io.BytesIO()
        image.convert("RGB" if sampling else "L").save(
            out, "JPEG", **options, **({"subsampling": sampling} if sampling else {})
        )
        images.append(out.getvalue())
    return images


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, lost, put in, or all from one on lost: tables, headers and codes alike."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(2, len(changed) - 1))
        match int(rng.integers(5)):
            case 0:
                changed[at] ^= 1 << int(rng.integers(8))
            case 1:
                changed[at] = 0xFF
            case 2:
                changed[at:at] = rng.bytes(3)
            case 3:
                del changed[at : at + 2]
            case _ if rng.random() < 0.3:
                del changed[max(at, 20) :]
    return bytes(changed)


def agrees(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether a box, and the whole, have the pixels of simplejpeg; None: the extension refuses the image."""
    from _raypipe_kernel import decode_crop

    try:
        whole = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        whole = None
    height, width = (HEIGHT, WIDTH) if whole is None else whole.shape[:2]
    if height * width > _MOST_PIXELS:
        return None
    top, left = int(rng.integers(height)), int(rng.integers(width))
    part = (top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1)))
    for is_checked, (y, x, rows, columns) in ((False, part), (True, part), (True, (0, 0, height, width))):
        pixels = np.empty((rows, columns + _EXTRA_COLUMNS, 3), np.uint8)
        try:
            first = decode_crop(data, x, y, columns, rows, 8, is_checked, pixels, columns + _EXTRA_COLUMNS)
        except ValueError:
            if is_checked:
                return None
            continue
        if not is_checked:  # there may be damage behind the box, of which simplejpeg makes an error
            continue
        pixels = pixels[:, first : first + columns]
        if whole is None or not np.array_equal(pixels, whole[y : y + rows, x : x + columns]):
            return False
    return True


def random_op(rng: np.random.Generator, op: Op | None = None) -> tuple[int, list[int]]:
    """An operation with params that are mostly good: this one, or any."""

    def some(low: int, high: int, num: int) -> list[int]:
        return [int(number) for number in rng.integers(low, high, num)]

    code = op or Op(int(rng.integers(1, len(Op) + 1)))
    match code:
        case Op.CROP:
            return code, [*some(0, 30, 2), *some(1, 12, 2)]
        case Op.CROP_SCALED:
            return code, [*some(0, 9, 2), *some(1, 12, 2), int(rng.choice([1, 2, 3, 4, 8]))]
        case Op.RESIZE:
            return code, [*some(1, 50, 2), *some(0, 4, 1)]
        case Op.PAD:
            return code, [*some(0, 20, 4), *some(0, 5, 1), *some(0, 256, 3)]
        case Op.TURN:
            return code, some(0, 8, 1)
        case Op.AFFINE:
            return code, [*some(-(1 << 36), 1 << 36, 6), *some(0, 2, 1), *some(0, 5, 1), *some(0, 256, 3)]
        case Op.DROPOUT:
            return code, [*some(0, 256, 3), *some(0, 3, 1), *some(-5, 50, 8)]
        case Op.JITTER:
            order = [int(number) if rng.random() < 0.8 else -1 for number in rng.permutation(4)]
            return code, [*order, *some(0, 131072, 3), *some(0, 6 * 65536, 1)]
        case Op.GRAY:
            return code, []
        case Op.TABLE:
            return code, [*some(0, 2, 1), *some(0, 256, 3)]
        case Op.BLUR:
            radius = int(rng.integers(0, 7))
            sides = some(0, 1200, radius)
            return code, [radius, *some(0, 5, 1), 16384 - 2 * sum(sides), *sides, *[0] * (MAX_RADIUS - radius)]
        case Op.FILTER:
            side = int(rng.choice([3, 5, 7]))
            rest = [0] * (MAX_FILTER**2 - side**2)
            return code, [side, *some(0, 5, 1), *some(-16384 // side, 16384 // side, side**2), *rest]


def runs_like_reference(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether run() gives the reference's pixels and planes, in its slots alone; None: it refuses the image."""
    from _raypipe_kernel import run

    program = [random_op(rng) for _ in range(int(rng.integers(0, 4)))]
    for _, params in program:
        if params and rng.random() < 0.05:
            params[int(rng.integers(len(params)))] = int(rng.choice([-1, 1 << 16, (1 << 63) - 1, -(1 << 63)]))
    ops, row = list[list[int]](), list[int]()
    for code, params in program:
        ops.append([code, len(row)])
        row += [1, *params]
    table = np.array(ops, np.int32).reshape(-1, 2), np.array([row, row], np.int64)
    expected = None
    with contextlib.suppress(SampleError, ValueError):
        pixels = decode(data)
        if pixels.shape[0] * pixels.shape[1] <= _MOST_PIXELS:
            expected = reference.apply_all(pixels, table[0], table[1][0])
    size = (HEIGHT, WIDTH) if expected is None else expected.shape[:2]
    threads, is_scaled = int(rng.integers(1, 3)), bool(program) and program[0][0] == Op.CROP_SCALED
    refused = set()
    for is_planes in (False, True):
        shapes = [(*size, 1), wire.chroma_shape((*size, 3))] if is_planes else [(*size, 3)]
        memories = [np.full((5, *shape), 77, np.uint8) for shape in shapes]
        slots = [memory[1:4:2] for memory in memories]
        status = run([data, data], [(*table, slots[0], slots[1] if is_planes else None)], threads, True)[0]
        if not all((memory[::2] == 77).all() for memory in memories):
            return False
        refused.add(bool(status))
        if status or is_scaled:
            continue
        if expected is None:
            return False
        results = wire.planes(expected) if is_planes else (expected,)
        if not all((slot == result).all() for slot, result in zip(slots, results, strict=True)):
            return False
    if len(refused) > 1:  # an image that is refused for one wire is refused for the other
        return False
    return None if refused == {True} or is_scaled else True


def at_all_levels(first: int, count: int) -> Iterator[int]:
    """The numbers; for each, the kernel uses no more vector instructions than number modulo 3 says."""
    from _raypipe_kernel import set_simd

    try:
        for number in range(first, first + count):
            set_simd(number % 3)
            yield number
    finally:
        set_simd(2)


def fuzz_run(first: int, count: int) -> tuple[int, int, list[int]]:
    """As `fuzz`, of run(); every third input is not damaged."""
    images = originals()
    results = []
    for number in at_all_levels(first, count):
        rng = np.random.default_rng([number, 1])
        data = images[number % len(images)]
        results.append(runs_like_reference(mutated(data, rng) if rng.random() < 0.7 else data, rng))
    wrong = [first + at for at, result in enumerate(results) if result is False]
    return results.count(True), results.count(None), wrong


def sealed(data: bytes) -> bytes:
    """A changed seekable JPEG with the checksum that fits, where there is a place for one."""
    at = data.find(_TAG) + len(_TAG)
    if at < len(_TAG):
        return data
    return data[:at] + zlib.crc32(data[:at] + data[at + 4 :]).to_bytes(4, "big") + data[at + 4 :]


def seeks_alike(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether a file made seekable has the same pixels, and is refused when damaged; None: it is not made so."""
    from _raypipe_kernel import decode_crop, to_seekable

    try:
        seekable = to_seekable(data)
        whole = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    height, width, _ = whole.shape
    if height * width > _MOST_PIXELS:
        return None

    def crop(file: bytes, left: int, top: int, columns: int, rows: int) -> np.ndarray:
        pixels = np.empty((rows, columns + _EXTRA_COLUMNS, 3), np.uint8)
        first = decode_crop(file, left, top, columns, rows, 8, True, pixels, columns + _EXTRA_COLUMNS)
        return pixels[:, first : first + columns]

    top, left = int(rng.integers(height)), int(rng.integers(width))
    rows, columns = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
    if not np.array_equal(
        crop(seekable, left, top, columns, rows), whole[top : top + rows, left : left + columns]
    ):
        return False
    damaged = mutated(seekable, rng)
    with contextlib.suppress(ValueError):
        crop(sealed(damaged), left, top, columns, rows)
    with contextlib.suppress(ValueError):
        crop(damaged, left, top, columns, rows)
        return damaged == seekable
    return np.array_equal(simplejpeg.decode_jpeg(seekable, "RGB"), whole)


def fuzz_seekable(first: int, count: int) -> tuple[int, int, list[int]]:
    """As `fuzz`, of to_seekable; every second input is not damaged."""
    images = originals()
    results = []
    for number in range(first, first + count):
        rng = np.random.default_rng([number, 2])
        data = images[number % len(images)]
        results.append(seeks_alike(mutated(data, rng) if rng.random() < 0.5 else data, rng))
    wrong = [first + at for at, result in enumerate(results) if result is False]
    return results.count(True), results.count(None), wrong


def fuzz(first: int, count: int) -> tuple[int, int, list[int]]:
    """How many inputs were accepted and refused, and which were accepted with other pixels."""
    images = originals()
    found = []
    for number in at_all_levels(first, count):
        rng = np.random.default_rng(number)
        found.append(agrees(mutated(images[number % len(images)], rng), rng))
    wrong = [first + at for at, result in enumerate(found) if result is False]
    return found.count(True), found.count(None), wrong


if __name__ == "__main__":
    begin, num = [*map(int, sys.argv[1:]), *(0, 4000)[len(sys.argv) - 1 :]]
    failed = False
    for name, function in (("decode_crop", fuzz), ("run", fuzz_run), ("to_seekable", fuzz_seekable)):
        accepted, refused, differ = function(begin, num // 3)
        failed |= bool(differ)
        print(
            f"{name}: {num // 3} inputs from {begin} on: {accepted} accepted, {refused} refused, "
            f"{len(differ)} wrong {differ[:9]}"
        )
    sys.exit(failed)
