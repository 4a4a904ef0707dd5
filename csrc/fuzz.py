"""Mutated JPEGs through the extension: of what it accepts, the pixels are those of simplejpeg.

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
    from _raypipe_jpeg import decode_crop

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
    accepted, refused, differ = fuzz(begin, num)
    print(
        f"{num} inputs from {begin} on: {accepted} accepted, {refused} refused, {len(differ)} wrong {differ[:9]}"
    )
    sys.exit(bool(differ))
