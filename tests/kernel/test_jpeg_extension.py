"""The compiled decoder: its usual way by AVX2, that of all other JPEGs, and its fuzzer.

    csrc/jpeg_baseline.h, jpeg_samples.h    without libjpeg
    csrc/jpeg_crop.h, jpeg_huffman.h        by libjpeg, but for its Huffman codes
    .ci/sanitize, fuzz/fuzz_kernel.py    damaged files, by all levels of vector instructions

What needs it is skipped where it is not built, and says so.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from fuzz_kernel import fuzz
from image_files import saved

from raypipe.kernel import why_no_kernel
from raypipe.kernel.extension import INTERFACE_VERSION
from raypipe.transform.decode import jpeg
from raypipe.transform.decode.jpeg import decode_box, missing_extension

SANITIZE = Path(__file__).parents[2] / ".ci" / "sanitize"

needs_extension = pytest.mark.skipif(
    bool(why_no_kernel()), reason=f"no kernel: {why_no_kernel()}"
)
RNG = np.random.default_rng(0)


def noise(height: int, width: int) -> np.ndarray:
    """Pixels that use every coefficient."""
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    """Pixels that leave most coefficients 0, so that runs and ends of blocks are common."""
    return cv2.resize(noise(height // 9 + 2, width // 9 + 2), (width, height))


def assert_pixels_of_simplejpeg(data: bytes) -> None:
    """The whole image, and a part that leaves out columns and rows on all sides."""
    whole = simplejpeg.decode_jpeg(data, "RGB")
    height, width = whole.shape[:2]
    assert np.array_equal(decode_box(data, (0, 0, height, width)), whole)
    top, left, rows, columns = height // 3, width // 4, height // 2, width // 2
    part = decode_box(data, (top, left, rows, columns))
    assert np.array_equal(part, whole[top : top + rows, left : left + columns])


SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
OPTIONS: list[dict[str, Any]] = [
    *[{"quality": quality} for quality in (1, 30, 75, 95, 100)],
    {
        "quality": 90,
        "optimize": True,
    },  # tables of the image's own, with codes of all lengths
    {"quality": 90, "restart_marker_blocks": 1},
    {"quality": 60, "restart_marker_rows": 1},
]


BY_LIBJPEG_AND_AVX2 = pytest.mark.parametrize("simd", [0, 2], indirect=True)
"""The kernel's own decoder is by AVX2."""


@pytest.fixture
def by_kernel_alone(monkeypatch: pytest.MonkeyPatch, simd: int) -> None:
    monkeypatch.setattr(
        jpeg, "decode_jpeg_at", lambda *a: pytest.fail("decoded by simplejpeg")
    )


@needs_extension
@BY_LIBJPEG_AND_AVX2
@pytest.mark.usefixtures("by_kernel_alone")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_kinds_of_codes_give_the_pixels_of_simplejpeg(
    options: dict[str, Any],
) -> None:
    for make, (height, width) in itertools.product(
        (noise, smooth), [(8, 8), (61, 77), (130, 95)]
    ):
        image = make(height, width)
        assert_pixels_of_simplejpeg(saved(image, "JPEG", "L", **options))
        for subsampling in SUBSAMPLINGS:
            data = saved(image, subsampling=subsampling, **options)
            assert_pixels_of_simplejpeg(data)


@needs_extension
@BY_LIBJPEG_AND_AVX2
@pytest.mark.usefixtures("by_kernel_alone")
@pytest.mark.parametrize("step", [2, 5, 8, 16, 40, 100, 255])
@pytest.mark.parametrize("contrast", [8, 64, 255])
def test_samples_out_of_range_are_those_of_simplejpeg(contrast: int, step: int) -> None:
    """Coefficients are multiplied by more than the encoder divided them by, up to where 16 bits overflow."""
    image = (128 + (noise(64, 80) / 255 - 0.5) * contrast).astype(np.uint8)
    for subsampling in SUBSAMPLINGS:
        data = bytearray(saved(image, quality=100, subsampling=subsampling))
        for table in (0, 1):
            at = data.index(b"\xff\xdb\x00\x43" + bytes([table])) + 5
            data[at : at + 64] = bytes([step]) * 64
        assert_pixels_of_simplejpeg(bytes(data))


@needs_extension
def test_it_accepts_only_the_damaged_bytes_that_simplejpeg_does() -> None:
    accepted, refused, wrong = fuzz(0, 2000)
    assert not wrong and accepted > 50 and refused > 500


@pytest.mark.soak
@pytest.mark.skipif(
    shutil.which("gcc") is None, reason="the sanitizers' build is by GCC"
)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(sanitizer: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "SANITIZER": sanitizer}
    done = subprocess.run(
        [SANITIZE, "4000", "20000"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count(" 0 wrong") == 4, done.stderr[
        -3000:
    ]


def test_without_the_extension_there_is_a_reason_and_the_same_pixels() -> None:
    code = (
        "import sys; sys.modules['_raypipe_kernel'] = None\n"
        "from raypipe.transform.decode.jpeg import open_for_crop, why_no_kernel\n"
        "assert open_for_crop(b'', False) is None\n"
        "print(why_no_kernel())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("not built, or its libjpeg-turbo is missing"), (
        done.stderr
    )


class Other:
    """An extension that differs in one thing."""

    INTERFACE_VERSION = INTERFACE_VERSION

    @staticmethod
    def to_seekable(data: bytes) -> bytes:
        return data

    @staticmethod
    def run(images: list[Any], *_: Any) -> bytes:
        return bytes(len(images))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "its libjpeg-turbo gives other pixels than simplejpeg's"),
        ({"INTERFACE_VERSION": 0}, "built from another version of raypipe"),
        (
            {"to_seekable": lambda _: int("no")},
            "its libjpeg-turbo gives other pixels than simplejpeg's",
        ),
    ],
)
def test_an_extension_that_disagrees_is_not_used(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    other = type(
        "Changed",
        (Other,),
        {name: staticmethod(v) if callable(v) else v for name, v in change.items()},
    )
    monkeypatch.setitem(sys.modules, "_raypipe_kernel", other)  # type: ignore[arg-type]
    assert why_no_kernel.__wrapped__().startswith(reason)


def test_a_user_without_it_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jpeg, "why_no_kernel", lambda: "not built")
    assert (
        "not built" in missing_extension()
        and "apt-get install gcc libjpeg-dev" in missing_extension()
    )
    monkeypatch.setattr(jpeg, "why_no_kernel", lambda: "")
    assert missing_extension() == ""
