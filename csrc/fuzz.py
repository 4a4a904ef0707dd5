"""Mutated JPEGs and random programs through the extension: what it accepts has the pixels of the usual way.

Half of the inputs go to decode_crop, and are held against simplejpeg; half to run(), with a program, which
`raypipe.transform.decode` and `reference` have to agree with. A slot lies between guard bytes.

    python csrc/fuzz.py [FIRST [COUNT]]        COUNT inputs from number FIRST on; 0 and 4,000
    csrc/sanitize.sh [FIRST [COUNT]]           the same, by a build under sanitizers

Input number n is a pure function of n, and so is the box of it that is decoded. The last line says how many were
accepted and refused; exit code 1 where one of them had other pixels.
"""

from __future__ import annotations

import io
import itertools
import sys
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from raypipe.errors import SampleError
from raypipe.transform import reference
from raypipe.transform.decode import decode

HEIGHT, WIDTH = 40, 52
_MOST_PIXELS = 1_000_000  # a header may be made to declare 65,500 x 65,500
_EXTRA_COLUMNS = 39  # see raypipe.transform.jpeg
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


def random_program(rng: np.random.Generator) -> list[tuple[int, list[int]]]:
    """Operations with params of all sizes, most of which are good."""
    small = lambda low, high, num: [int(n) for n in rng.integers(low, high, num)]  # noqa: E731
    program = []
    for _ in range(int(rng.integers(0, 4))):
        code = int(rng.integers(1, 8))
        params = {
            reference.CROP: lambda: [*small(0, 30, 2), *small(1, 12, 2)],
            reference.CROP_SCALED: lambda: [*small(0, 9, 2), *small(1, 12, 2), int(rng.choice([1, 2, 3, 4, 8]))],
            reference.RESIZE: lambda: [*small(1, 50, 2), *small(0, 4, 1)],
            reference.PAD: lambda: [*small(0, 20, 4), *small(0, 5, 1), *small(0, 256, 3)],
            reference.TURN: lambda: small(0, 8, 1),
            reference.AFFINE: lambda: [*small(-(1 << 36), 1 << 36, 6), *small(0, 2, 1), *small(0, 5, 1), 1, 2, 3],
            reference.DROPOUT: lambda: [*small(0, 256, 3), *small(0, 3, 1), *small(-5, 50, 8)],
        }[code]()
        if rng.random() < 0.05:
            params[int(rng.integers(len(params)))] = int(rng.choice([-1, 1 << 16, (1 << 63) - 1, -(1 << 63)]))
        program.append((code, params))
    return program


def runs_like_reference(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether run() gives the reference's pixels, and writes in its slot alone; None: it refuses the image."""
    from _raypipe_kernel import run

    program = random_program(rng)
    try:
        expected = decode(data)
        is_small = expected.shape[0] * expected.shape[1] <= _MOST_PIXELS
        for code, params in program if is_small else ():
            expected = reference.GEOMETRY[code](expected, params)
    except (SampleError, ValueError, KeyError):  # KeyError: the decoder's operation
        expected = None
    size = (HEIGHT, WIDTH) if expected is None else expected.shape[:2]
    memory = np.full((5, *size, 3), 77, np.uint8)
    ops, row = [], []
    for code, params in program:
        ops.append([code, len(row)])
        row += [1, *params]
    job = (np.array(ops, np.int32).reshape(-1, 2), np.array([row, row], np.int64), memory[1:4:2])
    status = run([data, data], [job], int(rng.integers(1, 3)), True)[0]
    if not (memory[::2] == 77).all():
        return False
    is_scaled = bool(program) and program[0][0] == reference.CROP_SCALED
    if status or is_scaled:
        return None
    return expected is not None and np.array_equal(memory[1], expected) and np.array_equal(memory[3], expected)


def fuzz_run(first: int, count: int) -> tuple[int, int, list[int]]:
    """As `fuzz`, of run(); every third input is not damaged."""
    images = originals()
    results = []
    for number in range(first, first + count):
        rng = np.random.default_rng([number, 1])
        data = images[number % len(images)]
        results.append(runs_like_reference(mutated(data, rng) if rng.random() < 0.7 else data, rng))
    wrong = [first + at for at, result in enumerate(results) if result is False]
    return results.count(True), results.count(None), wrong


def fuzz(first: int, count: int) -> tuple[int, int, list[int]]:
    """How many inputs were accepted and refused, and which were accepted with other pixels."""
    images = originals()
    found = []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        found.append(agrees(mutated(images[number % len(images)], rng), rng))
    wrong = [first + at for at, result in enumerate(found) if result is False]
    return found.count(True), found.count(None), wrong


if __name__ == "__main__":
    begin, num = [*map(int, sys.argv[1:]), *(0, 4000)[len(sys.argv) - 1 :]]
    failed = False
    for name, function in (("decode_crop", fuzz), ("run", fuzz_run)):
        accepted, refused, differ = function(begin, num // 2)
        failed |= bool(differ)
        print(
            f"{name}: {num // 2} inputs from {begin} on: {accepted} accepted, {refused} refused, "
            f"{len(differ)} wrong {differ[:9]}"
        )
    sys.exit(failed)
