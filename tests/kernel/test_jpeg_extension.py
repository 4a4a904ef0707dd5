"""The compiled decoder: its usual way by AVX2, that of all other JPEGs, and its fuzzer.

    csrc/jpeg_baseline.h, jpeg_samples.h    without libjpeg
    csrc/jpeg_crop.h, jpeg_huffman.h        by libjpeg, but for its Huffman codes
    .ci/sanitize, fuzz/fuzz_kernel.py    damaged files, by all levels of vector instructions

What needs it is skipped where it is not built, and says so.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from fuzz_kernel import fuzz
from PIL import Image

from raypipe.errors import SampleError
from raypipe.kernel import native, why_no_kernel
from raypipe.transform.decode import jpeg
from raypipe.transform.decode.jpeg import decode_box, missing_extension
from raypipe.transform.decode.rgb import decode

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


def encode(image: np.ndarray, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).convert(mode).save(out, "JPEG", **options)
    return out.getvalue()


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


@pytest.fixture(params=[0, 2], ids=["libjpeg", "avx2"])
def simd(request: pytest.FixtureRequest) -> Iterator[None]:
    """The most vector instructions that the kernel may use: its own decoder is by AVX2."""
    module = pytest.importorskip("_raypipe_kernel")
    module.set_simd(request.param)
    yield
    module.set_simd(2)


@needs_extension
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_kinds_of_codes_give_the_pixels_of_simplejpeg(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, simd: None
) -> None:
    monkeypatch.setattr(
        jpeg, "decode_jpeg_at", lambda *a: pytest.fail("decoded by simplejpeg")
    )
    for make, (height, width) in itertools.product(
        (noise, smooth), [(8, 8), (61, 77), (130, 95)]
    ):
        image = make(height, width)
        for mode, subsampling in [
            ("L", None),
            *(("RGB", subsampling) for subsampling in SUBSAMPLINGS),
        ]:
            data = encode(
                image,
                mode,
                **options,
                **({"subsampling": subsampling} if subsampling else {}),
            )
            assert_pixels_of_simplejpeg(data)


@needs_extension
@pytest.mark.parametrize("step", [2, 5, 8, 16, 40, 100, 255])
@pytest.mark.parametrize("contrast", [8, 64, 255])
def test_samples_out_of_range_are_those_of_simplejpeg(
    contrast: int, step: int, monkeypatch: pytest.MonkeyPatch, simd: None
) -> None:
    """Coefficients are multiplied by more than the encoder divided them by, up to where 16 bits overflow."""
    monkeypatch.setattr(
        jpeg, "decode_jpeg_at", lambda *a: pytest.fail("decoded by simplejpeg")
    )
    image = (128 + (noise(64, 80) / 255 - 0.5) * contrast).astype(np.uint8)
    for subsampling in SUBSAMPLINGS:
        data = bytearray(encode(image, quality=100, subsampling=subsampling))
        for table in (0, 1):
            at = data.index(b"\xff\xdb\x00\x43" + bytes([table])) + 5
            data[at : at + 64] = bytes([step]) * 64
        assert_pixels_of_simplejpeg(bytes(data))


@needs_extension
@pytest.mark.parametrize("seed", range(4))
def test_a_block_without_an_end_and_a_run_that_leaves_one(
    seed: int, monkeypatch: pytest.MonkeyPatch, simd: None
) -> None:
    """Codes of the standard's first AC table: a run of 0 and a value of 1 bit is 00, 3 is 111010, 16 zeros are
    11111111001, the end is 1010. A DC difference of 0 is 00. All stand where two of them are looked up at once.
    """
    monkeypatch.setattr(
        jpeg, "decode_jpeg_at", lambda *a: pytest.fail("decoded by simplejpeg")
    )
    rng, num_blocks = np.random.default_rng(seed), 600
    bits = []
    for _ in range(num_blocks):
        num = int(rng.integers(56, 64))
        bits += ["00", *(f"00{bit}" for bit in rng.integers(0, 2, num))]
        if num < 63:
            bits.append(str(rng.choice(["1010", "1110100", "1110101", "11111111001"])))
            if bits[-1][:3] == "111" and num < 60:
                bits[-1] = "1010"  # the run would stay inside
    stream = "".join(bits)
    stream += "1" * (-len(stream) % 8)
    codes = (
        int(stream, 2).to_bytes(len(stream) // 8, "big").replace(b"\xff", b"\xff\x00")
    )
    plain = encode(np.zeros((8, 8 * num_blocks, 3), np.uint8), "L")
    scan = plain.index(b"\xff\xda") + 10
    assert_pixels_of_simplejpeg(plain[:scan] + codes + b"\xff\xd9")


@needs_extension
def test_it_accepts_only_the_damaged_bytes_that_simplejpeg_does() -> None:
    accepted, refused, wrong = fuzz(0, 4000)
    assert not wrong and accepted > 100 and refused > 1000


@needs_extension
def test_another_revision_of_jfif_is_refused_as_by_simplejpeg(simd: None) -> None:
    from _raypipe_kernel import decode_crop

    data = bytearray(encode(smooth(40, 50)))
    out = np.zeros((40, 50 + 39, 3), np.uint8)
    assert data[6:11] == b"JFIF\0"
    for revision in (1, 0, 2):
        data[11] = revision
        for decoded in (
            lambda: decode_crop(bytes(data), 0, 0, 50, 40, True, out, 50 + 39),
            lambda: simplejpeg.decode_jpeg(bytes(data), "RGB"),
        ):
            if revision == 1:
                decoded()
            else:
                with pytest.raises(ValueError, match="unknown JFIF revision"):
                    decoded()


@needs_extension
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_no_sampling_factors_in_a_header_end_the_process(
    subsampling: str, simd: None
) -> None:
    from _raypipe_kernel import decode_crop

    image, out = (
        encode(noise(40, 52), subsampling=subsampling),
        np.zeros((40, 52 + 39, 3), np.uint8),
    )
    factors = image.index(b"\xff\xc0") + 11
    for value in range(256):
        data = image[:factors] + bytes([value]) + image[factors + 1 :]
        with contextlib.suppress(ValueError):
            decode_crop(data, 0, 0, 52, 40, True, out, 52 + 39)


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


@needs_extension
def test_a_whole_image_is_decoded_by_it_and_what_it_refuses_by_simplejpeg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode(smooth(50, 60), quality=90)
    pixels = decode(data)
    damaged = data[: len(data) // 2]
    monkeypatch.setattr(
        "raypipe.transform.decode.jpeg.decode_jpeg_at",
        lambda *a: pytest.fail("decoded by simplejpeg"),
    )
    assert (
        np.array_equal(decode(data), pixels)
        and pixels.flags.writeable
        and pixels.flags.c_contiguous
    )
    monkeypatch.undo()
    with pytest.raises(SampleError, match="truncated JPEG"):
        decode(damaged)
    monkeypatch.setattr(jpeg, "why_no_kernel", lambda: "not built")
    assert np.array_equal(decode(data), pixels)


@needs_extension
@pytest.mark.parametrize(
    "arguments",
    [
        *[
            (5, 5, 0, 4),
            (5, 5, 4, 0),
            (0, 0, 65, 4),
            (0, 0, 4, 65),
            (64, 0, 1, 1),
            (0, 64, 1, 1),
            (61, 61, 4, 4),
        ],
        *[
            (2**32 - 1, 0, 4, 4),
            (0, 0, 2**32 - 1, 1),
            (0, 0, 1, 2**31),
            (70_000, 0, 1, 1),
        ],
    ],
)
def test_a_box_outside_of_the_image_is_refused(
    arguments: tuple[int, int, int, int],
) -> None:
    from _raypipe_kernel import decode_crop

    data = simplejpeg.encode_jpeg(noise(64, 64), 90, "RGB", "420")
    for columns in (120, 1, 0):
        out = np.zeros(
            (arguments[3] if arguments[3] < 1000 else 1, columns, 3), np.uint8
        )
        with pytest.raises(ValueError, match=r"crop|out has"):
            decode_crop(data, *arguments, True, out, columns)
    with pytest.raises(ValueError, match="no such crop"):
        decode_crop(data, 0, 0, 4, 0, True, np.zeros((4, 50, 3), np.uint8), 50)
    with pytest.raises(ValueError, match="too few columns"):
        decode_crop(data, 15, 0, 4, 4, True, np.zeros((4, 3, 3), np.uint8), 3)
    with pytest.raises((BufferError, TypeError, ValueError)):
        decode_crop(data, 0, 0, 4, 4, True, bytes(4 * 50 * 3), 50)


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

    INTERFACE_VERSION = native.INTERFACE_VERSION

    @staticmethod
    def decode_crop(data: bytes, *arguments: Any) -> int:
        arguments[-2][:] = 0
        return 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "its libjpeg-turbo gives other pixels than simplejpeg's"),
        ({"INTERFACE_VERSION": 0}, "built from another version of raypipe"),
        (
            {"decode_crop": lambda *_: int("no")},
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
    native.why_missing.cache_clear()
    try:
        assert why_no_kernel.__wrapped__().startswith(reason)
    finally:
        native.why_missing.cache_clear()


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
