"""TIFFs: dtypes, depths, photometries, planes, tiles, compressions, orientations, and what libraries write."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import tifffile
from draw_png import COLORS
from drawn import (
    HEIGHT,
    NEITHER,
    NO_RGB,
    WIDTH,
    Drawn,
    by_opencv,
    image,
    picture,
    saved,
)

ORIENTATION = 274


def written(array: np.ndarray, **options: Any) -> bytes:
    """An array as tifffile writes it."""
    file = io.BytesIO()
    bigtiff, byteorder = options.pop("bigtiff", False), options.pop("byteorder", "<")
    with tifffile.TiffWriter(file, bigtiff=bigtiff, byteorder=byteorder) as tif:
        tif.write(
            array, **{"metadata": None, "photometric": photometric_of(array), **options}
        )
    return file.getvalue()


def photometric_of(array: np.ndarray) -> str:
    return "rgb" if array.ndim == 3 and array.shape[2] in (3, 4) else "minisblack"


def _dtypes() -> Iterator[Drawn]:
    """Each dtype; Pillow has a mode for few of them, and 32 bits have no known range."""
    for dtype, channels in itertools.product(
        ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"), (1, 3)
    ):
        array = picture(channels, dtype)
        refused = frozenset() if dtype in ("u1", "u2") else NO_RGB
        yield Drawn(
            f"{dtype}x{channels}.tif",
            written(array.squeeze()),
            refused=refused,
            truth=array,
        )
        yield Drawn(
            f"{dtype}x{channels}-big-endian.tif",
            written(array.squeeze(), byteorder=">"),
            refused=refused,
            truth=array,
        )
    yield Drawn("bool.tif", written(picture(1)[:, :, 0] > 128))
    yield Drawn(
        "complex.tif", written(picture(1, "f4")[:, :, 0].astype("c8")), refused=NEITHER
    )


def _channels() -> Iterator[Drawn]:
    for channels in (2, 4, 5, 9):
        for dtype in ("u1", "u2", "f4"):
            array = picture(channels, dtype)
            refused = frozenset() if (channels, dtype) == (2, "u1") else NO_RGB
            data = written(array, photometric="minisblack", planarconfig="contig")
            yield Drawn(
                f"{dtype}x{channels}-contiguous.tif", data, refused=refused, truth=array
            )
    for channels, dtype in itertools.product((3, 4), ("u1", "u2")):
        array = picture(channels, dtype)
        data = written(
            np.moveaxis(array, 2, 0), planarconfig="separate", photometric="rgb"
        )
        yield Drawn(f"{dtype}x{channels}-separate.tif", data, truth=array)
    for extra, dtype in itertools.product(
        ("assocalpha", "unassalpha", "unspecified"), ("u1", "u2")
    ):
        array = picture(4, dtype)
        yield Drawn(
            f"{dtype}-{extra}.tif", written(array, extrasamples=[extra]), truth=array
        )
    array = picture(4)
    yield Drawn("cmyk.tif", written(array, photometric="separated"), truth=array)
    for dtype in ("u1", "u2"):
        array = picture(1, dtype)
        yield Drawn(
            f"{dtype}-white-is-0.tif",
            written(array[:, :, 0], photometric="miniswhite"),
            truth=array,
        )
        colors = (COLORS.T.astype(np.uint16) << 8) | 255
        if dtype == "u1":
            yield Drawn(
                "palette.tif",
                written(array[:, :, 0], photometric="palette", colormap=colors),
            )
    yield Drawn("lab.tif", written(picture(), photometric="cielab"), truth=picture())


def _layouts() -> Iterator[Drawn]:
    array = picture(3)
    for name, options in {
        "tiles": {"tile": (16, 16)},
        "tiles-of-one-row": {"tile": (16, 64)},
        "strips-of-one-row": {"rowsperstrip": 1},
        "strips-of-seven-rows": {"rowsperstrip": 7},
        "bigtiff": {"bigtiff": True},
        "bigtiff-big-endian": {"bigtiff": True, "byteorder": ">"},
        "described": {
            "description": "drawn",
            "software": "drawn",
            "datetime": "2026:01:02 03:04:05",
        },
        "profile": {"iccprofile": bytes(200)},
        "resolution": {"resolution": (300, 300), "resolutionunit": 2},
        "own-tag": {"extratags": [(65000, "s", 0, "drawn", True)]},
    }.items():
        refused = NO_RGB if name == "bigtiff-big-endian" else frozenset()
        yield Drawn(
            f"{name}.tif", written(array, **options), refused=refused, truth=array
        )
    for orientation in range(10):
        for dtype in ("u1", "u2"):
            data = written(
                picture(3, dtype), extratags=[(ORIENTATION, "H", 1, orientation, True)]
            )
            yield Drawn(f"orientation-{orientation}-{dtype}.tif", data)
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as tif:
        tif.write(array, photometric="rgb", subifds=1, metadata=None)
        tif.write(array[::2, ::2], photometric="rgb", subfiletype=1, metadata=None)
        tif.write(255 - array, photometric="rgb", metadata=None)
    yield Drawn("pages.tif", file.getvalue(), truth=array)
    for name, metadata in (("imagej", {"imagej": True}), ("ome", {"ome": True})):
        file = io.BytesIO()
        tifffile.imwrite(file, array, photometric="rgb", **metadata)
        yield Drawn(f"{name}.tif", file.getvalue(), truth=array)


def _compressions() -> Iterator[Drawn]:
    for compression, predictor, dtype in itertools.product(
        ("lzw", "zlib", "packbits", "zstd", "lzma"), (False, True), ("u1", "u2")
    ):
        if predictor and compression == "packbits":
            continue
        array = picture(3, dtype)
        data = written(array, compression=compression, predictor=predictor)
        yield Drawn(
            f"{compression}{'-predicted' * predictor}-{dtype}.tif", data, truth=array
        )
    for compression in ("lzw", "zlib"):
        array = picture(3)
        data = written(array, compression=compression, predictor=True, tile=(16, 32))
        yield Drawn(f"{compression}-tiles.tif", data, truth=array)
        floats = picture(1, "f4")
        data = written(floats[:, :, 0], compression=compression, predictor=True)
        yield Drawn(f"{compression}-floats.tif", data, refused=NO_RGB, truth=floats)
    lossless = {
        "webp": {"lossless": True},
        "jpeg2000": {},
        "jpegxl": {"lossless": True},
        "png": {},
        "lerc": {},
    }
    for compression, arguments in lossless.items():
        data = written(picture(3), compression=compression, compressionargs=arguments)
        yield Drawn(f"{compression}.tif", data, refused=NO_RGB, truth=picture(3))
    yield Drawn(
        "jpeg.tif",
        written(picture(3), compression="jpeg", compressionargs={"level": 90}),
    )
    yield Drawn("jpeg-gray.tif", written(picture(1)[:, :, 0], compression="jpeg"))
    data = written(
        picture(3),
        compression="jpeg",
        compressionargs={"outcolorspace": "YCBCR"},
        photometric="ycbcr",
    )
    yield Drawn("jpeg-ycbcr.tif", data)
    for bits in (1, 2, 3, 4, 5, 6, 7):
        array = picture(1)[:, :, 0] >> (8 - bits)
        refused = NEITHER if bits in (3, 5, 6, 7) else frozenset()
        yield Drawn(
            f"{bits}-bit.tif", written(array, bitspersample=bits), refused=refused
        )
    for bits in (9, 10, 12, 14, 15):
        array = picture(1, np.uint16) >> (16 - bits)
        refused = frozenset() if bits == 12 else NO_RGB
        yield Drawn(
            f"{bits}-bit.tif",
            written(array[:, :, 0], bitspersample=bits),
            refused=refused,
            truth=array,
        )
        yield Drawn(
            f"{bits}-bit-rgb.tif",
            written(picture(3, np.uint16) >> (16 - bits), bitspersample=bits),
            refused=NO_RGB,
            truth=picture(3, np.uint16) >> (16 - bits),
        )


def _by_libraries() -> Iterator[Drawn]:
    for mode in (
        "1",
        "L",
        "LA",
        "P",
        "RGB",
        "RGBA",
        "CMYK",
        "I;16",
        "I",
        "F",
        "YCbCr",
        "LAB",
    ):
        for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"):
            if mode in ("YCbCr", "LAB") and compression != "raw":
                continue
            refused = NO_RGB if mode in ("I", "F") else frozenset()
            name = f"pillow-{mode.lower().replace(';', '-')}-{compression}.tif"
            yield Drawn(
                name,
                saved(image(mode), "TIFF", compression=compression),
                refused=refused,
            )
    for compression in ("group3", "group4", "tiff_ccitt"):
        yield Drawn(
            f"pillow-{compression}.tif",
            saved(image("1"), "TIFF", compression=compression),
        )
    for mode in ("L", "RGB", "YCbCr"):
        yield Drawn(
            f"pillow-{mode.lower()}-jpeg.tif",
            saved(image(mode), "TIFF", compression="jpeg"),
        )
    for channels, dtype in itertools.product((1, 3, 4), ("u1", "u2", "f4", "f8")):
        array = picture(channels, dtype)
        refused = NO_RGB if dtype[0] == "f" else frozenset()
        options = (cv2.IMWRITE_TIFF_COMPRESSION, 1)
        yield Drawn(
            f"opencv-{channels}x{dtype}.tif",
            by_opencv(".tif", array, *options),
            refused=refused,
            truth=array,
        )
    plain = written(picture(3))
    yield Drawn("cut.tif", plain[: len(plain) // 2], refused=NEITHER)
    yield Drawn("cut-in-the-header.tif", plain[:6], refused=NEITHER)
    yield Drawn(
        "1x1.tif",
        written(picture(3, height=1, width=1)),
        truth=picture(3, height=1, width=1),
    )
    assert picture().shape[:2] == (HEIGHT, WIDTH)


def files() -> Iterator[Drawn]:
    """All of them."""
    for part in (_dtypes, _channels, _layouts, _compressions, _by_libraries):
        yield from part()
