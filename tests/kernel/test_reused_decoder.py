"""A decoder is used for every image of a process: nothing grows with their number (csrc/jpeg_crop.h).

It counts the bytes that the process holds after some thousand images of each kind.
"""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import psutil
import pytest
from fuzz_drawn import arithmetic, lossless, wild
from fuzz_files import saved, segments, without_tables
from PIL import Image

from raypipe import kernel
from raypipe.kernel import DONE, Job, Op

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)

BATCH = 64
SIDE = 16
RNG = np.random.default_rng(0)
PIXELS = Image.fromarray(RNG.integers(0, 256, (40, 52, 3), np.uint8))
COLOR, GRAY = saved(PIXELS), saved(PIXELS.convert("L"))
PROGRESSIVE = saved(PIXELS, progressive=True)


def seekable(data: bytes) -> bytes:
    return kernel.to_seekable(data) if kernel.available() else data


def without_scans(data: bytes) -> bytes:
    head, _ = segments(data)
    return b"\xff\xd8" + b"".join(head) + b"\xff\xd9"


KINDS: dict[str, list[bytes]] = {
    "all beside each other": [
        GRAY,
        COLOR,
        PROGRESSIVE,
        saved(PIXELS, optimize=True),
        saved(PIXELS, restart_marker_blocks=1),
        without_tables(COLOR),
        seekable(COLOR),
    ],
    "own tables": [
        saved(PIXELS, optimize=True),
        saved(PIXELS, optimize=True, quality=30),
    ],
    "arithmetic": [arithmetic(RNG, 3, False), arithmetic(RNG, 1, True)],
    "seekable": [seekable(COLOR), seekable(PROGRESSIVE)],
    "broken": [
        COLOR[:-200],
        COLOR[:300] + b"\xff\x13" + COLOR[302:],
        PROGRESSIVE[:-200],
        without_scans(COLOR),
    ],
    "refused": [
        saved(PIXELS.convert("CMYK")),
        lossless(RNG),
        wild(RNG, 5000),
        b"\xff\xd8\xff",
        b"no JPEG",
    ],
}


class Worker:
    """Work of an actor, over and over: a crop and a resize of each file, a box of one, and a seekable one."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = (files * BATCH)[:BATCH]
        row = np.array([1, 2, 3, 30, 40, 1, SIDE, SIDE, 1], np.int64)
        self.job = Job(
            np.array([[Op.CROP, 0], [Op.RESIZE, 5]], np.int32),
            np.tile(row, (BATCH, 1)),
            np.zeros((BATCH, SIDE, SIDE, 3), np.uint8),
        )
        self.pixels = np.empty((20, 30 + 39, 3), np.uint8)
        self.is_done = False

    def work(self) -> None:
        for number in range(20):
            self.is_done = bool(
                (kernel.run(self.files, [self.job], 1, True) == DONE).all()
            )
            file = self.files[number % BATCH]
            with contextlib.suppress(ValueError):
                kernel.decode_crop(file, 2, 3, 30, 20, False, self.pixels, 30 + 39)
            with contextlib.suppress(ValueError):
                kernel.to_seekable(file)


def bytes_in_use() -> int:
    """The bytes that malloc has handed out; where it does not say, those that are resident."""
    names = [
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    ]
    info = type(
        "Mallinfo",
        (ctypes.Structure,),
        {"_fields_": [(name, ctypes.c_size_t) for name in names]},
    )
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return int(psutil.Process().memory_info().rss)
    function.restype = info
    found = function()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_image_leaves_memory_behind(kind: str) -> None:
    worker = Worker(KINDS[kind])
    worker.work()
    before = bytes_in_use()
    worker.work()
    first = bytes_in_use() - before
    worker.work()
    second = bytes_in_use() - before
    # Libjpeg's lasting memory has up to 16 KiB, and other parts of the process may take some once.
    assert min(second, second - first) < 48 << 10, (first, second)
    assert worker.is_done == (kind not in ("arithmetic", "broken", "refused"))
