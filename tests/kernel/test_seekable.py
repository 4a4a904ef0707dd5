"""Seekable JPEGs: the pixels of the original from any crop, and damage found wherever it is.

csrc/jpeg_seek.h, crc32.h         the layout, and the checksum, which is that of zlib
csrc/jpeg_transcode.h             from any JPEG that the kernel decodes
"""

from __future__ import annotations

import io
from collections.abc import Callable

import cv2
import numpy as np
import pytest
import simplejpeg
from fuzz_drawn import wild
from fuzz_files import forged
from fuzz_kernel import fuzz_seekable, sealed
from image_files import saved
from PIL import Image

from raypipe import kernel
from raypipe.errors import SampleError
from raypipe.kernel import DONE, Job, Op, is_seekable
from raypipe.transform.decode import jpeg
from raypipe.transform.decode.jpeg import check_checksum, decode_box
from raypipe.transform.decode.rgb import decode

pytestmark = pytest.mark.skipif(
    bool(kernel.why_no_kernel()), reason=f"no kernel: {kernel.why_no_kernel()}"
)

RNG = np.random.default_rng(32)
EXIF = Image.Exif()
EXIF[0x0112], EXIF[0x010E] = 6, "a description"
ICC = RNG.bytes(70_000)  # of two segments


def noise(height: int, width: int) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    return cv2.resize(
        noise(height // 9 + 2, width // 9 + 2),
        (width, height),
        interpolation=cv2.INTER_CUBIC,
    )


def by_simplejpeg(sampling: str) -> Callable[[np.ndarray], bytes]:
    return lambda pixels: simplejpeg.encode_jpeg(pixels, 88, "RGB", sampling)


KINDS: dict[str, Callable[[np.ndarray], bytes]] = {
    "4:2:0": lambda pixels: saved(pixels, quality=90),
    "4:2:2": lambda pixels: saved(pixels, subsampling="4:2:2"),
    "4:4:4": lambda pixels: saved(pixels, subsampling="4:4:4", quality=100),
    "4:4:0": by_simplejpeg("440"),
    "4:1:1": by_simplejpeg("411"),
    "gray": lambda pixels: saved(pixels, "JPEG", "L"),
    "progressive": lambda pixels: saved(pixels, progressive=True, quality=85),
    "progressive 4:4:4": lambda pixels: saved(
        pixels, progressive=True, subsampling="4:4:4"
    ),
    "progressive gray": lambda pixels: saved(pixels, "JPEG", "L", progressive=True),
    "RGB": lambda pixels: saved(pixels, keep_rgb=True),
    "optimized": lambda pixels: saved(pixels, optimize=True, quality=30),
    "restarts": lambda pixels: saved(pixels, restart_marker_blocks=3),
    "EXIF and ICC": lambda pixels: saved(
        pixels, exif=EXIF, icc_profile=ICC, comment=b"a comment"
    ),
    "EXIF alone": lambda pixels: without_jfif(saved(pixels, exif=EXIF)),
}


def without_jfif(data: bytes) -> bytes:
    assert data[2:4] == b"\xff\xe0"
    return data[:2] + data[20:]


def random_box(height: int, width: int) -> tuple[int, int, int, int]:
    top, left = int(RNG.integers(height)), int(RNG.integers(width))
    return (
        top,
        left,
        int(RNG.integers(1, height - top + 1)),
        int(RNG.integers(1, width - left + 1)),
    )


def crop_job(num: int, box: tuple[int, int, int, int]) -> Job:
    params = np.tile(np.array([1, *box], np.int64), (num, 1))
    out = np.zeros((num, *box[2:], 3), np.uint8)
    return Job(np.array([[Op.CROP, 0]], np.int32), params, out)


def run(data: bytes, box: tuple[int, int, int, int]) -> np.ndarray | None:
    """A box by the kernel, which decodes it alone; None: it refuses the file."""
    job = crop_job(1, box)
    return job.out[0] if kernel.run([data], [job])[0] == DONE else None


@pytest.mark.parametrize("simd", [0, 2], indirect=True)
@pytest.mark.parametrize("make", [smooth, noise])
@pytest.mark.parametrize("kind", KINDS)
def test_all_crops_of_all_kinds_are_those_of_the_original(
    kind: str, make: Callable[[int, int], np.ndarray], simd: int
) -> None:
    """Without vector instructions by libjpeg, with them without it."""
    for height, width in RNG.integers(1, 150, (3, 2)).tolist():
        data = KINDS[kind](make(height, width))
        seekable = kernel.to_seekable(data)
        whole = simplejpeg.decode_jpeg(data, "RGB")
        assert np.array_equal(simplejpeg.decode_jpeg(seekable, "RGB"), whole)
        for _ in range(5):
            box = random_box(height, width)
            top, left, rows, columns = box
            part = run(seekable, box)
            assert part is not None, (whole.shape, box)
            expected = whole[top : top + rows, left : left + columns]
            assert np.array_equal(part, expected), (whole.shape, box)


@pytest.mark.parametrize("kind", ["4:2:0", "gray", "RGB", "progressive", "EXIF alone"])
def test_a_cut_or_flipped_byte_anywhere_is_a_bad_sample(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seekable = kernel.to_seekable(KINDS[kind](smooth(70, 45)))
    damaged = [seekable[:at] for at in range(len(seekable))]
    for at in range(len(seekable)):
        flipped = bytearray(seekable)
        flipped[at] ^= int(RNG.integers(1, 256))
        damaged.append(bytes(flipped))
    box = (0, 0, 5, 5)
    statuses = kernel.run(damaged, [crop_job(len(damaged), box)])
    assert (statuses != DONE).all() and run(seekable, box) is not None
    for reason in (jpeg.why_no_kernel(), "not built"):
        monkeypatch.setattr(jpeg, "why_no_kernel", lambda reason=reason: reason)
        for data in damaged:
            with pytest.raises(SampleError):
                decode(data)


@pytest.mark.parametrize("size", [None, 16])
def test_the_message_names_the_checksum(size: int | None) -> None:
    seekable = kernel.to_seekable(saved(smooth(64, 80)))
    damaged = seekable[:-9] + b"\x5a" + seekable[-8:]
    for action in (
        lambda: decode(damaged, min_side=size),
        lambda: decode_box(damaged, (0, 0, 8, 8)),
        lambda: check_checksum(damaged),
    ):
        with pytest.raises(
            SampleError, match=r"its checksum is wrong .*convert the original again"
        ):
            action()


@pytest.mark.parametrize("kind", KINDS)
def test_any_program_reads_it_with_all_that_the_original_has(kind: str) -> None:
    data = KINDS[kind](smooth(61, 77))
    seekable = kernel.to_seekable(data)
    assert is_seekable(seekable) and not is_seekable(data)
    before, after = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(seekable))
    assert np.array_equal(np.asarray(before), np.asarray(after))
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    images = [
        cv2.imdecode(np.frombuffer(file, np.uint8), flags) for file in (data, seekable)
    ]
    assert np.array_equal(*images)
    assert before.getexif() == after.getexif()
    for name in ("icc_profile", "exif", "comment"):
        assert before.info.get(name) == after.info.get(name)
    assert after.layers == before.layers and "progressive" not in after.info


def test_it_is_the_same_when_it_is_made_twice() -> None:
    for make in KINDS.values():
        seekable = kernel.to_seekable(make(smooth(61, 77)))
        assert kernel.to_seekable(seekable) == seekable == sealed(seekable)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        saved(smooth(40, 40), "JPEG", "CMYK"),
        saved(smooth(40, 40))[:-40],
        saved(smooth(64, 64), progressive=True)[:-300] + b"\xff\xd9",
        cv2.imencode(".png", smooth(9, 9))[1].tobytes(),
    ],
    ids=["nothing", "no more than a start", "CMYK", "cut short", "lacks scans", "PNG"],
)
def test_what_the_kernel_does_not_decode_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        kernel.to_seekable(data)


def test_forged_places_are_refused_or_those_of_the_file() -> None:
    data = kernel.to_seekable(saved(noise(100, 60)))
    whole, num_taken = simplejpeg.decode_jpeg(data, "RGB"), 0
    for number in range(400):
        part = run(forged(data, np.random.default_rng(number)), (40, 0, 60, 60))
        num_taken += part is not None
        assert part is None or np.array_equal(part, whole[40:])
    assert num_taken < 200


@pytest.mark.parametrize("num_comment", [0, 3000, 5000, 60_000])
def test_what_the_encoder_refuses_in_the_middle_is_refused(num_comment: int) -> None:
    """Coefficients that baseline codes cannot hold, when the output has outgrown the encoder's first buffer."""
    data = wild(np.random.default_rng(0), num_comment)
    assert simplejpeg.decode_jpeg(data, "RGB").shape == (40, 52, 3)
    for _ in range(5):
        if num_comment:
            with pytest.raises(ValueError, match="DCT coefficient out of range"):
                kernel.to_seekable(data)
        else:
            assert np.array_equal(decode(kernel.to_seekable(data)), decode(data))


def test_a_damaged_file_does_not_get_a_new_checksum() -> None:
    data = kernel.to_seekable(saved(noise(64, 64)))
    with pytest.raises(ValueError, match="its checksum is wrong"):
        kernel.to_seekable(data[:-9] + b"\x5a" + data[-8:])


def test_mutated_files_do_no_harm() -> None:
    accepted, refused, wrong = fuzz_seekable(0, 1500)
    assert not wrong and accepted > 500 and refused > 300
