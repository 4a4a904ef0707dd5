"""PNGs: metadata and further frames change nothing, in any of the ways that an image is decoded.

JPEGs are in test_jpeg_header.py; limits of all kinds in test_rgb.py.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from image_files import png_chunk, saved
from jpeg_headers import exif
from PIL import Image, ImageOps, PngImagePlugin

from raypipe.errors import SampleError
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.rgb import decode, image_size
from raypipe.transform.targets import decode_mask

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
MASK = np.random.default_rng(1).integers(0, 5, (12, 20), np.uint8)
METADATA = [
    "eXIf",
    "tEXt",
    "zTXt",
    "iTXt",
    "tIME",
    "iCCP",
    "cICP",
    "gAMA",
    "cHRM",
    "sRGB",
    "sBIT",
    "pHYs",
]
METADATA += ["bKGD", "hIST", "sPLT", "acTL", "fcTL", "fdAT"]


def with_chunk(png: bytes, extra: bytes, behind: bool = False) -> bytes:
    """Behind the header, or behind the pixels."""
    at = len(png) - 12 if behind else 33
    return png[:at] + extra + png[at:]


def all_ways(png: bytes) -> list[np.ndarray]:
    assert image_size(png) == image_size(png, exif=True) == PIXELS.shape[:2]
    return [
        decode(png),
        decode(png, exif=True),
        decode(png, min_side=4),
        decode_array(png),
    ]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", METADATA)
def test_broken_metadata_spoils_no_png(kind: str, behind: bool) -> None:
    png, mask = saved(PIXELS, "PNG"), saved(MASK, "PNG")
    for body in (b"", b"garbage", bytes(40), b"XML:com.adobe.xmp\0\0\0\0\0garbage"):
        for broken in (png_chunk(kind, body), png_chunk(kind, body, checksum=1)):
            for image in all_ways(with_chunk(png, broken, behind)):
                assert np.array_equal(image, PIXELS)
            assert np.array_equal(
                decode_mask(with_chunk(mask, broken, behind), MASK.shape), MASK
            )


@pytest.mark.parametrize(
    "kind", ["IDAT", "PLTE", "tRNS", "IEND", "iDAT", "pLTE", "ABCD", "xyZw"]
)
def test_a_wrong_checksum_of_pixels_is_damage(kind: str) -> None:
    wrong = png_chunk(kind, b"\0\0\0\0\0\0", checksum=1)
    for decoder in (decode, decode_array):
        with pytest.raises(SampleError, match="checksum"):
            decoder(with_chunk(saved(PIXELS, "PNG"), wrong))
    with pytest.raises(SampleError, match="checksum"):
        decode_mask(with_chunk(saved(MASK, "PNG"), wrong), MASK.shape)


def animated(is_hidden: bool, mode: str) -> tuple[bytes, Image.Image]:
    """An animation, whose frames begin with the picture that stands first, or do without it."""
    first, *others = (
        Image.fromarray(np.roll(PIXELS, number, 0)).convert(mode) for number in range(3)
    )
    frames = {"append_images": others, "default_image": is_hidden}
    return saved(first, "PNG", save_all=True, **frames), first


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_an_animation_is_its_picture_for_programs_without_animations(
    is_hidden: bool, mode: str
) -> None:
    png, first = animated(is_hidden, mode)
    assert b"acTL" in png
    expected = np.asarray(first.convert("RGB"))
    assert np.array_equal(decode(png), expected)
    array = decode_array(png)
    assert np.array_equal(
        array[..., :3] if mode != "L" else np.repeat(array, 3, 2), expected
    )


@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 are not defined
@pytest.mark.parametrize("form", ["eXIf", "eXIf behind", "XMP", "profile", "WebP"])
def test_metadata_turns_an_image_as_pillow_turns_it(
    form: str, orientation: int
) -> None:
    turning, png = exif(orientation), saved(PIXELS, "PNG")
    if form.startswith("eXIf"):
        png = with_chunk(png, png_chunk("eXIf", turning[6:]), behind="behind" in form)
    elif form == "WebP":
        png = saved(PIXELS, "WEBP", lossless=True, exif=turning)
    elif form == "XMP":
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", f'<x tiff:Orientation="{orientation}"/>')
        png = saved(PIXELS, "PNG", pnginfo=info)
    else:
        text = f"\nexif\n{len(turning):8}\n{turning.hex()}\n".encode()
        png = with_chunk(png, png_chunk("tEXt", b"Raw profile type exif\0" + text))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(png))))
    assert np.array_equal(decode(png, exif=True), expected)
    assert np.array_equal(decode(png), PIXELS)
    assert image_size(png, exif=True) == expected.shape[:2]


def test_broken_exif_spoils_no_webp() -> None:
    webp = saved(PIXELS, "WEBP", lossless=True, exif=b"Exif\0\0garbage")
    assert np.array_equal(decode(webp, exif=True), PIXELS)
