"""Mutated JPEGs and random programs through the kernel: what it accepts, the usual way has too.

    decode_crop     a box of a file, held against simplejpeg
    run             programs, on which `raypipe.transform.decode.rgb` and `reference` have to agree with it, in a
                    slot between guard bytes
    to_seekable     its result has the pixels of its input. Then that is changed itself: with its checksum it must
                    be refused. With one that fits, and with places that lead anywhere, a box is refused or that of
                    simplejpeg, where it reads the file

Files are of all kinds of frames (fuzz_files.py), and all go through one process, so that nothing of a file may
reach the next. Levels of vector instructions take turns.

    python fuzz/fuzz_kernel.py [FIRST [COUNT]]        COUNT inputs from number FIRST on; 0 and 4,000
      .ci/sanitize [FIRST [COUNT]]                             the same, by a build under sanitizers

Input number n is a pure function of n, and so is the box of it that is decoded. Each last line says how many were
accepted and refused; exit code 1 where one of them had other pixels.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterator

import numpy as np
import simplejpeg
from fuzz_files import HEIGHT, WIDTH, forged, mutated, originals, sealed

from raypipe.errors import SampleError
from raypipe.kernel import Op, is_seekable, reference
from raypipe.kernel.ops import MAX_FILTER, MAX_RADIUS
from raypipe.transform.decode.jpeg_header import without_profile
from raypipe.transform.decode.rgb import decode

__all__ = [
    "fuzz",
    "fuzz_run",
    "fuzz_seekable",
    "originals",
    "random_op",
    "sealed",
]

_MOST_PIXELS = 1_000_000  # a header may be made to declare 65,500 x 65,500
_EXTRA_COLUMNS = 39  # see raypipe.transform.decode.jpeg


def is_small(data: bytes) -> bool:
    """Whether the header, if it can be read, declares no more pixels than an input may have."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return True
    except KeyError:  # simplejpeg lacks a name for a rare subsampling, such as 4:4:1, and tells no size
        return False
    return bool(height * width <= _MOST_PIXELS)


def by_simplejpeg(data: bytes) -> np.ndarray:
    """The pixels of the usual way, for which a damaged profile is no damage; ValueError: it refuses the file."""
    return simplejpeg.decode_jpeg(without_profile(data), "RGB")


def crop(
    data: bytes, box: tuple[int, int, int, int], to_end: bool = True
) -> np.ndarray:
    """A box (top, left, height, width) by the extension; ValueError: it refuses the file."""
    from _raypipe_kernel import decode_crop

    top, left, height, width = box
    pixels = np.empty((height, width + _EXTRA_COLUMNS, 3), np.uint8)
    first = decode_crop(
        data, left, top, width, height, to_end, pixels, width + _EXTRA_COLUMNS
    )
    return pixels[:, first : first + width]


def random_box(
    height: int, width: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """(top, left, height, width), inside."""
    top, left = int(rng.integers(height)), int(rng.integers(width))
    return (
        top,
        left,
        int(rng.integers(1, height - top + 1)),
        int(rng.integers(1, width - left + 1)),
    )


def agrees(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether a box, and the whole, have the pixels of simplejpeg; None: the extension refuses the image."""
    if not is_small(data):
        return None
    try:
        whole = by_simplejpeg(data)
    except ValueError:
        whole = None
    height, width = (HEIGHT, WIDTH) if whole is None else whole.shape[:2]
    box = top, left, rows, columns = random_box(height, width, rng)
    with contextlib.suppress(ValueError):
        # there may be damage behind the box, of which simplejpeg makes an error
        crop(data, box, to_end=False)
    try:
        parts = crop(data, box), crop(data, (0, 0, height, width))
    except ValueError:
        return None
    if whole is None:
        return False
    return np.array_equal(
        parts[0], whole[top : top + rows, left : left + columns]
    ) and np.array_equal(parts[1], whole)


def random_op(rng: np.random.Generator, op: Op | None = None) -> tuple[int, list[int]]:
    """An operation with params that are mostly good: this one, or any."""

    def some(low: int, high: int, num: int) -> list[int]:
        return [int(number) for number in rng.integers(low, high, num)]

    code = op or Op(int(rng.integers(1, len(Op) + 1)))
    match code:
        case Op.CROP:
            return code, [*some(0, 30, 2), *some(1, 12, 2)]
        case Op.RESIZE:
            return code, [*some(1, 50, 2), *some(0, 3, 1)]
        case Op.PAD:
            return code, [*some(0, 20, 4), *some(0, 5, 1), *some(0, 256, 3)]
        case Op.TURN:
            return code, some(0, 8, 1)
        case Op.AFFINE:
            return code, [
                *some(-(1 << 36), 1 << 36, 6),
                *some(0, 2, 1),
                *some(0, 5, 1),
                *some(0, 256, 3),
            ]
        case Op.DROPOUT:
            return code, [*some(0, 256, 3), *some(0, 3, 1), *some(-5, 50, 8)]
        case Op.JITTER:
            order = [
                int(number) if rng.random() < 0.8 else -1
                for number in rng.permutation(4)
            ]
            return code, [*order, *some(0, 131072, 3), *some(0, 6 * 65536, 1)]
        case Op.GRAY:
            return code, []
        case Op.TABLE:
            return code, [*some(0, 2, 1), *some(0, 256, 3)]
        case Op.BLUR:
            radius = int(rng.integers(0, 7))
            sides = some(0, 1200, radius)
            return code, [
                radius,
                *some(0, 5, 1),
                16384 - 2 * sum(sides),
                *sides,
                *[0] * (MAX_RADIUS - radius),
            ]
        case Op.FILTER:
            side = int(rng.choice([3, 5, 7]))
            rest = [0] * (MAX_FILTER**2 - side**2)
            return code, [
                side,
                *some(0, 5, 1),
                *some(-16384 // side, 16384 // side, side**2),
                *rest,
            ]


def runs_like_reference(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether run() gives the reference's pixels, in its slots alone; None: it refuses the image."""
    from _raypipe_kernel import run, sizes

    if not is_small(data):
        return None
    sizes([data])
    program = [random_op(rng) for _ in range(int(rng.integers(0, 4)))]
    is_hostile = False
    for _, params in program:
        if params and rng.random() < 0.05:
            params[int(rng.integers(len(params)))] = int(
                rng.choice([-1, 1 << 16, (1 << 63) - 1, -(1 << 63)])
            )
            is_hostile = True
    ops, row = list[list[int]](), list[int]()
    for code, params in program:
        ops.append([code, len(row)])
        row += [1, *params]
    table = np.array(ops, np.int32).reshape(-1, 2), np.array([row, row], np.int64)
    expected = None
    if not is_hostile:
        with contextlib.suppress(SampleError, ValueError):
            expected = reference.apply_all(decode(data), table[0], table[1][0])
    size = (HEIGHT, WIDTH) if expected is None else expected.shape[:2]
    num_jobs = 1 if rng.random() < 0.8 else 2
    threads = int(rng.integers(1, 3))
    memory = np.full((5, *size, 3), 77, np.uint8)
    slots = memory[1:4:2]
    status = run([data, data], [(*table, slots)] * num_jobs, threads, True)[0]
    if not (memory[::2] == 77).all():
        return False
    if status:
        return None
    if is_hostile:  # of params that steps do not draw the reference knows nothing
        return True
    return expected is not None and bool((slots == expected).all())


def part_agrees(data: bytes, box: tuple[int, int, int, int]) -> bool:
    """Whether a box is refused, or that of simplejpeg if it reads the file; what else is tried does no harm."""
    from _raypipe_kernel import to_seekable

    if not is_small(data):
        return True
    top, left, height, width = box
    with contextlib.suppress(ValueError):
        to_seekable(data)
    with contextlib.suppress(ValueError):
        part = crop(data, box)
        whole = by_simplejpeg(data)
        return np.array_equal(part, whole[top : top + height, left : left + width])
    return True


def seeks_alike(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether a file made seekable has the same pixels, and is refused when damaged; None: it is not made so."""
    from _raypipe_kernel import to_seekable

    if not is_small(data):
        return None
    try:
        seekable = to_seekable(data)
        whole = by_simplejpeg(data)
    except ValueError:
        return None
    height, width, _ = whole.shape
    top, left, rows, columns = box = random_box(height, width, rng)
    if not np.array_equal(
        crop(seekable, box), whole[top : top + rows, left : left + columns]
    ):
        return False
    if not all(
        part_agrees(file, box)
        for file in (forged(seekable, rng), sealed(mutated(seekable, rng)))
    ):
        return False
    damaged = mutated(seekable, rng)
    with contextlib.suppress(ValueError):
        crop(damaged, box)
        if damaged != seekable and is_seekable(damaged):
            # without its segment it is a plain JPEG
            return False
    return np.array_equal(by_simplejpeg(seekable), whole)


def at_all_levels(first: int, count: int) -> Iterator[int]:
    """The numbers; for each, the kernel uses no more vector instructions than number modulo 3 says."""
    from _raypipe_kernel import set_simd

    try:
        for number in range(first, first + count):
            set_simd(number % 3)
            yield number
    finally:
        set_simd(2)


Outcome = tuple[int, int, list[int]]
"""How many inputs were accepted and refused, and which were accepted with other pixels."""


Check = Callable[[bytes, np.random.Generator], bool | None]


def fuzz_files(
    check: Check, first: int, count: int, seed: int, share: float
) -> Outcome:
    """Checks files, of which such a share is changed."""
    images = originals()
    found = []
    for number in at_all_levels(first, count):
        rng = np.random.default_rng([number, seed])
        data = images[number % len(images)]
        found.append(check(mutated(data, rng) if rng.random() < share else data, rng))
    return (
        found.count(True),
        found.count(None),
        [first + at for at, result in enumerate(found) if result is False],
    )


def fuzz(first: int, count: int) -> Outcome:
    """Boxes of changed files."""
    return fuzz_files(agrees, first, count, 0, 0.95)


def fuzz_run(first: int, count: int) -> Outcome:
    """Programs; every third file is not changed."""
    return fuzz_files(runs_like_reference, first, count, 1, 0.7)


def fuzz_seekable(first: int, count: int) -> Outcome:
    """Files made seekable, and then changed; every second one is not changed before."""
    return fuzz_files(seeks_alike, first, count, 2, 0.5)


def resident_mib() -> int:
    """The most memory that the process had at any time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)


DRIVERS = {
    "decode_crop": fuzz,
    "run": fuzz_run,
    "to_seekable": fuzz_seekable,
}

if __name__ == "__main__":
    begin, num = [*map(int, sys.argv[1:]), *(0, 4000)[len(sys.argv) - 1 :]]
    failed = False
    for name in os.environ.get("RAYPIPE_FUZZ", ",".join(DRIVERS)).split(","):
        accepted, refused, differ = DRIVERS[name](begin, num // len(DRIVERS))
        failed |= bool(differ)
        print(
            f"{name}: {num // len(DRIVERS)} inputs from {begin} on: {accepted} accepted, {refused} refused, "
            f"{len(differ)} wrong {differ[:9]}; at most {resident_mib()} MiB",
            flush=True,
        )
    sys.exit(failed)
