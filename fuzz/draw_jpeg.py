"""JPEGs: frames, samplings, color spaces, depths, markers, and what libraries write."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Iterator

import cv2
import imagecodecs
import numpy as np
import simplejpeg
from draw_png import exif, xmp
from drawn import NEITHER, Drawn, by_opencv, image, picture, saved
from PIL import Image

SOI, EOI = b"\xff\xd8", b"\xff\xd9"


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def with_segments(data: bytes, *segments: bytes) -> bytes:
    """A JPEG with segments behind its first marker."""
    return SOI + b"".join(segments) + data[2:]


def app1(orientation: int, order: str = ">") -> bytes:
    return segment(0xE1, b"Exif\0\0" + exif(orientation, order))


def _frames() -> Iterator[Drawn]:
    for sampling, progressive in itertools.product(
        ("444", "422", "420"), (False, True)
    ):
        name = f"{sampling}{'-progressive' * progressive}"
        data = saved(
            image(),
            "JPEG",
            subsampling=":".join(f"{sampling}"),
            progressive=progressive,
        )
        yield Drawn(f"pillow-{name}.jpg", data)
        yield Drawn(
            f"pillow-{name}-restarts.jpg",
            saved(
                image(),
                "JPEG",
                subsampling=":".join(sampling),
                progressive=progressive,
                restart_marker_rows=1,
            ),
        )
    for mode, progressive in itertools.product(("L", "CMYK"), (False, True)):
        name = f"pillow-{mode.lower()}{'-progressive' * progressive}.jpg"
        yield Drawn(name, saved(image(mode), "JPEG", progressive=progressive))
    for sampling in ("444", "422", "420", "440", "411", "Gray"):
        pixels = picture(1 if sampling == "Gray" else 3)
        space = "GRAY" if sampling == "Gray" else "RGB"
        yield Drawn(
            f"simplejpeg-{sampling.lower()}.jpg",
            simplejpeg.encode_jpeg(pixels, 90, space, sampling),
        )
    for sampling in ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1)):
        for space in ("YCBCR", "RGB"):
            # Of RGB all components have as many samples.
            if space == "RGB" and sampling != (1, 1):
                continue
            data = imagecodecs.jpeg8_encode(
                picture(), 90, outcolorspace=space, subsampling=sampling
            )
            yield Drawn(
                f"imagecodecs-{space.lower()}-{sampling[0]}x{sampling[1]}.jpg", data
            )
    for space in ("CMYK", "YCCK"):
        data = imagecodecs.jpeg8_encode(
            picture(4), 90, colorspace="CMYK", outcolorspace=space
        )
        yield Drawn(f"imagecodecs-{space.lower()}.jpg", data)
    for factor in (
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    ):
        yield Drawn(
            f"opencv-{factor:x}.jpg",
            by_opencv(".jpg", picture(), cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor),
        )
    for interval in (1, 3, 100):
        yield Drawn(
            f"opencv-restart-{interval}.jpg",
            by_opencv(".jpg", picture(), cv2.IMWRITE_JPEG_RST_INTERVAL, interval),
        )
    yield Drawn("optimized.jpg", saved(image(), "JPEG", optimize=True))
    for quality in (1, 5, 25, 50, 75, 95, 100):
        yield Drawn(f"quality-{quality}.jpg", saved(image(), "JPEG", quality=quality))
    tables = [[1] * 64, [255] * 64]
    yield Drawn("own-tables.jpg", saved(image(), "JPEG", qtables=tables))
    for height, width in (
        (1, 1),
        (1, 40),
        (40, 1),
        (7, 9),
        (8, 8),
        (16, 16),
        (17, 33),
        (33, 17),
        (64, 64),
    ):
        for sampling in ("444", "420"):
            data = saved(
                image(height=height, width=width),
                "JPEG",
                subsampling=":".join(sampling),
            )
            yield Drawn(f"{height}x{width}-{sampling}.jpg", data)


def _depths() -> Iterator[Drawn]:
    """Lossless frames, and those of more than 8 bits, which nobody's RGB is made of but those of 8 bits."""
    for predictor in range(1, 8):
        data = imagecodecs.jpeg8_encode(picture(), lossless=True, predictor=predictor)
        yield Drawn(f"lossless-8-predictor-{predictor}.jpg", data)
    yield Drawn(
        "lossless-8-gray.jpg",
        imagecodecs.jpeg8_encode(picture(1)[:, :, 0], lossless=True),
    )
    for bits in (2, 5, 10, 12, 16):
        pixels = picture(3, np.uint16) >> (16 - bits)
        kept = pixels.astype(np.uint8) if bits <= 8 else pixels
        data = imagecodecs.jpeg8_encode(kept, lossless=True, bitspersample=bits)
        yield Drawn(f"lossless-{bits}.jpg", data, refused=NEITHER)
    for channels in (1, 3):
        pixels = (picture(channels, np.uint16) >> 4).squeeze()
        yield Drawn(
            f"12-bit-{channels}.jpg",
            imagecodecs.jpeg8_encode(pixels, bitspersample=12),
            refused=NEITHER,
        )
    yield Drawn(
        "ljpeg.jpg",
        imagecodecs.ljpeg_encode(picture(1, np.uint16)[:, :, 0], bitspersample=16),
        refused=NEITHER,
    )


def _markers() -> Iterator[Drawn]:
    plain = saved(image(), "JPEG")
    for orientation, order in itertools.product(range(10), "><"):
        name = f"exif-{orientation}-{'big' if order == '>' else 'little'}.jpg"
        yield Drawn(name, with_segments(plain, app1(orientation, order)))
    for mode in ("L", "CMYK"):
        for orientation in (3, 6):
            turned = with_segments(saved(image(mode), "JPEG"), app1(orientation))
            yield Drawn(f"exif-{orientation}-{mode.lower()}.jpg", turned)
    progressive = saved(image(), "JPEG", progressive=True)
    yield Drawn("exif-6-progressive.jpg", with_segments(progressive, app1(6)))
    for orientation in range(1, 9):
        packet = segment(
            0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(orientation).encode()
        )
        yield Drawn(f"xmp-{orientation}.jpg", with_segments(plain, packet))
    yield Drawn(
        "exif-and-xmp.jpg",
        with_segments(plain, app1(6), segment(0xE1, xmp(3).encode())),
    )
    yield Drawn("exif-twice.jpg", with_segments(plain, app1(6), app1(3)))
    yield Drawn(
        "exif-of-pillow.jpg", saved(image(), "JPEG", exif=_exif_with_a_thumbnail())
    )
    for marker in range(0xE0, 0xF0):
        yield Drawn(
            f"app-{marker - 0xE0}.jpg",
            with_segments(plain, segment(marker, b"drawn\0" + bytes(20))),
        )
    yield Drawn("comment.jpg", saved(image(), "JPEG", comment=b"drawn"))
    yield Drawn(
        "comment-of-64-kib.jpg", with_segments(plain, segment(0xFE, bytes(65533)))
    )
    yield Drawn("icc.jpg", saved(image(), "JPEG", icc_profile=bytes(70000)))
    yield Drawn("dpi.jpg", saved(image(), "JPEG", dpi=(300, 300)))
    for transform in (0, 1, 2):
        adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))
        yield Drawn(
            f"adobe-{transform}.jpg", with_segments(plain[:2] + plain[20:], adobe)
        )
    yield Drawn("no-jfif.jpg", plain[:2] + plain[20:])
    fill = plain.replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1)
    yield Drawn("fill-bytes.jpg", fill)
    yield Drawn(
        "fill-bytes-at-the-tables.jpg", plain.replace(b"\xff\xdb", b"\xff\xff\xdb", 1)
    )
    yield Drawn("after-the-end.jpg", plain + b"more")
    yield Drawn("two-in-one.jpg", plain + saved(image("L"), "JPEG"))
    mpo = io.BytesIO()
    image().save(mpo, "MPO", save_all=True, append_images=[image("L").convert("RGB")])
    yield Drawn("mpo.jpg", mpo.getvalue())


def _exif_with_a_thumbnail() -> Image.Exif:
    tags = Image.Exif()
    tags[0x010F] = "drawn"
    tags[0x0112] = 8
    tags.get_ifd(0x8769)[0x9003] = "2026:01:02 03:04:05"
    return tags


def _damaged() -> Iterator[Drawn]:
    plain = saved(image(), "JPEG")
    scan = plain.index(b"\xff\xda")
    yield Drawn("no-end.jpg", plain[:-2], refused=NEITHER)
    yield Drawn("cut.jpg", plain[: (scan + len(plain)) // 2], refused=NEITHER)
    yield Drawn("cut-in-the-header.jpg", plain[:30], refused=NEITHER)
    yield Drawn("no-pixels.jpg", plain[:scan] + EOI, refused=NEITHER)
    yield Drawn(
        "no-tables.jpg", plain.replace(b"\xff\xdb", b"\xff\xfe"), refused=NEITHER
    )
    # those of the standard
    yield Drawn("no-codes.jpg", plain.replace(b"\xff\xc4", b"\xff\xfe"))
    frame = plain.index(b"\xff\xc0")
    for name, at, value in (
        ("no-rows", 5, b"\0\0"),
        ("no-columns", 7, b"\0\0"),
        ("depth-of-9", 4, b"\x09"),
        ("of-no-channel", 9, b"\0"),
    ):
        start = frame + at
        yield Drawn(
            f"{name}.jpg",
            plain[:start] + value + plain[start + len(value) :],
            refused=NEITHER,
        )
    yield Drawn(
        "frame-of-kind-5.jpg",
        plain[:frame] + b"\xff\xc5" + plain[frame + 2 :],
        refused=NEITHER,
    )


def files() -> Iterator[Drawn]:
    """All of them."""
    for part in (_frames, _depths, _markers, _damaged):
        yield from part()
