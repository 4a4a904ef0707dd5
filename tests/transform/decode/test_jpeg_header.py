"""One header, whoever reads it: the kernel, libjpeg in simplejpeg and in Pillow, and raypipe's own walk.

What is compared is what is accepted, with which size, orientation and pixels; fuzz/jpeg_headers.py
changes each segment, marker, table and number of headers in turn. csrc/jpeg_header.h is compared with
jpeg_header.py.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator

import imagecodecs
import jpeg_headers
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps
from tiers import all_but_one_in_system

from raypipe import kernel
from raypipe.errors import SampleError
from raypipe.kernel import Op
from raypipe.transform.decode import jpeg
from raypipe.transform.decode.jpeg import decode_box, open_for_crop
from raypipe.transform.decode.jpeg_header import jpeg_orientation, jpeg_size
from raypipe.transform.decode.limits import MAX_PIXELS
from raypipe.transform.decode.rgb import decode, image_size

needs_extension = pytest.mark.skipif(
    bool(kernel.why_no_kernel()), reason=f"no kernel: {kernel.why_no_kernel()}"
)
BOX = (3, 5, 8, 9)


@contextlib.contextmanager
def simd(level: int) -> Iterator[None]:
    import _raypipe_kernel as module

    module.set_simd(level)
    try:
        yield
    finally:
        module.set_simd(99)


def pixels(data: bytes) -> tuple[np.ndarray | None, ...]:
    """Of each way to decode: as stored, upright, small, and as a box of it; None: refused."""
    made = list[np.ndarray | None]()
    for options in ({}, {"exif": True}, {"min_side": 12}):
        try:
            made.append(decode(data, **options))
        except SampleError:
            made.append(None)
    with contextlib.suppress(SampleError):
        size = jpeg_size(data)
        made.append(decode_box(data, (0, 0, *size)) if size else None)
    return tuple(made)


def by_kernel(data: bytes) -> np.ndarray | None:
    """A box by the call for micro-batches."""
    height, width = BOX[2:]
    out = np.zeros((1, height, width, 3), np.uint8)
    job = kernel.Job(
        np.array([[Op.CROP, 0]], np.int32), np.array([[1, *BOX]], np.int64), out
    )
    return out[0] if kernel.run([data], [job])[0] == kernel.DONE else None


def equal(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    return (
        first is second
        if first is None or second is None
        else np.array_equal(first, second)
    )


@needs_extension
@pytest.mark.parametrize("kind", all_but_one_in_system(jpeg_headers.ORIGINALS))
def test_a_header_means_the_same_with_and_without_the_extension(kind: str) -> None:
    original = jpeg_headers.ORIGINALS[kind]()
    num_accepted, num_by_kernel, num = 0, 0, 0
    for what, data in jpeg_headers.changed(original):
        with pytest.MonkeyPatch.context() as without_extension:
            without_extension.setattr(jpeg, "why_no_kernel", lambda: "not built")
            expected = pixels(data)
            size = None
            with contextlib.suppress(SampleError):
                size = image_size(data)
        for level in (0, 2):
            with simd(level):
                found = pixels(data)
                crop, (sizes, may_turn) = by_kernel(data), kernel.sizes([data])
            assert len(found) == len(expected) and all(map(equal, found, expected)), (
                what,
                level,
            )
            if crop is not None:
                whole = expected[0]
                assert whole is not None, (
                    what,
                    level,
                    "is accepted by the kernel alone",
                )
                top, left, height, width = BOX
                assert np.array_equal(
                    crop, whole[top : top + height, left : left + width]
                ), (what, level)
                assert whole.shape[:2] == tuple(sizes[0]) == size, (what, level)
                assert may_turn[0] or jpeg_orientation(data) == 1, what
                num_by_kernel += level == 0
        num_accepted += expected[0] is not None
        num += 1
    assert num > 500
    assert num_accepted > num / 10
    assert num_by_kernel > num / 20 or kind == "CMYK"


@pytest.mark.parametrize("kind", ["420", "progressive", "CMYK"])
def test_no_changed_header_hides_or_makes_an_orientation_from_pillow(kind: str) -> None:
    for what, data in jpeg_headers.changed(jpeg_headers.ORIGINALS[kind]()):
        try:
            upright = decode(data, exif=True)
            image = Image.open(io.BytesIO(data))
            expected = ImageOps.exif_transpose(image)
        except Exception:  # one of them refuses the pixels or, garbage as EXIF, Pillow refuses the metadata
            continue
        assert (upright.shape[1], upright.shape[0]) == expected.size, what


@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 are not defined
@pytest.mark.parametrize("metadata", [jpeg_headers.exif, jpeg_headers.xmp])
def test_exif_and_xmp_turn_a_jpeg_as_pillow_turns_it(
    metadata, orientation: int
) -> None:
    original = jpeg_headers.saved(subsampling="4:4:4")
    data = (
        original[:2] + jpeg_headers.segment(0xE1, metadata(orientation)) + original[2:]
    )
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(decode(data, exif=True), expected)
    assert image_size(data, exif=True) == expected.shape[:2]
    assert kernel.sizes([data])[1][0] or not kernel.available()
    is_opened = open_for_crop(data, exif=True) is not None
    assert is_opened == (orientation not in range(2, 9) and kernel.available())


PIXELS = np.random.default_rng(0).integers(0, 256, (96, 80, 3), np.uint8)
FRAMES = {
    "lossless RGB": lambda: imagecodecs.jpeg_encode(PIXELS, lossless=True),
    "lossless gray": lambda: imagecodecs.ljpeg_encode(
        np.ascontiguousarray(PIXELS[..., 0])
    ),
    "lossless 5-bit": lambda: imagecodecs.jpeg_encode(
        PIXELS >> 3, lossless=True, bitspersample=5
    ),
    "lossless 16-bit": lambda: imagecodecs.jpeg_encode(
        PIXELS.astype(np.uint16) << 8, lossless=True, bitspersample=16
    ),
    "12-bit": lambda: imagecodecs.jpeg_encode(
        PIXELS.astype(np.uint16) << 4, bitspersample=12
    ),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_that_cannot_be_scaled_are_decoded_whole_or_refused(kind: str) -> None:
    """simplejpeg writes beyond its buffer where it is to scale a lossless frame."""
    data = FRAMES[kind]()
    assert jpeg_size(data) is None
    assert open_for_crop(data, exif=False) is None
    assert not kernel.sizes([data])[0].any()
    if kind in ("lossless RGB", "lossless gray"):
        expected = PIXELS if kind == "lossless RGB" else PIXELS[..., [0, 0, 0]]
        assert np.array_equal(decode(data), expected)
        assert np.array_equal(decode(data, min_side=12), expected)
    else:
        with pytest.raises(SampleError, match=f"{kind.split()[-1]}.*JPEG"):
            decode(data, min_side=12)


def test_no_kind_of_frame_is_given_to_a_decoder_at_a_scale_but_the_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode_jpeg = simplejpeg.decode_jpeg
    scaled = set()

    def spied(data: bytes, *args: object, **options: int) -> np.ndarray:
        if options.get("min_height"):
            scaled.add((marker, bits))
        return decode_jpeg(data, *args, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spied)
    original = jpeg_headers.saved()
    at = original.index(b"\xff\xc0")
    for marker in set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}:
        for bits in (2, 8, 12, 16):
            data = bytearray(original)
            data[at + 1], data[at + 4] = marker, bits
            with contextlib.suppress(SampleError):
                decode(bytes(data), min_side=12)
    assert scaled == {(0xC0, 8), (0xC1, 8), (0xC2, 8)}


@needs_extension
def test_a_header_that_shows_two_sizes_is_of_one_or_refused() -> None:
    """FF FF E1: to libjpeg a fill byte and a segment; once to the kernel a segment FF of 57,600 bytes."""
    real, shown = (
        jpeg_headers.saved(),
        simplejpeg.encode_jpeg(PIXELS[:32, :48].copy(), 60, "RGB", "420"),
    )
    head = shown[2 : len(shown) - len(jpeg_headers.parts_of(shown)[1])]
    data = b"\xff\xd8\xff\xff\xe1\0\4ab" + real[2:]
    data += bytes(2 + 2 + 0xE100 - len(data)) + head + b"\0\0"
    assert kernel.sizes([data])[0].tolist() == [[0, 0]]
    assert by_kernel(data) is None
    assert np.array_equal(decode(data), decode(real))


@needs_extension
def test_kernel_and_python_have_the_same_limits() -> None:
    def declared(height: int, width: int) -> bytes:
        data = bytearray(jpeg_headers.saved(subsampling="4:4:4"))
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
        return bytes(data)

    photo = declared(12288, 16384)
    assert kernel.sizes([photo])[0].tolist() == [[12288, 16384]]
    assert jpeg_size(photo) == (12288, 16384)
    side = MAX_PIXELS // 16384
    assert jpeg_size(declared(side, 16384)) == (side, 16384)
    assert kernel.sizes([declared(side, 16384)])[0].any()
    over = declared(side + 1, 16384)
    assert not kernel.sizes([over])[0].any()
    with pytest.raises(SampleError, match=f"limit is {MAX_PIXELS}"):
        jpeg_size(over)
