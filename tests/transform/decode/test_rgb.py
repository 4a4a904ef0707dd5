from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import bombs
import cv2
import numpy as np
import pytest
import tifffile
from image_files import png_chunk, saved
from PIL import Image

from raypipe.errors import SampleError
from raypipe.transform.decode import limits, rgb
from raypipe.transform.decode.limits import (
    MAX_DECODE_BYTES,
    MAX_PIXELS,
    MAX_SCANNED_PIXELS,
)
from raypipe.transform.decode.rgb import decode, encode_jpeg, resize_short_side

RNG = np.random.default_rng(0)


def picture(height: int = 37, width: int = 53) -> np.ndarray:
    """Smooth colors, so that JPEG has something to work with."""
    return cv2.resize(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8), (width, height))


def by_pillow(data: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def png_bomb(extra: bytes = b"") -> bytes:
    header = png_chunk("IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
    rows = png_chunk("IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + extra + rows + png_chunk("IEND", b"")


LOSSLESS: list[tuple[str, str, dict[str, Any]]] = [
    ("RGB", "PNG", {}),
    ("L", "PNG", {}),
    ("RGB", "PNG", {"dpi": (72, 72)}),
    ("RGBA", "PNG", {}),
    ("LA", "PNG", {}),
    ("P", "PNG", {}),
    ("P", "PNG", {"transparency": bytes(range(40))}),
    ("1", "PNG", {}),
    ("RGB", "WEBP", {}),
    ("RGB", "WEBP", {"lossless": True}),
    ("RGBA", "WEBP", {}),
    ("RGB", "BMP", {}),
    ("L", "BMP", {}),
    ("RGB", "GIF", {}),
    ("RGB", "GIF", {"save_all": True, "append_images": [Image.new("RGB", (9, 9))]}),
    ("RGB", "TIFF", {"compression": "tiff_deflate"}),
]


@pytest.mark.parametrize(
    ("mode", "kind", "options"), LOSSLESS, ids=lambda value: " ".join(value)
)
def test_every_format_but_jpeg_equals_pillow(
    mode: str, kind: str, options: dict[str, Any]
) -> None:
    image = Image.fromarray(picture())
    image = image.quantize(40) if mode == "P" else image.convert(mode.removesuffix("A"))
    if mode.endswith("A"):
        image.putalpha(Image.fromarray(picture()[:, :, 0]))
    data = saved(image, kind, **options)
    found = decode(data)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous and found.flags.writeable
    warnings.simplefilter("ignore")  # Pillow's, of a palette with transparency
    np.testing.assert_array_equal(found, by_pillow(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"progressive": True}, {"quality": 30}]
)
def test_jpeg_equals_pillow_within_rounding(mode: str, options: dict[str, Any]) -> None:
    data = saved(picture(101, 67), "JPEG", mode, **options)
    image = decode(data)
    assert (
        image.dtype == np.uint8 and image.flags.c_contiguous and image.flags.writeable
    )
    assert image.shape == (101, 67, 3)
    assert np.abs(image.astype(int) - by_pillow(data)).max() <= 2


@pytest.mark.parametrize(
    "transform", [0, 2, None]
)  # CMYK, YCCK, and no Adobe marker at all
def test_jpeg_of_four_inks_equals_pillow_within_rounding(transform: int | None) -> None:
    data = saved(picture(), "JPEG", "CMYK")
    at = data.index(b"\xff\xee\0\x0eAdobe")
    marker = b"" if transform is None else data[at : at + 15] + bytes([transform])
    data = data[:at] + marker + data[at + 16 :]
    assert np.abs(decode(data).astype(int) - by_pillow(data)).max() <= 2


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_of_16_bits_keeps_their_high_byte(channels: int) -> None:
    deep = RNG.integers(0, 65536, (9, 11, channels)).astype(np.uint16)
    data = cv2.imencode(".png", deep[:, :, ::-1])[1].tobytes()
    expected = np.broadcast_to(deep >> 8, (9, 11, 3))
    np.testing.assert_array_equal(decode(data), expected)


def test_float_pixels_are_refused_because_their_range_is_unknown() -> None:
    with pytest.raises(SampleError, match="32-bit pixels"):
        decode(saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"))


def test_damaged_exif_does_not_spoil_the_pixels() -> None:
    data = saved(picture(), "JPEG", exif=b"Exif\0\0garbage" * 3)
    np.testing.assert_array_equal(decode(data, exif=True), decode(data))


@pytest.mark.parametrize("shape", [(400, 500), (500, 400), (301, 999)])
@pytest.mark.parametrize("min_side", [20, 37, 75, 100, 150, 200, 250, 400, 1000])
def test_reduced_decoding_stays_at_or_above_min_side(
    shape: tuple[int, int], min_side: int
) -> None:
    data = encode_jpeg(picture(*shape), 90)
    full, reduced = decode(data), decode(data, min_side=min_side)
    short = min(reduced.shape[:2])
    if min(shape) >= 2 * min_side:
        assert min_side <= short <= min(shape) // 2 + 1
        height, width = reduced.shape[:2]
        shrunk = cv2.resize(full, (width, height), interpolation=cv2.INTER_AREA)
        assert np.abs(shrunk.astype(int) - reduced).mean() < 3
    else:
        np.testing.assert_array_equal(full, reduced)


def sized(kind: str, marker: bytes, distance: int, size: bytes) -> bytes:
    """An image that says it has other sides: `size` stands at a distance behind a marker."""
    data = bytearray(saved(picture(), kind))
    start = data.index(marker) + distance
    data[start : start + len(size)] = size
    return bytes(data)


CANVAS = b"VP8X\x0a\0\0\0\x02\0\0\0" + 2 * (60000 - 1).to_bytes(3, "little")
# Tags of a TIFF's directory: width and height, each one number of 32 bits.
TIFF_SIDES = b"".join(struct.pack("<HHII", tag, 4, 1, 60000) for tag in (256, 257))
BOMBS = {
    "PNG": png_bomb,
    "PNG with metadata": lambda: png_bomb(png_chunk("tEXt", b"a\0b")),
    "JPEG": lambda: sized("JPEG", b"\xff\xc0", 5, struct.pack(">HH", 60000, 60000)),
    "GIF": lambda: sized("GIF", b"GIF", 6, struct.pack("<HH", 60000, 60000)),
    "BMP": lambda: sized("BMP", b"BM", 18, struct.pack("<ii", 60000, 60000)),
    "TIFF": lambda: sized("TIFF", struct.pack("<H", 256), 0, TIFF_SIDES),
    "WebP": lambda: b"RIFF\x16\0\0\0WEBP" + CANVAS,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_size_limit_holds_before_any_pixel_is_allocated(kind: str) -> None:
    bomb = BOMBS[kind]()
    tracemalloc.start()
    with pytest.raises(
        SampleError, match=f"declares 60000x60000 pixels, limit is {MAX_PIXELS}"
    ):
        decode(bomb)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0"}])
def test_an_image_may_have_as_many_pixels_as_the_limit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    webp = saved(picture(), "WEBP", **options)
    monkeypatch.setattr(limits, "MAX_PIXELS", 1960)
    with pytest.raises(SampleError, match="declares 53x37 pixels, limit is 1960"):
        decode(webp)
    monkeypatch.setattr(limits, "MAX_PIXELS", 1961)
    assert decode(webp).shape == (37, 53, 3)


OVER_A_LIMIT = {
    "canvas of an animation": (
        lambda: bombs.animated_webp(16383, 10900),
        "declares 16383x10900 .* 3235 MiB",
    ),
    "tile larger than its image": (
        lambda: bombs.tiled_tiff(1, 20000),
        "declares 1x1 .* MiB",
    ),
    "scans": (lambda: bombs.jpeg_of_scans(13000, 13000, 100), "more than 16 scans"),
    "rows of one pixel": (
        lambda: bmp(1, 170_000_000),
        "1x170000000 pixels, limit of a side is 1048576",
    ),
    "rows of an animation": (
        lambda: bombs.animated_webp(1, 1 << 24),
        "1x16777216 pixels, limit of a side",
    ),
    "coefficients of three components": (
        lambda: progressive(13000, 12000),
        "declares 13000x12000 .* MiB",
    ),
}
LOOK = """
import json, resource, sys
from pathlib import Path
from raypipe.transform.decode.rgb import decode, image_size
from raypipe.errors import SampleError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

data, before, found = Path(sys.argv[1]).read_bytes(), peak(), []
for look in (image_size, decode):
    try:
        look(data)
        found.append("")
    except SampleError as error:
        found.append(str(error))
print(json.dumps({"found": found, "mib": (peak() - before) / 1024}))
"""


def look(path: Path, **options: Any) -> dict[str, Any]:
    """What a process finds that looks at an image, and the memory that it takes."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        **options,
    )
    return json.loads(done.stdout)


def bmp(width: int, height: int) -> bytes:
    """Runs of no pixels, for which no data need be there."""
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 2, 0, 0, 1, 0)
    return (
        b"BM" + struct.pack("<IHHI", 60, 0, 0, 58) + header + bytes(4) + bytes([0, 1])
    )


def progressive(width: int, height: int) -> bytes:
    """A JPEG that says it is in several scans, and has the first."""
    data = bytearray(saved(picture(), "JPEG", progressive=True, subsampling=0))
    at = data.index(b"\xff\xc2") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("name", OVER_A_LIMIT)
def test_limits_hold_for_all_that_a_decoder_would_allocate_or_go_through(
    name: str, tmp_path: Path
) -> None:
    make, reason = OVER_A_LIMIT[name]
    (tmp_path / "image").write_bytes(make())
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # noqa: E731
    looked = look(tmp_path / "image", preexec_fn=limit)
    assert all(re.search(reason, found) for found in looked["found"])
    assert looked["mib"] < 100


def test_many_scans_and_tiles_around_small_images_are_read() -> None:
    assert decode(bombs.jpeg_of_scans(640, 480, 882)).shape == (480, 640, 3)
    assert decode(bombs.tiled_tiff(1, 256)).tolist() == [[[0, 0, 0]]]
    assert decode(bombs.animated_webp(50, 40)).shape == (40, 50, 3)


def test_what_stands_between_scans_hides_none() -> None:
    side, most = 6000, MAX_SCANNED_PIXELS // 6000**2
    scans = bombs.jpeg_of_scans(side, side, most + 1)
    at = scans.index(b"\xff\xda")
    for hidden in (b"\xff\xff\xff", b"\xff\x01", b"\xff\xfe\0\x06\xff\xd9\xff\xc0"):
        with pytest.raises(SampleError, match=f"more than {most} scans"):
            decode(scans[:at] + hidden + scans[at:])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "mode", "pixel_bytes", "options"),
    [
        ("JPEG", "RGB", 6, {"subsampling": 0}),
        ("JPEG", "RGB", 9, {"subsampling": 0, "progressive": True}),
        ("JPEG", "CMYK", 15, {"subsampling": 0, "progressive": True}),
        ("PNG", "RGB", 6, {}),
        ("PNG", "RGBA", 8, {}),
        ("PNG", "P", 6, {}),
        ("WEBP", "RGB", 19, {"lossless": True}),
        ("TIFF", "RGB", 8, {"compression": "tiff_deflate"}),
        ("TIFF", "RGB", 12, {"compression": "jpeg"}),
        ("GIF", "P", 6, {}),
    ],
)
def test_the_largest_image_of_each_kind_takes_a_gibibyte(
    kind: str, mode: str, pixel_bytes: int, options: dict[str, Any], tmp_path: Path
) -> None:
    width = 10_000
    image = Image.new(mode, (width, MAX_DECODE_BYTES // pixel_bytes // width))
    image.save(tmp_path / "image", kind, **options)
    looked = look(tmp_path / "image")
    assert looked["found"] == ["", ""]
    assert looked["mib"] < (MAX_DECODE_BYTES >> 20) + 64  # rows, tables and libraries


def test_a_rare_subsampling_is_decoded_by_pillow() -> None:
    for data in (bombs.rare_jpeg(), bombs.rare_jpeg()[:-2] + b"\xff\xd9\0"):
        np.testing.assert_array_equal(decode(data), by_pillow(data))
        assert np.abs(decode(data).astype(int) - [255, 165, 0]).max() <= 2
        assert decode(data, exif=True, min_side=8).shape == (32, 16, 3)
    with pytest.raises(SampleError, match="truncated JPEG"):
        decode(bombs.rare_jpeg()[:-20])


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_pillows_own_warning_of_large_images_stays_silent(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(picture(), kind, "1")
    # the picture has 1961; from 2001 it is an error
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert decode(data).shape == (37, 53, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_at_any_length_is_an_error_and_never_gray_rows(kind: str) -> None:
    data = saved(picture(), kind)
    for length in sorted(set(np.linspace(1, len(data) - 24, 60).astype(int))):
        with pytest.raises(SampleError):
            decode(data[:length])
    for length in range(len(data) - 24, len(data)):
        # the last bytes may hold checksums, end marks, no pixels
        with contextlib.suppress(SampleError):
            np.testing.assert_array_equal(decode(data[:length]), decode(data))


def test_truncated_jpeg_says_so() -> None:
    data = saved(picture(), "JPEG")
    with pytest.raises(
        SampleError, match=r"^truncated JPEG: Premature end of JPEG file \(\d+ bytes\)$"
    ):
        decode(data[:-20])


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch trapped",)


def test_pickles_are_named_and_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SampleError) as caught:
        decode(pickle.dumps(Trap(), protocol=4))
    reason = "not an image: starts with 80 04 95 (a Python pickle; raypipe never unpickles stored values)"
    assert str(caught.value) == reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "no value"),
        (b"", r"empty value \(0 bytes\)"),
        (memoryview(b""), r"empty value \(0 bytes\)"),
        (b"hello", r"not an image: starts with 68 65 6c$"),
        (b"<!DOCTYPE html>", "not an image: starts with 3c 21 44 .*failed download"),
        ("a/path.jpg", "the value is a str, not bytes"),
        (b"\xff\xd8\xff", "JPEG"),
        (b"BM", "BMP"),
        (b"GIF89a", "GIF"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"RIFF\0\0\0\0WEBP", "WebP"),
        (b"II*\0", "TIFF"),
    ],
)
def test_reasons_name_what_is_wrong(data: Any, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        decode(data)


@pytest.mark.parametrize("shape", [(100, 200), (201, 100), (50, 50), (40, 3)])
def test_resize_short_side_shrinks_and_never_enlarges(shape: tuple[int, int]) -> None:
    image = picture(*shape)
    small = resize_short_side(image, 50)
    if min(shape) <= 50:
        assert small is image
    else:
        assert min(small.shape[:2]) == 50
        assert abs(max(small.shape[:2]) - 50 * max(shape) / min(shape)) <= 0.5


def gray_alpha(extra: str) -> bytes:
    out = io.BytesIO()
    pixels = np.arange(96, dtype=np.uint8).reshape(6, 8, 2) + 100
    pixels[..., 1] = 255
    options = {"photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(out, pixels, extrasamples=[extra], **options)
    return out.getvalue()


@pytest.mark.parametrize("extra", ["unassalpha", "assocalpha", "unspecified"])
def test_gray_with_alpha_is_gray_in_a_tiff(extra: str) -> None:
    pixels = decode(gray_alpha(extra))
    assert (pixels == np.arange(100, 196, 2).reshape(6, 8, 1)).all()


def test_a_bigtiff_of_motorola_is_not_called_damaged() -> None:
    out = io.BytesIO()
    tifffile.imwrite(out, np.zeros((6, 8, 3), np.uint8), bigtiff=True, byteorder=">")
    with pytest.raises(SampleError, match=r"^BigTIFF with the highest .*decode='arr"):
        decode(out.getvalue())


@pytest.mark.parametrize("side", [20, 75, 150])
def test_pillow_shrinks_nearly_as_opencv_does(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = picture(301, 400)
    by_opencv = resize_short_side(image, side)
    monkeypatch.setattr(rgb, "cv2", None)
    by_pillow = resize_short_side(image, side)
    assert np.abs(by_opencv.astype(int) - by_pillow).max() <= 3
